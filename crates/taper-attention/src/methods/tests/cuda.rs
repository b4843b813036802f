//! Every decode method on a CUDA device against the CPU: there must be one, a build with the feature has no other way to pass.

mod ahead;
mod offload;

use super::prefill::{every_sparse, over_delta, sparse};
use super::properties::all_typical;
use super::together::chosen_for_together;
use super::*;
use crate::artifacts::{Place, Sizes};
use crate::batch::Replay;
use crate::replay;

const SHAPE: AttentionShape = AttentionShape { layers: 1, q_heads: 6, kv_heads: 2, head_dim: 64, window: None };
const PROMPT: usize = 700;
const STEPS: usize = 6;

/// Artefacts at which every method runs on a device: 16 channels, where others have 8.
fn artifacts(device: &Device) -> Artifacts {
    let all = Artifacts::random(SHAPE, Sizes { clusters: 8, classifier: 16, maps: 16, channels: 16 }).unwrap();
    let place = if device.is_cpu() { Place::Host } else { Place::Device };
    all.at(place)
}

/// Outputs of all rows, of which the last [`STEPS`] are decoded, and what they came to, attended on a device over a cache of
/// bf16; see [`advance`].
fn attended(spec: &Value, input: &Input, device: &Device, joint: bool) -> (Vec<f32>, Value) {
    attended_in(SHAPE, spec, input, device, joint)
}

fn attended_in(shape: AttentionShape, spec: &Value, input: &Input, device: &Device, joint: bool) -> (Vec<f32>, Value) {
    let spec = Arc::new(AttentionSpec::from_json(spec, "attention", &artifacts(device)).unwrap());
    let kv = KvShape { layers: 1, kv_heads: SHAPE.kv_heads, head_dim: SHAPE.head_dim };
    let tokens = input.q.dim(0).unwrap();
    let mut pool = KvPool::new(kv, DType::BF16, tokens.div_ceil(64), device).unwrap();
    let mut sequence = Sequence::new(spec, 5, tokens - STEPS);
    let outs = advance_in(shape, &mut sequence, &mut pool, input, device, joint);
    (outs, json!(sequence.usage()))
}

/// Attends for the rest of the input's rows and returns their outputs; `joint`: from joint projections, as a model of 16-bit
/// weights has them, which are rotated on their way.
fn advance(sequence: &mut Sequence, pool: &mut KvPool, input: &Input, device: &Device, joint: bool) -> Vec<f32> {
    advance_in(SHAPE, sequence, pool, input, device, joint)
}

