//! What a layer is to a method: its own part of what was learnt, its own draws, and the cache it is given.

use super::prefill::{every_sparse, sparse};
use super::properties::all_typical;
use super::*;

const N: usize = 700;
const STEPS: usize = 5;

/// Every method's settings as a spec, and how many of the last tokens come one by one.
fn every_method() -> Vec<(Value, usize)> {
    let decode = all_typical().into_iter().map(|decode| (json!({ "decode": decode }), STEPS));
    let prefill = every_sparse().into_iter().map(|prefill| (json!({ "prefill": prefill }), 0));
    decode.chain(prefill).collect()
}

/// The rows that a spec's own method attends for: those that come one by one, or all of a prompt.
fn own(out: &[f32], shape: AttentionShape, decoded: usize) -> &[f32] {
    let from = if decoded > 0 { N - decoded } else { 0 };
    &out[from * shape.q_heads * shape.head_dim..]
}

/// Both layers have the same queries, keys and values: what differs is what was learnt for a layer or drawn in it.
#[test]
fn each_layer_has_its_own_part_of_what_was_learnt_and_its_own_draws() {
    let shape = AttentionShape { layers: 2, ..shape(3, 64, None) };
    let input = Input::random(shape, N);
    let table = "format = 'taper-artefact-1'\nmethod = 'minference'\nmodel = 'random'\n\
                 default = { pattern = 'a_shape', init = 10, local = 100 }\n\
                 [[heads]]\nlayer = 1\nhead = 3\nreads = { pattern = 'block_sparse', blocks = 2 }\n";
    let model = ModelKey { shape, fingerprint: "random".to_owned() };
    let artifacts = random_artifacts(shape).with("minference.toml", table.as_bytes(), &model).unwrap();
    let mut all = every_method();
    all.push((json!({ "prefill": { "method": "minference", "pattern": "file" } }), 0));
    for (spec, decoded) in all {
        let (layers, _) = run_in(&spec, &artifacts, (shape, DType::F32), &input, decoded, usize::MAX);
        let [first, second] = [0, 1].map(|layer| own(&layers[layer], shape, decoded));
        let text = spec.to_string();
        let has = |names: &[&str]| names.iter().any(|name| text.contains(&format!("\"{name}\"")));
        let learnt = has(&["double_sparsity", "hash_attention", "kmeans", "saap", "file"]);
        let drawn = has(&["random_sample", "santa", "vattention"]) && !has(&["hard"])
            || spec["prefill"]["random"] == 2
            || spec == json!({ "prefill": { "method": "bigbird" } });
        assert_eq!(first != second, learnt || drawn, "{spec}");
    }
}

#[test]
fn dense_layers_are_the_first_and_no_others() {
    let shape = AttentionShape { layers: 2, ..shape(3, 64, None) };
    let artifacts = random_artifacts(shape);
    let input = Input::random(shape, N);
    let mut checked = 0;
    for method in catalogue().into_iter().filter(|m| m.parameters["properties"].get("dense_layers").is_some()) {
        let (settings, phase, decoded) = match method.phase {
            "prefill" => (sparse(method.name), "prefill", 0),
            "decode" => (all_typical(), "decode", STEPS),
            _ => continue,
        };
        let settings = settings.into_iter().find(|settings| settings["method"] == method.name).unwrap();
        for dense_layers in 0..3 {
            let mut settings = settings.clone();
            settings["dense_layers"] = json!(dense_layers);
            let layers = |spec: &Value| run_in(spec, &artifacts, (shape, DType::F32), &input, decoded, usize::MAX).0;
            let (dense, spec) = (layers(&json!({})), json!({ phase: settings }));
            for (layer, (out, dense)) in layers(&spec).iter().zip(&dense).enumerate() {
                let error = relative(own(out, shape, decoded), own(dense, shape, decoded));
                assert!((error < 1e-5) == (layer < dense_layers), "{settings}: layer {layer} errs by {error}");
            }
            checked += 1;
        }
    }
    assert!(checked >= 3 * 5, "{checked}");
}

/// Keys and values that half precision holds as they are: no method may tell which type they are cached in.
#[test]
fn a_cache_in_half_precision_is_read_as_it_is() {
    for dtype in [DType::F16, DType::BF16] {
        for head_dim in [64, 128] {
            let shape = shape(3, head_dim, None);
            let artifacts = random_artifacts(shape);
            let rounded = |t: Tensor| t.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap();
            let Input { q, k, v } = Input::random(shape, N);
            let input = Input { q, k: rounded(k), v: rounded(v) };
            for (spec, decoded) in every_method() {
                let of = |cache| {
                    let (layers, sequence) = run_in(&spec, &artifacts, (shape, cache), &input, decoded, usize::MAX);
                    (layers, json!(sequence.usage()))
                };
                let ((half, half_usage), (full, usage)) = (of(dtype), of(DType::F32));
                let error = relative(own(&half[0], shape, decoded), own(&full[0], shape, decoded));
                assert!(error < 1e-5, "{spec}, {dtype:?}, head_dim {head_dim}: {error}");
                assert_eq!(half_usage, usage, "{spec}, {dtype:?}, head_dim {head_dim}");
            }
        }
    }
}

