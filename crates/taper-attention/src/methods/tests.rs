//! Every method at its limit equals dense, through the same batch that the engine uses.

use super::*;
use crate::artifacts::{Sizes, noise, written};
use crate::{AttentionBatch, AttentionShape, AttentionSpec, LayerAttention, ModelKey, Rotary, Sequence, Span};

mod ahead;
mod behind;
#[cfg(feature = "cuda")]
mod cuda;
mod drafts;
mod golden;
mod hard;
mod layers;
mod limits;
mod prefill;
mod properties;
mod settings;
mod together;
mod trace;
use candle_core::{DType, Device, Tensor};
use serde_json::json;
use taper_kv_cache::{KvPool, KvShape};

/// The plain rotary embedding with base 10,000, for heads of a width.
pub(crate) struct PlainRotary(pub usize);

impl Rotary for PlainRotary {
    fn frequencies(&self, _: usize) -> Vec<f32> {
        (0..self.0 / 2).map(|i| 10_000f64.powf(-2.0 * i as f64 / self.0 as f64) as f32).collect()
    }

    fn factor(&self) -> f32 {
        1.0
    }

    fn heeds_length(&self) -> bool {
        false
    }
}

/// No rotary embedding: what methods that look behind one choose is made of plain vectors.
pub(crate) struct Still(pub usize);

impl Rotary for Still {
    fn frequencies(&self, _: usize) -> Vec<f32> {
        vec![0.0; self.0 / 2]
    }

    fn factor(&self) -> f32 {
        1.0
    }

    fn heeds_length(&self) -> bool {
        false
    }
}

