use super::*;
use candle_core::{DType, Device};
use serde_json::json;
use taper_kv_cache::KvShape;

const SHAPE: AttentionShape = AttentionShape { layers: 1, q_heads: 2, kv_heads: 1, head_dim: 8, window: None };

fn pool(blocks: usize) -> KvPool {
    KvPool::new(KvShape { layers: 1, kv_heads: 1, head_dim: 8 }, DType::F32, blocks, &Device::Cpu).unwrap()
}

fn sequence(prompt: usize, prefill: serde_json::Value) -> Sequence {
    let spec = AttentionSpec::from_json(&json!({ "prefill": prefill }), "attention").unwrap();
    Sequence::new(Arc::new(spec), 1, prompt)
}

#[test]
fn chunks_fall_on_the_methods_multiples() {
    let delta = |gamma| json!({ "method": "delta", "gamma": gamma, "base": { "method": "dense" } });
    for (prefill, prompt, max, chunk) in [
        (json!({ "method": "dense" }), 1000, 300, 300),
        (delta(64), 1000, 300, 256),
        (delta(64), 1000, 20, 64),
        (delta(64), 30, 20, 30),
        (delta(64), 200, 200, 200),
    ] {
        assert_eq!(sequence(prompt, prefill.clone()).chunk(max), chunk, "{prefill} {prompt} {max}");
    }
    let mut done = sequence(5, json!({ "method": "dense" }));
    done.len = 5;
    assert_eq!(done.chunk(10), 0);
}

#[test]
fn a_batch_of_sequences_gives_each_what_it_gets_alone() {
    let tensor = |rows: usize, heads: usize, salt: usize| {
        let values: Vec<f32> = (0..rows * heads * 8).map(|i| ((i * 7 + salt) % 23) as f32 / 11.0 - 1.0).collect();
        Tensor::from_vec(values, (rows, heads, 8), &Device::Cpu).unwrap()
    };
    let (q, k, v) = (tensor(80, 2, 1), tensor(80, 1, 2), tensor(80, 1, 3));
    let alone = |start: usize, tokens: usize| {
        let mut pool = pool(4);
        let mut sequence = sequence(tokens, json!({ "method": "dense" }));
        let mut batch = AttentionBatch::new(SHAPE, &mut pool, vec![Span { sequence: &mut sequence, tokens }]).unwrap();
        let part = |t: &Tensor| t.narrow(0, start, tokens).unwrap();
        batch.attend(0, &part(&q), &part(&k), &part(&v)).unwrap().to_vec3::<f32>().unwrap()
    };
    let mut pool = pool(4);
    let (mut a, mut b) = (sequence(70, json!({ "method": "dense" })), sequence(10, json!({ "method": "dense" })));
    let spans = vec![Span { sequence: &mut a, tokens: 70 }, Span { sequence: &mut b, tokens: 10 }];
    let mut batch = AttentionBatch::new(SHAPE, &mut pool, spans).unwrap();
    assert_eq!(batch.positions(), (0..70).chain(0..10).collect::<Vec<u32>>());
    let out = batch.attend(0, &q, &k, &v).unwrap().to_vec3::<f32>().unwrap();
    batch.finish();
    assert_eq!((a.len(), b.len()), (70, 10));
    assert_eq!(out, [alone(0, 70), alone(70, 10)].concat());
}

#[test]
fn spans_that_cannot_be_are_errors() {
    let mut pool = pool(1);
    let mut straddling = sequence(5, json!({ "method": "dense" }));
    let spans = vec![Span { sequence: &mut straddling, tokens: 6 }];
    assert!(matches!(AttentionBatch::new(SHAPE, &mut pool, spans), Err(KvError::Device(_))));
    let mut long = sequence(65, json!({ "method": "dense" }));
    let spans = vec![Span { sequence: &mut long, tokens: 65 }];
    assert!(matches!(AttentionBatch::new(SHAPE, &mut pool, spans), Err(KvError::OutOfBlocks { .. })));
    pool.check_integrity([long.table()]);
}
