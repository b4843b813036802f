//! A traced request's pictures say the same as its sums.

use super::*;
use crate::trace::Trace;
use crate::{PhaseUsage, TraceUsage};
use taper_kernels::decode::{HeadSelection, Keys};

const PROMPT: usize = 600;

fn traced(spec: Value, decoded: usize, chunk: usize) -> (PhaseUsage, PhaseUsage, TraceUsage, Vec<f32>) {
    let (out, sequence) = run(&spec, shape(3, 64, None), (PROMPT, decoded), chunk);
    let usage = sequence.usage();
    (usage.prefill, usage.decode, usage.trace.unwrap(), out)
}

fn mean(density: &[Vec<f32>]) -> f64 {
    let heads = density.concat();
    heads.iter().map(|&d| f64::from(d)).sum::<f64>() / heads.len() as f64
}

#[test]
fn of_answers_by_every_decode_method() {
    for method in catalogue().into_iter().filter(|method| method.phase == "decode") {
        let mut decode = json!({ "method": method.name });
        for (knob, value) in [("window", 32), ("sink", 4), ("top_k", 20), ("k", 64), ("dense_layers", 0)] {
            if method.parameters["properties"].get(knob).is_some() {
                decode[knob] = json!(value);
            }
        }
        let plain = run(&json!({ "decode": decode, "audit": 0.5 }), shape(3, 64, None), (PROMPT, 9), 4096);
        let (_, usage, trace, out) = traced(json!({ "decode": decode, "audit": 0.5, "trace": true }), 9, 4096);
        assert!(out == plain.0 && json!(usage) == json!(plain.1.usage().decode), "{decode}: looking changes nothing");
        assert!(plain.1.usage().trace.is_none());
        assert_eq!((trace.layers, trace.kv_heads, trace.tokens.len()), (1, 2, 9), "{decode}");
        // Heads see equally many keys, so that the mean is that of the pairs.
        let density = trace.decode.unwrap().density;
        assert!((mean(&density) - usage.density).abs() < 1e-6, "{decode}: {density:?}");
        let budgets = trace.tokens.iter().map(|token| f64::from(token.budget)).sum::<f64>() / 9.0;
        assert!((budgets - usage.budget_mean).abs() < 1e-3, "{decode}: {budgets}");
        let (mut audited, mut errors) = (0, 0.0);
        for (i, token) in trace.tokens.iter().enumerate() {
            assert_eq!(token.position, PROMPT - 9 + i);
            let reads = token.reads.as_ref().unwrap();
            let pairs: u32 = reads.iter().map(|(_, keys, pairs)| keys * pairs).sum();
            assert_eq!(f64::from(pairs), f64::from(token.budget) * 2.0, "{decode}");
            assert!(reads.windows(2).all(|runs| runs[0].0 + runs[0].1 <= runs[1].0), "{decode}: {reads:?}");
            assert!(reads.iter().all(|&(_, _, pairs)| (1..=2).contains(&pairs)), "{decode}: {reads:?}");
            let (last, keys, pairs) = *reads.last().unwrap();
            assert!((last + keys) as usize <= token.position + 1, "{decode}: {reads:?}");
            if decode["window"].is_number() {
                assert_eq!(((last + keys) as usize, pairs), (token.position + 1, 2), "{decode}: {reads:?}");
            }
            audited += usize::from(token.error.is_some());
            errors += f64::from(token.error.unwrap_or(0.0));
        }
        if method.name == "dense" {
            assert!(usage.audit.is_none() && audited == 0, "it is what others are compared with");
            continue;
        }
        let audit = usage.audit.unwrap();
        assert_eq!(audited * 6, audit.heads as usize, "{decode}");
        assert!((errors / audited as f64 - audit.error_mean).abs() < 1e-5, "{decode}");
    }
}

#[test]
fn of_prompts_by_every_prefill_method() {
    for method in catalogue().into_iter().filter(|method| method.phase == "prefill") {
        let prefill = json!({ "method": method.name });
        let (usage, _, trace, _) = traced(json!({ "prefill": prefill, "trace": true }), 0, 4096);
        assert!((mean(&trace.prefill.unwrap().density) - usage.density).abs() < 1e-6, "{prefill}");
        assert!(trace.decode.is_none() && trace.tokens.is_empty());
    }
}

