mod prefill;

use super::head::Far;
use super::net::Schedule;
use super::*;
use rand::Rng;
use serde_json::json;
use std::cell::Cell;
use std::sync::Arc;
use taper_attention::{Artifacts, AttentionSpec, ModelKey};
use taper_engine::{Backend, CacheDType, CacheOptions, Input, ModelBackend};
use taper_model::{LoadOptions, ModelFiles, ResolvedModel};

/// Says stop after so many questions.
struct Follow {
    left: Cell<usize>,
    parts: Vec<String>,
}

impl Follow {
    fn new(left: usize) -> Self {
        Self { left: Cell::new(left), parts: Vec::new() }
    }
}

impl Progress for Follow {
    fn stopped(&self) -> bool {
        self.left.set(self.left.get().saturating_sub(1));
        self.left.get() == 0
    }

    fn begins(&mut self, part: &str, _: usize) {
        self.parts.push(part.to_owned());
    }

    fn advance(&mut self) {}
}

const FAR: Far = Far { sink: 1, window: 40, visible: None };

/// A sequence of one KV head and two query heads without a rotary embedding. Keys lie in twelve directions, some of them
/// much longer than others, so that the direction nearest to a query is often not the one that it attends to.
fn planted(seed: u64) -> Captured {
    let (d, tokens) = (16, 700);
    let normal = |rng: &mut ChaCha8Rng| (0..4).map(|_| rng.random_range(-1.0..1.0f32)).sum::<f32>();
    let mut world = ChaCha8Rng::seed_from_u64(99);
    let directions: Vec<Vec<f32>> = (0..12)
        .map(|i| {
            let x: Vec<f32> = (0..d).map(|_| normal(&mut world)).collect();
            let norm = x.iter().map(|x| x * x).sum::<f32>().sqrt();
            x.iter().map(|x| x / norm * if i % 3 == 0 { 9.0 } else { 1.5 }).collect()
        })
        .collect();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let k = (0..tokens).flat_map(|_| {
        let direction = &directions[rng.random_range(0..12)];
        direction.iter().map(|x| x + 0.1 * normal(&mut rng)).collect::<Vec<_>>()
    });
    let k = k.collect();
    let rows: Vec<u32> = (100..tokens as u32).collect();
    let q =
        (0..2).map(|_| rows.iter().flat_map(|_| (0..d).map(|_| 2.0 * normal(&mut rng)).collect::<Vec<_>>()).collect());
    Captured { tokens, head_dim: d, k: vec![k], q: q.collect(), rows, rotary: (vec![0.0; d / 2], 1.0) }
}

fn course(hidden: usize, schedule: Schedule, rng: &mut ChaCha8Rng) -> Course<'_> {
    // A closure that holds nothing is leaked for nothing.
    Course { hidden, schedule, device: &candle_core::Device::Cpu, rng, step: Box::leak(Box::new(|| true)) }
}

#[test]
fn a_trained_classifier_beats_the_centroids_at_equal_selectivity() {
    let (training, held_out) = ([planted(1), planted(2), planted(3)], planted(4));
    let heads: Vec<Head> = training.iter().map(|captured| Head::new(captured, 0)).collect();
    let rng = || ChaCha8Rng::seed_from_u64(5);
    let keys = heads.iter().flat_map(|head| head.keys(false)).collect();
    let rows = cluster(keys, 16, 24, &mut rng()).unwrap().centroids;
    let centroids = &Centroids::new(&rows, 16).unwrap();
    let samples = Samples::of(&heads, &FAR, centroids).unwrap();
    // Every target is a distribution.
    assert!(samples.targets.chunks_exact(24).all(|t| (t.iter().sum::<f32>() - 1.0).abs() < 1e-4));
    let schedule = Schedule { iterations: 150, batch: 300, learning_rate: 5e-3 };
    let train = |iterations, hidden| {
        let schedule = Schedule { iterations, ..schedule };
        Classifier::train(&samples, &rows, 16, &mut course(hidden, schedule, &mut rng())).unwrap().unwrap()
    };
    let trained = train(150, 64);
    assert!(trained.divergence < 0.5 * train(1, 64).divergence, "{}", trained.divergence);
    let mlp = &trained.mlp().unwrap();
    let way = |name, chooser| Way { name, rotated: false, centroids, chooser };
    let ways = [way("classifier", Chooser::Classifier(mlp)), way("centroids", Chooser::Centroids)];
    let found = saap::recalls(&[Head::new(&held_out, 0)], &FAR, &ways).unwrap();
    let [classifier, plain, oracle] = &found[..] else { panic!("{found:?}") };
    for (i, share) in SHARES.iter().enumerate() {
        assert!(classifier.mass[i] > plain.mass[i] + 0.04, "{share}: {found:?}");
        assert!(oracle.mass[i] >= classifier.mass[i] && plain.mass[i] > *share, "{share}: {found:?}");
    }
}