/// A rotary embedding that is stretched with the length, by a factor besides: dynamic NTK and YaRN in one.
struct Stretched(usize);

impl Stretched {
    /// Turns tokens `[n, heads, head_dim]` of a sequence whose prompt is so long.
    fn turned(&self, x: &Tensor, prompt: usize) -> Tensor {
        let (n, heads, d) = x.dims3().unwrap();
        let mut all = x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (position, token) in all.chunks_exact_mut(heads * d).enumerate() {
            let frequencies = self.frequencies(prompt.max(position + 1));
            for x in token.chunks_exact_mut(d) {
                for (i, frequency) in frequencies.iter().enumerate() {
                    let (sin, cos) = (position as f32 * frequency).sin_cos();
                    let (a, b) = (x[i], x[i + d / 2]);
                    x[i] = self.factor() * (a * cos - b * sin);
                    x[i + d / 2] = self.factor() * (b * cos + a * sin);
                }
            }
        }
        Tensor::from_vec(all, (n, heads, d), &Device::Cpu).unwrap()
    }
}

impl Rotary for Stretched {
    fn frequencies(&self, length: usize) -> Vec<f32> {
        let base = 10_000.0 * (1.0 + length as f64 / 100.0);
        (0..self.0 / 2).map(|i| base.powf(-2.0 * i as f64 / self.0 as f64) as f32).collect()
    }

    fn factor(&self) -> f32 {
        1.25
    }

    fn heeds_length(&self) -> bool {
        true
    }
}

/// Which keys each step of sequences with prompts of several lengths reads, all in one batch.
fn read(decode: &Value, shape: AttentionShape, rotary: &dyn Rotary, sequences: &[(usize, &Input)]) -> Vec<Value> {
    let artifacts = random_artifacts(shape);
    let kv = KvShape { layers: 1, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
    let mut pool = KvPool::new(kv, DType::F32, 12 * sequences.len(), &Device::Cpu).unwrap();
    let spec = AttentionSpec::from_json(&json!({ "decode": decode, "trace": true }), "attention", &artifacts).unwrap();
    let spec = Arc::new(spec);
    let mut all: Vec<_> = sequences.iter().map(|&(prompt, _)| Sequence::new(spec.clone(), 5, prompt)).collect();
    for step in 0..=STEPS {
        let tokens = |prompt: usize| if step == 0 { (0, prompt) } else { (prompt + step - 1, 1) };
        let cat = |of: fn(&Input) -> &Tensor| {
            let part = |&(prompt, input): &(usize, _)| of(input).narrow(0, tokens(prompt).0, tokens(prompt).1).unwrap();
            Tensor::cat(&sequences.iter().map(part).collect::<Vec<_>>(), 0).unwrap()
        };
        let spans = all.iter_mut().zip(sequences).map(|(sequence, s)| Span { sequence, tokens: tokens(s.0).1 });
        let mut batch = AttentionBatch::new(shape, rotary, &mut pool, spans.collect()).unwrap();
        batch.attend(0, &cat(|input| &input.q), &cat(|input| &input.k), &cat(|input| &input.v)).unwrap();
        batch.finish().unwrap();
    }
    all.iter().map(|sequence| json!(sequence.usage().trace.unwrap().tokens)).collect()
}

/// Keys in clusters are compared as they were before the rotary embedding, whatever that is and however long each prompt.
#[test]
fn clusters_know_nothing_of_a_rotary_embedding_that_heeds_the_length() {
    let shape = shape(3, 64, None);
    let input = Input::random(shape, N);
    let prompts = [610, 200, 350];
    for method in ["saap", "kmeans"] {
        let decode = json!({ "method": method, "probes": 2, "sink": 2, "window": 20, "dense_layers": 0 });
        let plain: Vec<_> = prompts.iter().map(|&prompt| (prompt, &input)).collect();
        let expected = read(&decode, shape, &Still(64), &plain);
        let rotary = Stretched(64);
        let turned = prompts.map(|prompt| {
            let of = |t: &Tensor| rotary.turned(t, prompt);
            Input { q: of(&input.q), k: of(&input.k), v: input.v.clone() }
        });
        let turned: Vec<_> = prompts.into_iter().zip(&turned).collect();
        let found = read(&decode, shape, &rotary, &turned);
        assert_eq!(found, expected, "{method}");
        assert_ne!(read(&decode, shape, &Still(64), &turned), expected, "{method}: or it says nothing");
    }
}
