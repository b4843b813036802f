//! The model on a CUDA device: there must be one.

use candle_core::{DType, Device};
use serde_json::{Value, json};
use std::sync::Arc;
use taper_attention::method::{Choice, DecodeMethod, DecodeStep, KeyIndex};
use taper_attention::{Artifacts, AttentionBatch, AttentionSpec, Chunk, Place, Sequence, Sizes, Span};
use taper_kernels::cuda::graph_steps;
use taper_kernels::decode::{DecodeRow, Selection};
use taper_kv_cache::{KvPool, KvShape};
use taper_model::{Model, ModelConfig};

/// Small models of other shapes, types and caches: bf16 with head_dim 64 and groups of 3; f16 with 128 and 8; the same of bf16 with groups
/// of 4 and a window of its own, which the longest prompt of these tests leaves behind.
fn models() -> Vec<Run> {
    let device = Device::new_cuda_with_stream(0).expect("the feature `cuda` needs a CUDA device");
    let small = ModelConfig { layers: 3, vocab_size: 304, ..ModelConfig::of_shape("smollm2-135m").unwrap() };
    let of_llama = ModelConfig {
        layers: 2,
        vocab_size: 304,
        hidden_size: 512,
        intermediate_size: 1024,
        q_heads: 16,
        kv_heads: 2,
        ..ModelConfig::of_shape("llama-3.1-8b").unwrap()
    };
    let of_mistral =
        ModelConfig { q_heads: 8, sliding_window: Some(1000), name: "mistral-7b".into(), ..of_llama.clone() };
    [(small, DType::BF16), (of_llama, DType::F16), (of_mistral, DType::BF16)]
        .map(|(config, dtype)| Run { model: Model::random(&config, dtype, &device).unwrap(), dtype })
        .into()
}

/// A model, and the type of its weights and its cache.
struct Run {
    model: Model,
    dtype: DType,
}

impl Run {
    /// A cache of so many blocks.
    fn pool(&self, blocks: usize) -> KvPool {
        let shape = self.model.attention_shape();
        let kv = KvShape { layers: shape.layers, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
        KvPool::new(kv, self.dtype, blocks, self.model.device()).unwrap()
    }
}

/// The last rows' logits, three at most, of a step of so many tokens of each sequence.
fn stepped(model: &Model, pool: &mut KvPool, sequences: Vec<&mut Sequence>, each: usize) -> Vec<Vec<f32>> {
    let count = sequences.len() * each;
    let tokens: Vec<u32> = (0..count).map(|i| ((i + sequences[0].len()) * 7919 % 300) as u32).collect();
    let spans = sequences.into_iter().map(|sequence| Span { sequence, tokens: each }).collect();
    let mut batch = AttentionBatch::new(model.attention_shape(), model.rotary(), pool, spans).unwrap();
    let hidden = model.forward(&tokens, &batch.positions(), &mut batch).unwrap();
    let logits = model.logits(&hidden).unwrap().to_vec2::<f32>().unwrap();
    batch.finish().unwrap();
    logits.into_iter().rev().take(3).collect()
}

/// A method whose rows are all chosen for layer by layer and audited, those too that read what follows from what they see.
#[derive(Debug)]
struct Apart(Arc<dyn DecodeMethod>);

impl DecodeMethod for Apart {
    fn select(&self, step: &DecodeStep) -> candle_core::Result<Choice> {
        self.0.select(step)
    }

    fn promise(&self) -> Option<(f64, f64)> {
        self.0.promise()
    }

    fn reads_all(&self, keys: usize) -> bool {
        self.0.reads_all(keys)
    }

    fn indices(&self) -> Vec<&dyn KeyIndex> {
        self.0.indices()
    }

    fn ahead(&self) -> bool {
        self.0.ahead()
    }

    fn dense_layers(&self) -> usize {
        self.0.dense_layers()
    }

    fn indexed_from(&self) -> usize {
        self.0.indexed_from()
    }