#[test]
fn a_classifier_begins_as_the_centroids_scores() {
    let captured = planted(1);
    let head = Head::new(&captured, 0);
    let rows = cluster(head.keys(false), 16, 24, &mut ChaCha8Rng::seed_from_u64(5)).unwrap().centroids;
    let centroids = &Centroids::new(&rows, 16).unwrap();
    let samples = Samples::of(&[Head::new(&captured, 0)], &FAR, centroids).unwrap();
    // A step so small that it changes nothing.
    let schedule = Schedule { iterations: 1, batch: 300, learning_rate: 1e-9 };
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let trained = Classifier::train(&samples, &rows, 16, &mut course(40, schedule, &mut rng)).unwrap().unwrap();
    let (own, plain) = (trained.mlp().unwrap().forward(&samples.queries), centroids.scores(&samples.queries));
    for (a, b) in own.iter().zip(plain) {
        assert!((a - b / 4.0).abs() < 1e-3, "{a} {}", b / 4.0);
    }
}

#[test]
fn trained_codes_find_the_best_keys() {
    let (training, held_out) = ([planted(1), planted(2), planted(3)], planted(4));
    let heads: Vec<Head> = training.iter().map(|captured| Head::new(captured, 0)).collect();
    let train = |iterations| {
        let schedule = Schedule { iterations, batch: 24, learning_rate: 3e-3 };
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        let maps = hash_attention::Maps::train(&heads, &FAR, &mut course(32, schedule, &mut rng)).unwrap().unwrap();
        hash_attention::recalls(&[(Head::new(&held_out, 0), &maps)], &FAR).unwrap()
    };
    let (before, after) = (train(1), train(120));
    let [codes, oracle, top] = &after[..] else { panic!("{after:?}") };
    for (i, share) in SHARES.iter().enumerate() {
        assert!(codes.mass[i] > before[0].mass[i] + 0.1 && codes.mass[i] > 3.0 * share, "{before:?} {after:?}");
        assert!(top.mass[i] > before[2].mass[i], "{before:?} {after:?}");
        assert!(oracle.mass[i] >= codes.mass[i]);
    }
}

/// A random model of two layers, in a folder.
fn tiny(name: &str) -> ResolvedModel {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../taper-model/tests/golden").join(name);
    ResolvedModel { name: name.into(), files: ModelFiles::Folder(folder) }
}

fn model(name: &str) -> Model {
    Model::load(&tiny(name), &LoadOptions::default(), &candle_core::Device::Cpu).unwrap()
}

fn corpus(length: usize) -> Corpus {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let tokens: Vec<u32> = (0..600).map(|_| rng.random_range(3..64)).collect();
    Corpus::cut("random tokens", &tokens, &[1], CorpusSize { length, sequences: 9 }).unwrap()
}

const NETWORK: Network = Network { hidden: Some(8), iterations: Some(5), batch: Some(20), learning_rate: None };

fn plan(method: Method) -> Plan {
    let (sink, window) = if method.is_prefill() { (None, None) } else { (Some(1), Some(8)) };
    Plan { method, layers: None, queries: 40, sink, window, seed: 7, memory_bytes: 1, resume: false }
}

/// What is not given must be valid beside what is, whatever the model sees.
#[test]
fn defaults_leave_keys_to_learn_from_in_a_window_and_beside_what_is_given() {
    let tokens = vec![5; 2 * 8192];
    let corpus = Corpus::cut("x", &tokens, &[], CorpusSize { length: 8192, sequences: 2 }).unwrap();
    for (method, _) in methods() {
        if method.is_prefill() {
            continue;
        }
        for window in [None, Some(4096), Some(2048), Some(100), Some(16)] {
            let shape = AttentionShape { layers: 2, q_heads: 4, kv_heads: 2, head_dim: 16, window };
            for sink in [None, Some(window.unwrap_or(8192) - 3)] {
                let plan = Plan { sink, window: None, ..plan(method.clone()) };
                let far = plan.check(&shape, &corpus).map(|checked| checked.far);
                let far = far.unwrap_or_else(|error| panic!("{method:?}, {window:?}, {sink:?}: {error}"));
                assert!(!far.range(8191).is_empty(), "{method:?}, {window:?}, {sink:?}: {far:?}");
                let usual = if matches!(method, Method::KMeans { .. } | Method::Saap { .. }) { 2047 } else { 64 };
                assert!(far.window >= usual || window < Some(4096) || sink.is_some(), "{method:?}: {far:?}");
            }
        }
    }
}