#[test]
fn lets_go_of_what_is_truncated_and_of_steps_that_failed() {
    let shape = shape(3, 64, None);
    let spec = json!({ "decode": { "method": "streaming_llm", "sink": 4, "window": 60 }, "trace": true });
    let spec = Arc::new(AttentionSpec::from_json(&spec, "attention", &Artifacts::default()).unwrap());
    let kv = KvShape { layers: 1, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
    let mut pool = KvPool::new(kv, DType::F32, 8, &Device::Cpu).unwrap();
    let mut sequence = Sequence::new(spec, 5, 100);
    let Input { q, k, v } = Input::random(shape, 200);
    let rotary = PlainRotary(shape.head_dim);
    let mut step = |sequence: &mut Sequence, tokens: usize, finish: bool| {
        let start = sequence.len();
        let part = |t: &Tensor| t.narrow(0, start, tokens).unwrap();
        let mut batch = AttentionBatch::new(shape, &rotary, &mut pool, vec![Span { sequence, tokens }]).unwrap();
        batch.attend(0, &part(&q), &part(&k), &part(&v)).unwrap();
        if finish {
            batch.finish().unwrap();
        }
    };
    let positions = |sequence: &Sequence| -> Vec<(usize, f32)> {
        sequence.usage().trace.unwrap().tokens.iter().map(|token| (token.position, token.budget)).collect()
    };
    step(&mut sequence, 100, true);
    step(&mut sequence, 4, true);
    let four: Vec<(usize, f32)> = (100..104).map(|position| (position, 64.0)).collect();
    assert_eq!(positions(&sequence), four);
    step(&mut sequence, 3, false);
    assert_eq!(positions(&sequence), four);
    let mut own = KvPool::new(kv, DType::F32, 8, &Device::Cpu).unwrap();
    own.grow(sequence.table_mut(), 104).unwrap();
    sequence.truncate(&mut own, 102).unwrap();
    assert_eq!(positions(&sequence), four[..2]);
    assert_eq!(sequence.usage().trace.unwrap().tokens[0].reads, Some(vec![(0, 4, 2), (41, 60, 2)]));
}

/// One row that reads some keys in each (layer, KV head).
fn add(trace: &mut Trace, position: usize, layers: &[&[Vec<u32>]]) {
    for (layer, heads) in layers.iter().enumerate() {
        let counts: Vec<usize> = heads.iter().map(Vec::len).collect();
        let keys = |ids: &Vec<u32>| HeadSelection::Keys(Keys { ids: ids.clone(), ..Default::default() });
        let selection: Vec<HeadSelection> = heads.iter().map(keys).collect();
        trace.add_rows(layer, Some(&selection), &counts, std::slice::from_ref(&(0..position + 1)));
    }
    trace.settle();
}

#[test]
fn tells_layers_and_heads_apart() {
    let mut trace = Trace::new(10);
    let two: [&[Vec<u32>]; 2] = [&[vec![0, 1], vec![5]], &[vec![0, 3, 4], vec![]]];
    // A question by the decode method counts in the sums alone.
    add(&mut trace, 8, &two);
    add(&mut trace, 9, &two);
    let usage = TraceUsage::new(&Default::default(), &trace);
    assert_eq!((usage.layers, usage.kv_heads), (2, 2));
    assert_eq!(usage.decode.unwrap().density, [[4.0 / 19.0, 2.0 / 19.0], [6.0 / 19.0, 0.0]]);
    assert_eq!(usage.tokens.len(), 1);
    let token = &usage.tokens[0];
    assert_eq!((token.position, token.budget, token.density), (9, 1.5, 6.0 / 40.0));
    assert_eq!(token.reads, Some(vec![(0, 1, 2), (1, 1, 1), (3, 3, 1)]));
}

#[test]
fn drafts_that_are_let_go_leave_their_room_to_others() {
    let mut trace = Trace::new(1);
    let every_other: Vec<u32> = (0..2000).step_by(2).collect();
    for round in 0..200 {
        add(&mut trace, 2000, &[std::slice::from_ref(&every_other)]);
        let known = TraceUsage::new(&Default::default(), &trace).tokens[0].reads.is_some();
        assert!(known, "round {round}");
        trace.truncate(2000);
    }
}

#[test]
fn has_an_end() {
    // A kilobyte of rows, each with every other key: more runs than are kept.
    let mut trace = Trace::new(1);
    let keys = 2000;
    let every_other: Vec<u32> = (0..keys as u32).step_by(2).collect();
    for position in keys..keys + 1100 {
        add(&mut trace, position, &[std::slice::from_ref(&every_other)]);
    }
    let usage = TraceUsage::new(&Default::default(), &trace);
    assert_eq!(usage.tokens.len(), 1024);
    let known: Vec<bool> = usage.tokens.iter().map(|token| token.reads.is_some()).collect();
    assert_eq!(known.iter().position(|known| !known), Some(131), "131 rows of 1,000 runs are fewer than 131,072");
    let density = usage.decode.unwrap().density[0][0];
    let seen: f64 = (keys..keys + 1100).map(|position| (position + 1) as f64).sum();
    assert!((f64::from(density) - 1100.0 * 1000.0 / seen).abs() < 1e-6, "sums go on");
}