fn advance_in(
    shape: AttentionShape,
    sequence: &mut Sequence,
    pool: &mut KvPool,
    input: &Input,
    device: &Device,
    joint: bool,
) -> Vec<f32> {
    let (rotary, end) = (PlainRotary(SHAPE.head_dim), input.q.dim(0).unwrap());
    let mut outs = Vec::new();
    while sequence.len() < end {
        // The last four rows come together.
        let tokens = match sequence.chunk(usize::MAX) {
            0 if sequence.len() >= end - 4 => end - sequence.len(),
            tokens => tokens.max(1),
        };
        let start = sequence.len();
        let part = |t: &Tensor| t.narrow(0, start, tokens).unwrap().to_device(device).unwrap();
        let spans = vec![Span { sequence: &mut *sequence, tokens }];
        let mut batch = AttentionBatch::new(shape, &rotary, pool, spans).unwrap();
        let [q, k, v] = [&input.q, &input.k, &input.v].map(part);
        let out = if joint {
            let qkv = [&q, &k, &v].map(|x| x.flatten_from(1).unwrap().to_dtype(DType::BF16).unwrap());
            let angles: Vec<f32> = (start..start + tokens).flat_map(|at| angles(at).concat()).collect();
            let angles = Tensor::from_vec(angles, (tokens, SHAPE.head_dim), device).unwrap();
            let out = batch.attend_joint(0, &Tensor::cat(&qkv, 1).unwrap(), &angles).unwrap();
            out.expect("a device with a cache of 16 bits").to_dtype(DType::F32).unwrap()
        } else {
            batch.attend(0, &q, &k, &v).unwrap()
        };
        batch.finish().unwrap();
        outs.extend(out.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    }
    outs
}

/// Cosines and sines of a position's angles, by the rotary embedding of these tests.
fn angles(position: usize) -> [Vec<f32>; 2] {
    let angles = || PlainRotary(SHAPE.head_dim).frequencies(0).into_iter().map(move |f| position as f32 * f);
    [angles().map(f32::cos).collect(), angles().map(f32::sin).collect()]
}

/// Rounded to what bf16 holds.
fn exact(t: Tensor) -> Tensor {
    t.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap()
}

/// Inputs that bf16 holds exactly, so that both devices see the same.
fn input() -> Input {
    let Input { q, k, v } = Input::random(SHAPE, PROMPT + STEPS);
    Input { q: exact(q), k: exact(k), v: exact(v) }
}

/// Inputs with queries and keys rotated on the host.
fn turned(Input { q, k, v }: &Input) -> Input {
    let turn = |x: &Tensor| {
        let mut rows = x.to_vec3::<f32>().unwrap();
        for (position, row) in rows.iter_mut().enumerate() {
            let [cos, sin] = angles(position);
            for (a, b) in row.iter_mut().map(|head| head.split_at_mut(SHAPE.head_dim / 2)) {
                for (i, (a, b)) in a.iter_mut().zip(b).enumerate() {
                    (*a, *b) = (*a * cos[i] - *b * sin[i], *b * cos[i] + *a * sin[i]);
                }
            }
        }
        let rows = rows.concat().concat();
        exact(Tensor::from_vec(rows, x.dims3().unwrap(), &Device::Cpu).unwrap())
    };
    Input { q: turn(q), k: turn(k), v: v.clone() }
}

#[test]
fn every_decode_method_does_on_a_device_what_it_does_on_the_cpu() {
    let (device, plain) = (Device::new_cuda_with_stream(0).expect("the feature `cuda` needs a CUDA device"), input());
    let input = turned(&plain);
    let mut refused = Vec::new();
    for decode in all_typical() {
        let spec = json!({ "decode": decode, "audit": true });
        if let Err(error) = AttentionSpec::from_json(&spec, "attention", &artifacts(&device)) {
            refused.push(error.path);
            continue;
        }
        let (out, usage) = attended(&spec, &input, &Device::Cpu, false);
        for joint in [false, true] {
            let (cuda, on_cuda) = attended(&spec, if joint { &plain } else { &input }, &device, joint);
            let steps = PROMPT * SHAPE.q_heads * SHAPE.head_dim;
            let error = relative(&cuda[steps..], &out[steps..]);
            // Draws of values, a budget at an edge, or a choice by queries that are rounded to bytes or bf16 may fall
            // otherwise; all others choose the same.
            let loose = matches!(decode["method"].as_str(), Some("santa" | "vattention" | "quantized_keys"));
            let most = if loose { 0.3 } else { 0.05 };
            assert!(error < most, "{decode}, joint {joint}: outputs differ by {error}");
            let field = |usage: &Value, name: &str| usage["decode"][name].as_f64().unwrap_or(0.0);
            for (name, part) in [("density", 0.05), ("scored", 1e-9), ("budget_max", 0.25)] {
                let (a, b) = (field(&usage, name), field(&on_cuda, name));
                assert!((a - b).abs() <= part * a.max(b), "{decode}, joint {joint}: {name} {a} and {b}");
            }
            let (a, b) = (&usage["decode"]["audit"], &on_cuda["decode"]["audit"]);
            assert_eq!(a["heads"], b["heads"], "{decode}");
            // None of `dense`, which is not compared with itself.
            let error = |audit: &Value| audit["error_mean"].as_f64().unwrap_or(0.0);
            let (a, b) = (error(a), error(b));
            assert!((a - b).abs() <= 0.01 + 0.15 * a, "{decode}, joint {joint}: errors {a} and {b}");
        }
    }
    assert!(refused.is_empty(), "{refused:?}");
}

/// S²ANTA as a request may ask for it: within every other method, by tiles of any size, by a few features.
fn santas() -> Vec<Value> {
    let within = all_typical().into_iter().filter(|m| m["method"] != "santa");
    let mut all: Vec<Value> = within
        .enumerate()
        .map(|(i, within)| {
            let scores = if i % 3 == 2 { "bernoulli" } else { "exact" };
            let kernel = ["prop", "prop_lr", "flash"][i % 3];
            json!({
                "method": "santa", "samples": 60, "kernel": kernel, "tile": 50, "scores": scores, "draws": 16,
                "mean_query": true, "within": within
            })
        })
        .collect();
    for (kernel, tile) in [("prop_lr", 100), ("flash", 100), ("prop_lr", 1), ("flash", 37), ("flash", 65_536)] {
        all.push(json!({ "method": "santa", "samples": 64, "kernel": kernel, "tile": tile }));
    }
    all
}

#[test]
fn values_are_drawn_on_a_device_within_every_method_and_in_tiles_of_any_size() {
    let (device, input) = (Device::new_cuda_with_stream(0).expect("the feature `cuda` needs a CUDA device"), input());
    for decode in santas() {
        let spec = json!({ "decode": decode, "audit": true });
        let (out, usage) = attended(&spec, &input, &Device::Cpu, false);
        let (cuda, on_cuda) = attended(&spec, &input, &device, false);
        let steps = PROMPT * SHAPE.q_heads * SHAPE.head_dim;
        let error = relative(&cuda[steps..], &out[steps..]);
        // Queries of a few features are not held exactly by bf16, and budgets may differ by rounding: then some draws fall
        // elsewhere, or come from other keys.
        let (rounded, budgets) = (decode["scores"] == "bernoulli", decode["within"]["method"] == "vattention");
        let most = if budgets {
            1.0
        } else if rounded {
            0.6
        } else {
            0.3
        };
        assert!(error < most, "{decode}: outputs differ by {error}");
        let field = |usage: &Value, name: &str| usage["decode"][name].as_f64().unwrap_or(0.0);
        let near = if budgets { 0.25 } else { 0.1 };
        for name in ["density", "scored", "budget_max"] {
            let (a, b) = (field(&usage, name), field(&on_cuda, name));
            assert!((a - b).abs() <= near * a.max(b), "{decode}: {name} {a} and {b}");
        }
        // Values that are drawn promise nothing, whatever the keys do.
        let promised = |usage: &Value| !usage["decode"]["dense_heads"].is_null();
        assert!(!promised(&usage) && !promised(&on_cuda), "{decode}");
        let error = |usage: &Value| usage["decode"]["audit"]["error_mean"].as_f64().unwrap();
        let (a, b) = (error(&usage), error(&on_cuda));
        assert!((a - b).abs() <= 0.02 + 0.25 * a, "{decode}: errors {a} and {b}");
    }
}

/// At a length, and over keys of which bounds leave little open, where the hard tail samples.
#[test]
fn a_sample_that_is_sure_of_its_promise_does_on_a_device_what_it_does_on_the_cpu() {
    let (device, n) = (Device::new_cuda_with_stream(0).expect("the feature `cuda` needs a CUDA device"), 6000);
    let Input { q, k, v } = Input::random(SHAPE, n + STEPS);
    let input = Input { q: exact(q), k: exact(k.affine(0.02, 0.0).unwrap()), v: exact(v.affine(0.2, 1.0).unwrap()) };
    for top in ["oracle", "quest"] {
        let decode = json!({ "method": "vattention", "tail": "hard", "top": { "method": top }, "top_k": 60 });
        let spec = json!({
            "prefill": { "method": "streaming_llm", "window": 8 }, "decode": decode, "audit": true
        });
        let (out, usage) = attended(&spec, &input, &Device::Cpu, false);
        let (cuda, on_cuda) = attended(&spec, &input, &device, false);
        let steps = n * SHAPE.q_heads * SHAPE.head_dim;
        let error = relative(&cuda[steps..], &out[steps..]);
        assert!(error < 0.05, "over {top}: outputs differ by {error}");
        let field = |usage: &Value, name: &str| usage["decode"][name].as_f64().unwrap_or(0.0);
        assert!(field(&on_cuda, "density") < 0.6, "over {top}: {on_cuda}");
        for name in ["density", "budget_max", "budget_mean", "dense_heads"] {
            let (a, b) = (field(&usage, name), field(&on_cuda, name));
            assert!((a - b).abs() <= 0.1 * a.max(b), "over {top}: {name} {a} and {b}");
        }
        let worst = on_cuda["decode"]["audit"]["error_max"].as_f64().unwrap();
        assert!(worst < 0.1, "over {top}: an error of {worst}");
    }
}

/// Drafts that keep to what the first of them chose: their outputs, and what they came to; none by a method that the device has
/// not.
fn drafted(method: &Value, input: &Input, device: &Device) -> Option<(Vec<f32>, Value)> {
    let spec = json!({ "speculate": { "method": method, "choose": "round" } });
    let spec = Arc::new(AttentionSpec::from_json(&spec, "attention", &artifacts(device)).ok()?);
    let kv = KvShape { layers: 1, kv_heads: SHAPE.kv_heads, head_dim: SHAPE.head_dim };
    let mut pool = KvPool::new(kv, DType::BF16, (PROMPT + STEPS).div_ceil(64), device).unwrap();
    let mut sequence = Sequence::new(spec, 5, PROMPT);
    let mut to = |sequence: &mut Sequence, end: usize| {
        let [q, k, v] = [&input.q, &input.k, &input.v].map(|t| t.narrow(0, 0, end).unwrap());
        advance(sequence, &mut pool, &Input { q, k, v }, device, false)
    };
    to(&mut sequence, PROMPT);
    sequence.draft(true);
    let outs = (1..=STEPS).flat_map(|drafts| to(&mut sequence, PROMPT + drafts)).collect();
    Some((outs, json!(sequence.usage().speculation.unwrap().draft)))
}

#[test]
fn drafts_that_keep_to_a_choice_do_on_a_device_what_they_do_on_the_cpu() {
    let (device, input) = (Device::new_cuda_with_stream(0).expect("the feature `cuda` needs a CUDA device"), input());
    for method in all_typical() {
        let Some((cuda, on_cuda)) = drafted(&method, &input, &device) else { continue };
        let (out, usage) = drafted(&method, &input, &Device::Cpu).unwrap();
        assert!(cuda.iter().all(|x| x.is_finite()), "{method}");
        // On a device a sample is drawn each time.
        let draws = matches!(method["method"].as_str(), Some("santa" | "vattention"));
        let error = relative(&cuda, &out);
        assert!(error < if draws { 0.9 } else { 0.05 }, "{method}: outputs differ by {error}");
        let read = |usage: &Value| usage["budget_mean"].as_f64().unwrap();
        let (a, b) = (read(&usage), read(&on_cuda));
        assert!(draws || (a - b).abs() <= 0.05 * a, "{method}: {a} and {b} keys");
    }
}

#[test]
fn every_prefill_method_does_on_a_device_what_it_does_on_the_cpu() {
    let (device, input) = (Device::new_cuda_with_stream(0).expect("the feature `cuda` needs a CUDA device"), input());
    for window in [None, Some(300)] {
        let shape = AttentionShape { window, ..SHAPE };
        for settings in every_sparse().iter().flat_map(|sparse| [sparse.clone(), over_delta(sparse)]) {
            if settings["base"]["method"] == "delta" {
                continue;
            }
            let spec = json!({ "prefill": settings });
            let (out, usage) = attended_in(shape, &spec, &input, &Device::Cpu, false);
            let (cuda, on_cuda) = attended_in(shape, &spec, &input, &device, false);
            let method = if settings["method"] == "delta" { &settings["base"] } else { &settings };
            // Means that are rounded to 16 bits rank some chunks otherwise; of two patterns that keep as much, either may win.
            let close = match method["method"].as_str() {
                Some("hip") => 0.3,
                Some("minference") if method.get("pattern").is_none() => 0.5,
                _ => 0.05,
            };
            let error = relative(&cuda, &out);
            assert!(error < close, "{settings}, window {window:?}: outputs differ by {error}");
            for name in ["density", "scored"] {
                let [a, b] = [&usage, &on_cuda].map(|usage| usage["prefill"][name].as_f64().unwrap_or(0.0));
                assert!(
                    (a - b).abs() <= 0.2 * f64::from(close) * a.max(b),
                    "{settings}, window {window:?}: {name} {a} and {b}"
                );
            }
        }
    }
}

#[test]
fn a_search_by_halves_finds_on_a_device_what_it_does_on_the_cpu() {
    let device = Device::new_cuda_with_stream(0).expect("the feature `cuda` needs a CUDA device");
    // Whole numbers, of which means of four rows and all scores are exact.
    let Input { q, k, v } = Input::random(SHAPE, PROMPT);
    let input = Input { q: (q.round().unwrap() * 3.0).unwrap(), k: k.round().unwrap(), v: exact(v) };
    let runs = json!({
        "method": "hip", "block_q": 512, "average": 2, "sink": 64, "window": 64, "full_at": 0, "dense_layers": 0,
        "stages": [{ "chunk": 32, "keep": 128 }, { "chunk": 4, "keep": 48 }]
    });
    // In a layer that is dense, and where there is nothing to leave out.
    let dense = [json!({ "method": "hip" }), json!({ "method": "hip", "dense_layers": 0 })];
    for settings in sparse("hip").into_iter().chain([runs]).chain(dense) {
        for window in [None, Some(300)] {
            for settings in [settings.clone(), over_delta(&settings)] {
                let (shape, spec) = (AttentionShape { window, ..SHAPE }, json!({ "prefill": settings }));
                let (out, usage) = attended_in(shape, &spec, &input, &Device::Cpu, false);
                let (cuda, on_cuda) = attended_in(shape, &spec, &input, &device, false);
                let error = relative(&cuda, &out);
                assert!(error < 0.02, "{settings}, window {window:?}: outputs differ by {error}");
                for name in ["density", "budget_max", "scored"] {
                    let [cpu, cuda] = [&usage, &on_cuda].map(|usage| &usage["prefill"][name]);
                    assert_eq!(cpu, cuda, "{settings}, window {window:?}: {name}");
                }
            }
        }
    }
}

#[test]
fn draws_are_replayed_on_a_device() {
    let (device, input) = (Device::new_cuda_with_stream(0).expect("the feature `cuda` needs a CUDA device"), input());
    let spec =
        json!({ "decode": { "method": "vattention", "epsilon": 0.5, "sink": 2, "window": 20, "pilot_tokens": 16 } });
    let spec = Arc::new(AttentionSpec::from_json(&spec, "attention", &artifacts(&device)).unwrap());
    let kv = KvShape { layers: 1, kv_heads: SHAPE.kv_heads, head_dim: SHAPE.head_dim };
    let mut pool = KvPool::new(kv, DType::BF16, PROMPT.div_ceil(64), &device).unwrap();
    let mut sequence = Sequence::new(spec, 5, PROMPT);
    let rotary = PlainRotary(SHAPE.head_dim);
    let part = |t: &Tensor, start: usize, n: usize| t.narrow(0, start, n).unwrap().to_device(&device).unwrap();
    let spans = vec![Span { sequence: &mut sequence, tokens: PROMPT }];
    let mut batch = AttentionBatch::new(SHAPE, &rotary, &mut pool, spans).unwrap();
    batch.attend(0, &part(&input.q, 0, PROMPT), &part(&input.k, 0, PROMPT), &part(&input.v, 0, PROMPT)).unwrap();
    batch.finish().unwrap();
    let q = part(&input.q, PROMPT - 1, 1);
    let Replay { errors, keys, budgets, .. } =
        replay((SHAPE, &rotary, &mut pool), &sequence, 0, (&q, None), &[1, 2, 3]).unwrap();
    assert_eq!((errors.len(), keys.len(), budgets.unwrap().len()), (18, 6, 18));
    assert!(errors.iter().all(|error| *error < 1.0), "{errors:?}");
}

/// Nineteen sequences, two groups of them, some so short that they are read whole or are fewer than what is drawn.
#[test]
fn rows_that_are_chosen_for_together_are_what_each_is_alone_on_a_device() {
    let device = Device::new_cuda_with_stream(0).expect("the feature `cuda` needs a CUDA device");
    let long = [(PROMPT, 5, false), (PROMPT, 9, true), (20, 3, false), (100, 4, false)];
    let others = (0..15).map(|i| (120 + 37 * i, 10 + i as u64, false));
    let all: Vec<_> = long.into_iter().chain(others).collect();
    chosen_for_together(&device, DType::BF16, &artifacts(&device), &all);
}