/// Every trainer, and a request that reads what it makes.
fn methods() -> [(Method, serde_json::Value); 7] {
    let clusters = Some(4);
    let decode = |mut settings: serde_json::Value| {
        (settings["sink"], settings["window"], settings["dense_layers"]) = (json!(1), json!(8), json!(0));
        json!({ "decode": settings })
    };
    [
        (Method::DoubleSparsity { channels: None }, decode(json!({ "method": "double_sparsity", "k": 4 }))),
        (Method::KMeans { rope: false, clusters }, decode(json!({ "method": "kmeans", "probes": 1 }))),
        (Method::KMeans { rope: true, clusters }, decode(json!({ "method": "kmeans", "probes": 1, "rope": true }))),
        (Method::Saap { clusters, network: NETWORK }, decode(json!({ "method": "saap", "probes": 1 }))),
        (Method::HashAttention { network: NETWORK }, decode(json!({ "method": "hash_attention", "k": 4 }))),
        (Method::MInference { keys: Some(16) }, json!({ "prefill": { "method": "minference", "pattern": "file" } })),
        (
            Method::SampleAttention { cra: 0.9 },
            json!({ "prefill": { "method": "sample_attention", "tuning": "file", "min_tokens": 0 } }),
        ),
    ]
}

/// The density of a method, for some tokens of a prompt and some generated.
fn density(backend: &mut ModelBackend, artifacts: &Artifacts, request: &serde_json::Value) -> f64 {
    let spec = AttentionSpec::from_json(request, "attention", artifacts).unwrap();
    let mut sequence = backend.open(&Arc::new(spec), 1, &[0; 40], 0).unwrap();
    let mut step = |sequence: &mut _, tokens: &[u32]| {
        let mut logits = backend
            .forward(vec![Input::whole(sequence, tokens, Some(taper_engine::Wanted::Logits))])
            .unwrap()
            .remove(0);
        let logits = logits.remove(0).logits().unwrap();
        assert!(logits.iter().all(|x| x.is_finite()));
    };
    step(&mut sequence, &(0..40).map(|i| 3 + i % 50).collect::<Vec<_>>());
    (0..5).for_each(|i| step(&mut sequence, &[20 + i]));
    let usage = backend.usage(&sequence);
    let density = if request["prefill"].is_object() { usage.prefill.density } else { usage.decode.density };
    backend.close(sequence);
    density
}

#[test]
fn what_is_trained_loads_for_its_model_alone_and_serves_requests() {
    // One has a group of two and a plain rotary embedding, the other one's depends on the sequence's length.
    for name in ["llama2-gqa", "dynamic"] {
        let (model, folder) = (model(name), tempfile::tempdir().unwrap());
        for (method, _) in methods() {
            let trained =
                train(&model, &corpus(60), &plan(method), folder.path(), &mut Follow::new(usize::MAX)).unwrap();
            assert_eq!((trained.reports.len(), trained.kept), (model.config().layers, 0));
            let queries = trained.reports.iter().flat_map(|report| {
                report.recalls.iter().map(|r| r.queries).chain(report.kept.iter().map(|k| k.queries))
            });
            assert!(queries.map(|n| usize::from(n > 0)).sum::<usize>() >= model.config().layers, "{trained:?}");
        }
        let key = model.config().key();
        let artifacts = Artifacts::open(folder.path(), &key).unwrap();
        assert_eq!(artifacts.names().len(), 7);
        let other = ModelKey { fingerprint: "another".into(), ..key };
        let foreign = Artifacts::open(folder.path(), &other).unwrap();
        assert_eq!((foreign.names().len(), foreign.foreign().count()), (0, 7));
        let cache = CacheOptions { dtype: Some(CacheDType::F32), ..CacheOptions::default() };
        let (mut backend, _) =
            taper_engine::load(&with_tokenizer(name).1, &LoadOptions::default(), cache, &candle_core::Device::Cpu)
                .unwrap();
        for (method, request) in methods() {
            let density = density(&mut backend, &artifacts, &request);
            // SampleAttention reads whole blocks, and there is but one.
            let most = if matches!(method, Method::SampleAttention { .. }) { 1.0 } else { 0.9 };
            assert!(density > 0.1 && density <= most, "{name} {method:?}: {density}");
        }
    }
}