    fn plain(&self, _: &[DecodeRow], _: usize) -> Option<Selection> {
        None
    }
}

/// Three sequences, generated one at a time, two together, and one again: all logits, and what was reported.
fn generated(run: &Run, decode: &Value, artifacts: &Artifacts, audit: bool) -> (Vec<Vec<f32>>, Vec<Value>) {
    let spec = json!({ "decode": decode, "audit": audit });
    let spec = Arc::new(AttentionSpec::from_json(&spec, "attention", artifacts).unwrap());
    let mut pool = run.pool(100);
    let prompts = [100, 250, 4090];
    let mut sequences: Vec<Sequence> = prompts.iter().map(|&n| Sequence::new(Arc::clone(&spec), 1, n)).collect();
    if audit {
        sequences.iter_mut().for_each(|sequence| sequence.decode_around(|method| Arc::new(Apart(method))));
    }
    let mut out = Vec::new();
    let mut step = |sequences: Vec<&mut Sequence>, each| out.extend(stepped(&run.model, &mut pool, sequences, each));
    for (sequence, &n) in sequences.iter_mut().zip(&prompts) {
        step(vec![sequence], n);
    }
    let [a, b, c] = &mut sequences[..] else { unreachable!() };
    for _ in 0..35 {
        step(vec![&mut *a], 1);
    }
    for _ in 0..5 {
        step(vec![&mut *b], 1);
        step(vec![&mut *a, &mut *b], 1);
        // Its tables outgrow what a graph was made for.
        step(vec![&mut *c, &mut *a], 1);
        step(vec![&mut *c], 1);
        // Products of three rows are others.
        step(vec![&mut *c, &mut *b, &mut *a], 1);
    }
    (out, sequences.iter().map(|sequence| json!(sequence.usage())["decode"].clone()).collect())
}

#[test]
fn a_step_by_its_graph_gives_the_same_bits_and_the_same_report() {
    let quest =
        |page: usize| json!({ "method": "quest", "k": 0.2, "sink": 2, "window": 20, "page": page, "dense_layers": 1 });
    let ahead = |mut pages: Value| {
        pages["ahead"] = json!(true);
        pages
    };
    let ranked = |name: &str| json!({ "method": name, "k": 0.2, "sink": 2, "window": 20, "dense_layers": 1 });
    let probing = |name: &str| json!({ "method": name, "probes": 12, "sink": 2, "window": 20, "dense_layers": 1 });
    let oracle = json!({ "method": "oracle_top_k", "k": 0.2, "sink": 2, "window": 20 });
    let sampling = |top: Value| json!({ "method": "vattention", "sink": 16, "window": 16, "top_k": 0.05, "top": top, "pilot_tokens": 16 });
    let drawing =
        |kernel: &str, scores: &str| json!({ "method": "santa", "samples": 32, "kernel": kernel, "scores": scores });
    let methods = [
        json!({ "method": "dense" }),
        json!({ "method": "streaming_llm", "sink": 3, "window": 130 }),
        quest(16),
        // Of the three sequences one stays below, one comes to be beyond, and one always is.
        json!({ "method": "quest", "k": 0.2, "sink": 2, "window": 20, "dense_below": 258 }),
        quest(4),
        quest(64),
        ahead(quest(16)),
        ahead(quest(64)),
        sampling(ahead(json!({ "method": "quest", "page": 64 }))),
        sampling(ahead(json!({ "method": "quest" }))),
        oracle,
        sampling(json!({ "method": "oracle" })),
        sampling(json!({ "method": "quest" })),
        sampling(json!({ "method": "hash_attention" })),
        sampling(json!({ "method": "double_sparsity" })),
        sampling(json!({ "method": "quantized_keys" })),
        sampling(json!({ "method": "saap" })),
        sampling(json!({ "method": "kmeans", "probes": 8, "max_selectivity": 0.3 })),
        json!({ "method": "vattention", "tail": "hard", "sink": 16, "window": 16, "top_k": 0.05, "epsilon": 0.5 }),
        json!({ "method": "santa", "samples": 32 }),
        drawing("prop_lr", "exact"),
        drawing("flash", "exact"),
        drawing("prop", "bernoulli"),
        json!({ "method": "santa", "samples": 32, "within": quest(16) }),
        json!({ "method": "santa", "samples": 32, "within": sampling(json!({ "method": "quest" })) }),
        json!({ "method": "oracle_top_p", "p": 0.7, "sink": 2, "window": 20 }),
        json!({ "method": "random_sample", "rate": 0.1, "sink": 2, "window": 20 }),
        ranked("hash_attention"),
        ranked("double_sparsity"),
        ranked("quantized_keys"),
        probing("saap"),
        probing("kmeans"),
        json!({ "method": "kmeans", "rope": true, "probes": 12, "sink": 2, "window": 20, "max_selectivity": 0.2 }),
    ];
    // A method without a row fails.
    for method in taper_attention::catalogue().iter().filter(|method| method.phase == "decode") {
        assert!(methods.iter().any(|decode| decode["method"] == method.name), "no row for {}", method.name);
    }
    let sizes = Sizes { clusters: 64, classifier: 64, maps: 64, channels: 16 };
    for run in models() {
        let artifacts = Artifacts::random(run.model.attention_shape(), sizes).unwrap();
        let artifacts = artifacts.at(Place::Device);
        let of = format!("{} in {:?}", run.model.config().name, run.dtype);
        for decode in &methods {
            // What is audited goes layer by layer.
            let before = graph_steps();
            let (plain, reported) = generated(&run, decode, &artifacts, true);
            assert_eq!(graph_steps() - before, 0, "{of}, {decode}: audited steps by a graph");
            let before = graph_steps();
            let (by_graph, reported_by_graph) = generated(&run, decode, &artifacts, false);
            let steps = graph_steps() - before;
            println!("{of}, {decode}: {steps} steps of 60 by a graph");
            // Steps in which indices catch up, here every 17th, have graphs of their own.
            let has = |of: &str| decode.to_string().contains(of);
            let least = if has("ahead") {
                15
            } else if has("hash_attention") {
                25
            } else {
                30
            };
            assert!(steps >= least, "{of}, {decode}: {steps} steps by a graph");
            for (i, (a, b)) in plain.iter().zip(&by_graph).enumerate() {
                assert!(a.iter().all(|x| x.is_finite()) && a == b, "{of}, {decode}: row {i}");
            }
            assert_eq!(plain.len(), by_graph.len());
            for (mut a, b) in reported.into_iter().zip(reported_by_graph) {
                assert!(a.as_object_mut().unwrap().remove("audit").is_some(), "{of}, {decode}: not audited");
                assert_eq!(a, b, "{of}");
            }
        }
    }
}

#[test]
fn many_rows_go_by_a_graph_as_well() {
    const ROWS: usize = 20;
    let methods = [
        json!({ "method": "quest", "k": 0.2, "sink": 2, "window": 20, "page": 16 }),
        json!({ "method": "vattention", "sink": 16, "window": 16, "pilot_tokens": 16 }),
        json!({ "method": "quest", "k": 0.2, "sink": 2, "window": 20, "page": 64, "ahead": true }),
    ];
    for (run, decode) in models().iter().flat_map(|run| methods.iter().map(move |decode| (run, decode))) {
        let of = format!("{} in {:?}, {decode}", run.model.config().name, run.dtype);
        let generated = |audit: bool| {
            let spec = json!({ "decode": decode, "audit": audit });
            let spec = Arc::new(AttentionSpec::from_json(&spec, "attention", &Artifacts::default()).unwrap());
            let mut pool = run.pool(8 * ROWS);
            let prompt = |i: usize| 200 + 10 * i;
            let mut sequences: Vec<Sequence> =
                (0..ROWS).map(|i| Sequence::new(Arc::clone(&spec), i as u64, prompt(i))).collect();
            for (i, sequence) in sequences.iter_mut().enumerate() {
                stepped(&run.model, &mut pool, vec![sequence], prompt(i));
            }
            let before = graph_steps();
            let step = |_| stepped(&run.model, &mut pool, sequences.iter_mut().collect(), 1);
            let out: Vec<Vec<f32>> = (0..20).flat_map(step).collect();
            (out, graph_steps() - before)
        };
        let ((plain, none), (by_graph, steps)) = (generated(true), generated(false));
        assert_eq!(none, 0, "{of}");
        assert!(steps >= 10, "{of}: {steps} of 20 by a graph");
        assert!(plain.iter().flatten().all(|x| x.is_finite()) && plain == by_graph, "{of}");
    }
}

/// The last token's hidden state of a prompt, and of one token after it, and what was reported; in one piece, or by so much
/// work at a time.
fn prompted(run: &Run, prefill: &Value, tokens: usize, effort: Option<usize>) -> (Vec<f32>, Value) {
    let model = &run.model;
    let spec = json!({ "prefill": prefill, "decode": { "method": "dense" } });
    let spec = Arc::new(AttentionSpec::from_json(&spec, "attention", &Artifacts::default()).unwrap());
    let shape = model.attention_shape();
    let mut pool = run.pool(tokens / 64 + 1);
    let mut sequence = Sequence::new(spec, 1, tokens);
    let words: Vec<u32> = (0..=tokens).map(|i| (i * 7919 % 300) as u32).collect();
    let mut out = Vec::new();
    while sequence.len() <= tokens {
        let start = sequence.len();
        let count = sequence.chunk(tokens).max(1);
        let words = &words[start..start + count];
        let last = match effort.filter(|_| start < tokens) {
            Some(effort) => {
                let mut chunk = Chunk::new(shape, &mut pool, &mut sequence, count).unwrap();
                let last = model.advance(words, &mut chunk, effort, 1).unwrap();
                chunk.pause();
                sequence.take_in(&mut pool);
                last
            }
            None => {
                let spans = vec![Span { sequence: &mut sequence, tokens: count }];
                let mut batch = AttentionBatch::new(shape, model.rotary(), &mut pool, spans).unwrap();
                let hidden = model.forward(words, &batch.positions(), &mut batch).unwrap();
                batch.finish().unwrap();
                Some(hidden.narrow(0, count - 1, 1).unwrap())
            }
        };
        out.extend(last.map(|last| last.flatten_all().unwrap().to_vec1::<f32>().unwrap()).unwrap_or_default());
    }
    (out, json!(sequence.usage()))
}

#[test]
fn a_chunk_in_slices_gives_what_it_gives_in_one_piece() {
    let sampled = json!({ "method": "sample_attention", "alpha_c": 0.6, "alpha_s": 0.6, "min_tokens": 0 });
    let halves = json!({ "method": "sample_attention", "alpha_c": 0.6, "alpha_s": 0.6, "min_tokens": 0, "chunks": 2 });
    let prefills = [sampled.clone(), halves, json!({ "method": "delta", "base": sampled })];
    for (run, prefill) in models().iter().flat_map(|run| prefills.iter().map(move |prefill| (run, prefill))) {
        let of = format!("{} in {:?}, {prefill}", run.model.config().name, run.dtype);
        for tokens in [1_000, 5_003] {
            let (whole, reported) = prompted(run, prefill, tokens, None);
            for effort in [37, 500, 100_000] {
                let (sliced, in_slices) = prompted(run, prefill, tokens, Some(effort));
                assert_eq!(sliced.len(), whole.len());
                let error: f32 = whole.iter().zip(&sliced).map(|(a, b)| (a - b).powi(2)).sum();
                let error = (error / whole.iter().map(|a| a.powi(2)).sum::<f32>()).sqrt();
                println!("{of}, {tokens} tokens by {effort}: {error}, bits {}", whole == sliced);
                // Products of another number of rows may add in another order, and what is chosen at an edge with them.
                assert!(error < 0.03, "{of}, {tokens} tokens by {effort}: {error}");
                for name in ["density", "scored"] {
                    let value = |usage: &Value| usage["prefill"][name].as_f64().unwrap();
                    let (a, b) = (value(&reported), value(&in_slices));
                    assert!((a - b).abs() <= 0.01 * a.max(b), "{of}: {name} {a} and {b}");
                }
            }
        }
    }
}