fn random(shape: (usize, usize, usize), seed: u64) -> Tensor {
    let mut next = noise(seed);
    let values: Vec<f32> = (0..shape.0 * shape.1 * shape.2).map(|_| next()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// A safetensors artefact for a method and the model `test`.
pub(crate) fn artifact(method: &str, tensors: &[(String, Tensor)]) -> Vec<u8> {
    written(method, tensors, "test").unwrap()
}

pub(crate) fn key(shape: AttentionShape) -> ModelKey {
    ModelKey { shape, fingerprint: "test".to_owned() }
}

/// Artefacts of every kind, with random content.
pub(crate) fn random_artifacts(shape: AttentionShape) -> Artifacts {
    Artifacts::random(shape, Sizes { clusters: 8, classifier: 16, maps: 16, channels: 8 }).unwrap()
}

/// A sequence's queries `[rows, q_heads, head_dim]`, keys and values `[n, kv_heads, head_dim]`; the rows are its last.
pub(crate) struct Input {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
}

impl Input {
    pub fn random(shape: AttentionShape, n: usize) -> Self {
        Self {
            q: random((n, shape.q_heads, shape.head_dim), 1),
            k: random((n, shape.kv_heads, shape.head_dim), 2),
            v: random((n, shape.kv_heads, shape.head_dim), 3),
        }
    }
}

/// A sequence of `n` random tokens, of which the last `decoded` come one by one; returns all outputs.
fn run(spec: &Value, shape: AttentionShape, (n, decoded): (usize, usize), chunk: usize) -> (Vec<f32>, Sequence) {
    run_on(spec, &random_artifacts(shape), shape, &Input::random(shape, n), decoded, chunk)
}

/// The same on tokens that are given, all of them rows.
pub(crate) fn run_on(
    spec: &Value,
    artifacts: &Artifacts,
    shape: AttentionShape,
    input: &Input,
    decoded: usize,
    chunk: usize,
) -> (Vec<f32>, Sequence) {
    let (mut layers, sequence) = run_in(spec, artifacts, (shape, DType::F32), input, decoded, chunk);
    (layers.swap_remove(0), sequence)
}

/// The same with a cache of a type; what each layer gives for the tokens, which are the same in all of them.
fn run_in(
    spec: &Value,
    artifacts: &Artifacts,
    (shape, cache): (AttentionShape, DType),
    input: &Input,
    decoded: usize,
    chunk: usize,
) -> (Vec<Vec<f32>>, Sequence) {
    let n = input.k.dims()[0];
    let Input { q, k, v } = input;
    let spec = Arc::new(AttentionSpec::from_json(spec, "attention", artifacts).unwrap());
    let kv = KvShape { layers: shape.layers, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
    let mut pool = KvPool::new(kv, cache, n.div_ceil(64), &Device::Cpu).unwrap();
    let mut sequence = Sequence::new(spec, 5, n - decoded);
    let rotary = PlainRotary(shape.head_dim);
    let mut outs = vec![Vec::new(); shape.layers];
    while sequence.len() < n {
        let tokens = sequence.chunk(chunk).max(1);
        let start = sequence.len();
        let part = |t: &Tensor| t.narrow(0, start, tokens).unwrap();
        let spans = vec![Span { sequence: &mut sequence, tokens }];
        let mut batch = AttentionBatch::new(shape, &rotary, &mut pool, spans).unwrap();
        for (layer, outs) in outs.iter_mut().enumerate() {
            let out = batch.attend(layer, &part(q), &part(k), &part(v)).unwrap();
            outs.extend(out.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        }
        batch.finish().unwrap();
    }
    (outs, sequence)
}

pub(crate) fn shape(group: usize, head_dim: usize, window: Option<usize>) -> AttentionShape {
    AttentionShape { layers: 1, q_heads: 2 * group, kv_heads: 2, head_dim, window }
}

pub(crate) fn relative(a: &[f32], b: &[f32]) -> f32 {
    let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

#[test]
fn a_promise_out_of_reach_equals_dense_within_a_models_own_window() {
    let (out, sequence) =
        run(&json!({ "decode": limits::limit("vattention", "decode") }), shape(3, 64, Some(300)), (900, 3), 4096);
    assert_eq!(sequence.usage().decode.dense_heads, Some(3 * 6), "heads that went dense are counted");
    let (dense, _) = run(&json!({}), shape(3, 64, Some(300)), (900, 3), 4096);
    assert!(relative(&out, &dense) < 1e-5);
}

#[test]
fn delta_is_dense_at_its_anchors_and_its_tail_and_moves_the_difference_on_between() {
    let base = json!({ "method": "streaming_llm", "sink": 4, "window": 32 });
    let shape = shape(2, 64, None);
    let n = 1000;
    let (dense, _) = run(&json!({}), shape, (n, 0), 4096);
    let (sparse, _) = run(&json!({ "prefill": base }), shape, (n, 0), 4096);
    let (delta, sequence) =
        run(&json!({ "prefill": { "method": "delta", "gamma": 16, "base": base } }), shape, (n, 0), 4096);
    let width = shape.q_heads * shape.head_dim;
    let row = |x: &[f32], row: usize| x[row * width..(row + 1) * width].to_vec();
    let tail = (n - 128) / 16 * 16;
    for anchor in (0..tail).step_by(16).chain(tail..n) {
        assert!(relative(&row(&delta, anchor), &row(&dense, anchor)) < 1e-5, "row {anchor}");
    }
    assert!(relative(&row(&sparse, 992), &row(&dense, 992)) > 0.1, "the base must differ for this to say anything");
    let expected: Vec<f32> =
        (0..width).map(|c| row(&sparse, 330)[c] + row(&dense, 320)[c] - row(&sparse, 320)[c]).collect();
    assert!(relative(&row(&delta, 330), &expected) < 1e-5, "the anchor's difference moves on");
    // A dense row reads all that its sparse one does: nothing counts twice.
    let dense_row = |p: usize| p >= tail || p.is_multiple_of(16);
    let pairs: usize = (0..n).map(|p| if dense_row(p) { p + 1 } else { (p + 1).min(4 + 32) }).sum();
    let density = pairs as f64 / (n * (n + 1) / 2) as f64;
    let usage = sequence.usage().prefill;
    assert!((usage.density - density).abs() < 1e-9);
    assert_eq!(usage.budget_max, n as u64);
    let distance = |rows: std::ops::Range<usize>, x: &[f32]| {
        let part = rows.start * width..rows.end * width;
        relative(&x[part.clone()], &dense[part])
    };
    // Random values have no drift for the correction to follow, but it must not be lost either.
    assert!(distance(0..tail, &delta) < 2.0 * distance(0..tail, &sparse));
    for same in [json!({ "method": "delta", "gamma": 1 }), json!({ "method": "delta", "base": { "method": "dense" } })]
    {
        let (out, sequence) = run(&json!({ "prefill": same }), shape, (n, 0), 4096);
        assert_eq!((out == dense, sequence.usage().prefill.density), (true, 1.0), "{same}");
    }
}

#[test]
fn without_a_tail_delta_corrects_up_to_the_last_row_whatever_the_chunks() {
    let base = json!({ "method": "streaming_llm", "sink": 4, "window": 32 });
    let (n, shape) = (1000, shape(2, 64, None));
    let width = shape.q_heads * shape.head_dim;
    let row = |x: &[f32], row: usize| x[row * width..(row + 1) * width].to_vec();
    let (dense, _) = run(&json!({}), shape, (n, 0), 4096);
    let (sparse, _) = run(&json!({ "prefill": base }), shape, (n, 0), 4096);
    for (mode, moves) in [("delta", 1.0), ("recompute", 0.0)] {
        let settings = json!({ "method": "delta", "gamma": 16, "tail": 0, "mode": mode, "base": base });
        // A chunk of 999 leaves one row, which is no anchor: it has nothing but what was carried to it.
        for chunk in [4096, 66, 999] {
            let (out, sequence) = run(&json!({ "prefill": settings }), shape, (n, 0), chunk);
            for at in [872, 880, 991, 992, 993, 998, 999] {
                let anchor = at / 16 * 16;
                let moved = if at == anchor { 1.0 } else { moves };
                let (sparse_at, dense, sparse) = (row(&sparse, at), row(&dense, anchor), row(&sparse, anchor));
                let expected: Vec<f32> = (0..width).map(|c| sparse_at[c] + moved * (dense[c] - sparse[c])).collect();
                assert!(relative(&row(&out, at), &expected) < 1e-5, "{mode}, chunks of {chunk}: row {at}");
            }
            let pairs: usize = (0..n).map(|p| if p % 16 == 0 { p + 1 } else { (p + 1).min(4 + 32) }).sum();
            let density = pairs as f64 / (n * (n + 1) / 2) as f64;
            assert!((sequence.usage().prefill.density - density).abs() < 1e-9, "{mode}, chunks of {chunk}");
        }
    }
    assert!(relative(&row(&sparse, 999), &row(&dense, 999)) > 0.1, "or a tail would change nothing");
}

#[test]
fn what_delta_takes_over_is_what_a_prompt_of_another_length_made_of_it() {
    let shape = shape(2, 64, None);
    let width = shape.q_heads * shape.head_dim;
    for (tail, taken) in [(0, 640), (128, 512), (300, 384)] {
        let base = json!({ "method": "streaming_llm", "sink": 4, "window": 32 });
        let spec = json!({ "prefill": { "method": "delta", "gamma": 64, "tail": tail, "base": base } });
        let of = |n: usize| run(&spec, shape, (n, 0), 4096).0;
        let method =
            AttentionSpec::from_json(&spec, "attention", &Artifacts::default()).unwrap().prefill.method.clone();
        // What the pool remembers of the shorter prompt, and what the longer one may have of it.
        assert_eq!((method.reuse(700, 640), method.reuse(1000, taken)), (taken, taken), "tail {tail}");
        assert!(of(700)[..taken * width] == of(1000)[..taken * width], "tail {tail}");
        if tail > 0 {
            assert!(of(700)[taken * width..700 * width] != of(1000)[taken * width..700 * width], "or it says nothing");
        }
    }
}

#[test]
fn rows_before_a_cut_are_those_of_one_shot_bit_for_bit() {
    for prefill in [json!({ "method": "dense" }), json!({ "method": "streaming_llm", "sink": 4, "window": 100 })] {
        let spec = json!({ "prefill": prefill });
        let shape = shape(3, 64, None);
        let (long, _) = run(&spec, shape, (700, 0), 4096);
        let (chunked, _) = run(&spec, shape, (700, 0), 500);
        let width = 500 * shape.q_heads * shape.head_dim;
        assert_eq!(long[..width], chunked[..width], "{prefill}");
    }
}

#[test]
fn choices_beyond_the_context_read_everything_of_it() {
    for top_k in [json!(5000), json!(0.9), json!(0.999)] {
        for tail in ["clt", "hard"] {
            for top in ["oracle", "quest"] {
                let decode = json!({ "method": "vattention", "top_k": top_k, "tail": tail, "top": { "method": top } });
                for n in [3, 90, 300, 700] {
                    let (out, _) = run(&json!({ "decode": decode }), shape(3, 64, None), (n, 2), 4096);
                    let (dense, _) = run(&json!({}), shape(3, 64, None), (n, 2), 4096);
                    assert!(relative(&out, &dense) < 1e-5, "{decode} at {n} tokens");
                }
            }
        }
    }
}

/// Values are drawn in every layer, also in those that the method they are drawn within reads whole.
#[test]
fn values_are_drawn_where_the_method_within_reads_everything() {
    for dense_layers in [0, 1] {
        let within = json!({ "method": "quest", "k": 0.1, "sink": 2, "window": 20, "dense_layers": dense_layers });
        let spec = json!({ "decode": { "method": "santa", "samples": 16, "within": within } });
        let (_, sequence) = run(&spec, AttentionShape { layers: 1, ..shape(3, 64, None) }, (500, 4), 4096);
        let usage = sequence.usage().decode;
        // All keys of a layer that is read whole are scored, and the values of at most sixteen are read in any.
        assert!(usage.budget_max <= 3 * 16, "{usage:?}");
        assert_eq!(usage.scored.is_some_and(|scored| scored >= 1.0), dense_layers == 1, "{usage:?}");
    }
}

#[test]
fn reports_say_what_was_read_and_how_far_off_it_was() {
    let spec = json!({
        "prefill": { "method": "streaming_llm", "sink": 4, "window": 60 },
        "decode": { "method": "oracle_top_k", "k": 0.1, "sink": 4, "window": 60 },
        "audit": true
    });
    let (_, sequence) = run(&spec, shape(3, 64, None), (1000, 10), 4096);
    let usage = sequence.usage();
    assert_eq!((usage.prefill.method, usage.decode.method), ("streaming_llm", "oracle_top_k"));
    assert!((usage.decode.density - 0.164).abs() < 2e-3, "{}", usage.decode.density);
    assert_eq!(usage.decode.budget_max, 164);
    assert_eq!((usage.prefill.scored, usage.decode.scored), (None, Some(1.0)), "the oracle looks at every key");
    assert_eq!(usage.prefill.budget_max, 64);
    let audit = usage.decode.audit.unwrap();
    assert_eq!((audit.heads, audit.over_epsilon), (10 * 6, None));
    assert!(audit.error_mean > 0.0 && audit.error_mean <= audit.error_p99 && audit.error_p99 <= audit.error_max);
    assert_eq!(usage.prefill.audit.unwrap().heads, 990 * 6);
    // Beside all keys, by which the oracle ranks, the bounds of every page of 16.
    let hard = json!({ "decode": { "method": "vattention", "tail": "hard", "top": { "method": "oracle" } } });
    let (_, sequence) = run(&hard, shape(3, 64, None), (1000, 10), 4096);
    let scored = sequence.usage().decode.scored.unwrap();
    assert!((1.0 + 1.0 / 16.0..1.064).contains(&scored), "{scored}");
    // None where sinks and window are all there is.
    let (_, sequence) = run(&hard, shape(3, 64, None), (90, 10), 4096);
    assert_eq!(sequence.usage().decode.scored, Some(1.0));
    let audited = |prefill: Value| {
        let (_, sequence) = run(&json!({ "prefill": prefill, "audit": 0.2 }), shape(3, 64, None), (500, 0), 4096);
        sequence.usage().prefill.audit
    };
    assert!(audited(json!({ "method": "dense" })).is_none(), "it is what others are compared with");
    let audit = audited(json!({ "method": "streaming_llm", "window": 500 })).unwrap();
    // 500 rows at 0.2 with 6 heads each: 100 rows ± 4 standard deviations.
    assert!((64 * 6..136 * 6).contains(&audit.heads), "{}", audit.heads);
    assert!(audit.error_max < 1e-6);
}

/// A first look at two keys may find none of those that are left: then the sample grows, and the promise is made as ever.
#[test]
fn a_head_whose_first_look_finds_no_key_is_promised_too() {
    let shape = shape(1, 64, None);
    let decode = json!({
        "method": "vattention", "epsilon": 0.9, "delta": 0.9, "sink": 250, "window": 250, "top_k": 0, "pilot_tokens": 2,
        "pilot_share": 0, "dense_share": 1, "top": { "method": "quest" }
    });
    let mut input = Input::random(shape, 800);
    input.v = (input.v + 3.0).unwrap();
    let (_, sequence) = run_on(&json!({ "decode": decode }), &Artifacts::default(), shape, &input, 100, 4096);
    let usage = sequence.usage().decode;
    assert!(usage.density < 1.0, "{}: nothing was sampled", usage.density);
    assert_eq!(usage.promise.unwrap().heads, 100 * shape.q_heads as u64);
}

#[test]
fn the_catalogue_has_a_schema_a_source_and_a_sentence_for_every_method() {
    for method in catalogue() {
        assert!(method.parameters["properties"].is_object(), "{}", method.name);
        assert!(method.summary.ends_with('.') && !method.source.is_empty(), "{}", method.name);
        for (name, property) in method.parameters["properties"].as_object().unwrap() {
            assert!(property["description"].is_string(), "{}.{name}", method.name);
            assert!(!property["default"].is_null(), "{}.{name}", method.name);
        }
    }
}

#[test]
fn the_catalogue_says_who_needs_an_artefact_and_who_may_read_one() {
    let of = |needed: bool| {
        let reads = |method: &MethodInfo| method.artifacts.iter().any(|learnt| learnt.needed == needed);
        catalogue().iter().filter(|m| reads(m)).map(|m| format!("{} {}", m.phase, m.name)).collect::<Vec<_>>()
    };
    let learnt = ["double_sparsity", "hash_attention", "kmeans", "saap"];
    let needed: Vec<_> =
        ["decode", "predictor"].iter().flat_map(|phase| learnt.map(|name| format!("{phase} {name}"))).collect();
    assert_eq!(of(true), needed);
    // `kmeans` reads one of two, by its parameter `rope`.
    assert_eq!(of(false), ["prefill minference", "prefill sample_attention", "decode kmeans", "predictor kmeans"]);
}