/// The model with a tokenizer beside it, which loading it for requests needs.
fn with_tokenizer(name: &str) -> (tempfile::TempDir, ResolvedModel) {
    let (folder, from) = (tempfile::tempdir().unwrap(), tiny(name));
    let ModelFiles::Folder(from) = from.files else { panic!("a folder") };
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(from.join(file), folder.path().join(file)).unwrap();
    }
    let tokenizers = std::fs::read_to_string(from.join("../tokenizers/smollm.json")).unwrap();
    let tokenizers: serde_json::Value = serde_json::from_str(&tokenizers).unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), tokenizers["tokenizer"].to_string()).unwrap();
    let model = ResolvedModel { name: name.into(), files: ModelFiles::Folder(folder.path().to_owned()) };
    (folder, model)
}

#[test]
fn a_run_cut_short_goes_on_where_it_was() {
    let (model, corpus) = (model("llama2-gqa"), corpus(60));
    for (method, _) in methods() {
        let run = |folder: &Path, resume, left| {
            let plan = Plan { resume, ..plan(method.clone()) };
            let mut follow = Follow::new(left);
            train(&model, &corpus, &plan, folder, &mut follow).map(|trained| (trained, follow.parts))
        };
        let (whole, cut) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (trained, _) = run(whole.path(), false, usize::MAX).unwrap();
        let bytes = std::fs::read(&trained.file).unwrap();
        let for_all_layers = matches!(method, Method::DoubleSparsity { .. } | Method::SampleAttention { .. });
        // Stopped at ever later moments, until it is done.
        let (mut left, mut kept) = (4, Vec::new());
        let again = loop {
            match run(cut.path(), true, left) {
                Ok((again, _)) => break again,
                Err(error) => assert!(matches!(error, TrainError::Stopped), "{error}"),
            }
            kept.push(std::fs::exists(cut.path().join(trained.file.file_name().unwrap())).unwrap());
            left += 4;
        };
        assert!(kept.contains(&false) && (again.kept == 1 || for_all_layers), "{method:?}");
        let found = std::fs::read(&again.file).unwrap();
        match method.is_prefill() {
            true => assert_eq!(String::from_utf8(found).unwrap(), String::from_utf8(bytes).unwrap(), "{method:?}"),
            false => assert_eq!(header_and_data(&found), header_and_data(&bytes), "{method:?}"),
        }
        assert!(!cut.path().read_dir().unwrap().any(|f| f.unwrap().path().extension().unwrap() == "part"));
        let (third, parts) = run(cut.path(), true, usize::MAX).unwrap();
        assert_eq!((third.kept, parts.len(), &third.reports), (2, 0, &trained.reports));
    }
}

/// The header's fields are in no order.
fn header_and_data(bytes: &[u8]) -> (serde_json::Value, &[u8]) {
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..end]).unwrap(), &bytes[end..])
}

#[test]
fn only_some_layers_and_only_some_queries() {
    let (model, folder) = (model("llama2-gqa"), tempfile::tempdir().unwrap());
    let wanted =
        Plan { layers: Some(vec![1, 1]), queries: 5, ..plan(Method::Saap { clusters: Some(3), network: NETWORK }) };
    let mut follow = Follow::new(usize::MAX);
    let trained = train(&model, &corpus(60), &wanted, folder.path(), &mut follow).unwrap();
    assert_eq!(trained.reports.iter().map(|r| r.layer).collect::<Vec<_>>(), [1]);
    assert_eq!(follow.parts[0], "capturing layer 1");
    assert!(trained.reports[0].recalls.iter().all(|recall| recall.queries <= 5 * 4));
    assert!(Artifacts::open(folder.path(), &model.config().key()).is_ok());
}

#[test]
fn chunks_do_not_show_in_what_is_captured() {
    let model = model("llama2-gqa");
    let tokens: Vec<u32> = (0..60).map(|i| 3 + (i * 7) % 60).collect();
    let shape = model.attention_shape();
    let mut capture = Capture::new(&model, 60).unwrap();
    let mut keep = |wanted: &Wanted| capture.keep(&tokens, &[0, 1], wanted, &|| false).unwrap();
    let all = Wanted { keys: true, rows: (0..60).collect() };
    let (whole, some) = (keep(&all), keep(&Wanted { keys: false, rows: vec![3, 59] }));
    for (whole, some) in whole.iter().zip(&some) {
        let d = shape.head_dim;
        assert!(some.k.iter().all(Vec::is_empty) && whole.k.iter().all(|k| k.len() == 60 * d));
        for (whole, some) in whole.q.iter().zip(&some.q) {
            assert_eq!(*some, [&whole[3 * d..4 * d], &whole[59 * d..]].concat());
        }
    }
    assert_eq!(all.bytes(60, &shape), 4 * (60 * 16 * (2 + 4)));
    // The first layer's keys before the rotary embedding depend on the token alone: 0 and 60 are the same one.
    let long: Vec<u32> = tokens.iter().take(30).chain(tokens.iter().take(30)).copied().collect();
    let kept = capture.keep(&long, &[0], &all, &|| false).unwrap().remove(0);
    let keys = Head::new(&kept, 1).keys(false);
    for (a, b) in keys[..30 * 16].iter().zip(&keys[30 * 16..]) {
        assert!((a - b).abs() < 1e-4, "{a} {b}");
    }
}

#[test]
fn mistakes_name_the_option() {
    let (model, folder) = (model("llama2-gqa"), tempfile::tempdir().unwrap());
    let error = |plan: Plan, length| {
        let done = train(&model, &corpus(length), &plan, folder.path(), &mut Follow::new(usize::MAX));
        done.unwrap_err().to_string()
    };
    let kmeans = |clusters| plan(Method::KMeans { rope: false, clusters: Some(clusters) });
    let network = |network| plan(Method::Saap { clusters: Some(4), network });
    for (plan, says) in [
        (Plan { layers: Some(vec![0, 2]), ..kmeans(4) }, "--layers: the model has no layer 2; valid are 0 to 1"),
        (Plan { layers: Some(Vec::new()), ..kmeans(4) }, "--layers: names no layer"),
        (Plan { window: Some(59), ..kmeans(4) }, "--window: 59 is not valid; valid are 1 to 58"),
        (Plan { sink: Some(59), ..kmeans(4) }, "--sink: 59 is not valid; valid are 0 to 58"),
        (Plan { sink: Some(usize::MAX), ..kmeans(4) }, "--sink: 18446744073709551615 is not valid"),
        (Plan { window: Some(0), ..kmeans(4) }, "--window"),
        (Plan { queries: 0, ..kmeans(4) }, "--queries"),
        (kmeans(0), "--clusters: 0 is not valid; valid are 1 to 480"),
        (kmeans(481), "--clusters"),
        (plan(Method::DoubleSparsity { channels: Some(17) }), "--channels: 17 is not valid; valid are 1 to 16"),
        (
            Plan { layers: Some(vec![0]), ..plan(Method::DoubleSparsity { channels: None }) },
            "--layers: double_sparsity",
        ),
        (plan(Method::MInference { keys: Some(0) }), "--keys: 0 is not valid; valid are 1 to 60"),
        (plan(Method::MInference { keys: Some(61) }), "--keys: 61"),
        (Plan { sink: Some(1), ..plan(Method::MInference { keys: None }) }, "--sink: is of decode methods"),
        (Plan { window: Some(1), ..plan(Method::SampleAttention { cra: 0.9 }) }, "--window: is of decode methods"),
        (plan(Method::SampleAttention { cra: 0.0 }), "--cra: 0 is not valid; valid are numbers above 0, up to 1"),
        (plan(Method::SampleAttention { cra: f64::NAN }), "--cra: NaN"),
        (network(Network { hidden: Some(0), ..NETWORK }), "--hidden"),
        (network(Network { batch: Some(1), ..NETWORK }), "--batch"),
        (network(Network { iterations: Some(0), ..NETWORK }), "--iterations"),
        (network(Network { learning_rate: Some(f64::NAN), ..NETWORK }), "--learning-rate"),
    ] {
        let error = error(plan, 60);
        assert!(error.starts_with(says), "{error}");
    }
    assert!(error(kmeans(4), 65).contains("--length: 65 is beyond the model's context of 64"));
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
}
