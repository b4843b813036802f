use super::*;
use crate::methods::tests::PlainRotary;
use crate::{Artifacts, AttentionSpec};
use candle_core::{DType, Device};
use serde_json::json;
use std::sync::Arc;
use taper_kv_cache::{BLOCK_TOKENS, KvShape};

const SHAPE: AttentionShape = AttentionShape { layers: 1, q_heads: 2, kv_heads: 1, head_dim: 8, window: None };
/// One with so many layers that an audit of each by itself would be seen in nearly every step.
const DEEP: AttentionShape = AttentionShape { layers: 16, ..SHAPE };

fn pool(blocks: usize) -> KvPool {
    KvPool::new(KvShape { layers: 1, kv_heads: 1, head_dim: 8 }, DType::F32, blocks, &Device::Cpu).unwrap()
}

fn sequence(prompt: usize, prefill: serde_json::Value) -> Sequence {
    let spec = AttentionSpec::from_json(&json!({ "prefill": prefill }), "attention", &Artifacts::default()).unwrap();
    Sequence::new(Arc::new(spec), 1, prompt)
}

#[test]
fn chunks_take_what_is_left_and_lengths_are_those_of_whole_prompts() {
    let dense = || json!({ "method": "dense" });
    let mut pool = pool(4);
    let (mut a, mut b) = (sequence(70, dense()), sequence(3, dense()));
    assert_eq!((a.chunk(50), a.chunk(100)), (50, 70));
    (a.len, b.len) = (40, 3);
    assert_eq!((a.chunk(50), b.chunk(50)), (30, 0));
    let spans = vec![Span { sequence: &mut a, tokens: 2 }, Span { sequence: &mut b, tokens: 2 }];
    let batch = AttentionBatch::new(SHAPE, &PlainRotary(8), &mut pool, spans).unwrap();
    assert_eq!(batch.positions(), [40, 41, 3, 4]);
    assert_eq!([0, 1, 2, 3].map(|token| batch.length(token)), [70, 70, 4, 5]);
}

#[test]
fn tokens_that_come_again_are_not_taken_together_with_new_ones() {
    let mut pool = pool(8);
    let hip = || json!({ "method": "hip" });
    for (mut sequence, before, again) in
        [(sequence(500, json!({ "method": "dense" })), 100, 37), (sequence(500, hip()), 128, 64)]
    {
        pool.grow(sequence.table_mut(), before).unwrap();
        sequence.len = before;
        sequence.retract(&mut pool);
        assert_eq!((sequence.len(), sequence.chunk(again), sequence.chunk(1000)), (0, again, before));
        let mut fresh = Sequence::new(sequence.spec.clone(), 1, 500);
        fresh.len = again;
        Sequence::rejoin(vec![&mut sequence], &mut pool, fresh).unwrap();
        assert_eq!(sequence.chunk(1000), before - again);
        sequence.len = before;
        assert!(sequence.chunk(1000) > 300, "then as much as it likes");
    }
    pool.check_integrity([]);
}

#[test]
fn a_share_of_the_tokens_is_audited_in_all_layers_and_the_others_in_none() {
    let kv = KvShape { layers: DEEP.layers, kv_heads: 1, head_dim: 8 };
    let mut pool = KvPool::new(kv, DType::F32, 1, &Device::Cpu).unwrap();
    let (tokens, mut audited) = (1000, 0);
    let ones = Tensor::ones((1, 2, 8), DType::F32, &Device::Cpu).unwrap();
    let mut step = |decode: serde_json::Value, audit: f64, seed| {
        let spec = json!({ "decode": decode, "audit": audit });
        let spec = AttentionSpec::from_json(&spec, "attention", &Artifacts::default()).unwrap();
        let mut sequence = Sequence::new(Arc::new(spec), seed, 0);
        let spans = vec![Span { sequence: &mut sequence, tokens: 1 }];
        let mut batch = AttentionBatch::new(DEEP, &PlainRotary(8), &mut pool, spans).unwrap();
        let whole = batch.generates();
        let kv = ones.narrow(1, 0, 1).unwrap();
        for layer in 0..DEEP.layers {
            batch.attend(layer, &ones, &kv, &kv).unwrap();
        }
        batch.finish().unwrap();
        pool.release(sequence.table_mut());
        let heads = sequence.usage().decode.audit.map_or(0, |audit| audit.heads);
        assert_eq!(heads, if whole { 0 } else { (DEEP.layers * DEEP.q_heads) as u64 });
        !whole
    };
    let chooses = || json!({ "method": "quest" });
    for seed in 0..tokens {
        audited += usize::from(step(chooses(), 0.05, seed));
    }
    // 50 on average, and more than 4.5 standard deviations away from that once in 100,000 sets of seeds.
    assert!((19..=81).contains(&audited), "{audited} of {tokens}");
    assert!((0..20).all(|seed| step(chooses(), 1.0, seed)), "all");
    // Dense attention is what is compared with: by its name, of a context too short to choose from, and within a window.
    for whole in [
        json!({ "method": "dense" }),
        json!({ "method": "quest", "dense_below": 2 }),
        json!({ "method": "streaming_llm", "window": 1 }),
    ] {
        assert!(!(0..20).any(|seed| step(whole.clone(), 1.0, seed)), "{whole}");
    }
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
        let mut batch =
            AttentionBatch::new(SHAPE, &PlainRotary(8), &mut pool, vec![Span { sequence: &mut sequence, tokens }])
                .unwrap();
        let part = |t: &Tensor| t.narrow(0, start, tokens).unwrap();
        batch.attend(0, &part(&q), &part(&k), &part(&v)).unwrap().to_vec3::<f32>().unwrap()
    };
    let mut pool = pool(4);
    let (mut a, mut b) = (sequence(70, json!({ "method": "dense" })), sequence(10, json!({ "method": "dense" })));
    let spans = vec![Span { sequence: &mut a, tokens: 70 }, Span { sequence: &mut b, tokens: 10 }];
    let mut batch = AttentionBatch::new(SHAPE, &PlainRotary(8), &mut pool, spans).unwrap();
    assert_eq!(batch.positions(), (0..70).chain(0..10).collect::<Vec<u32>>());
    let out = batch.attend(0, &q, &k, &v).unwrap().to_vec3::<f32>().unwrap();
    batch.finish().unwrap();
    assert_eq!((a.len(), b.len()), (70, 10));
    assert_eq!(out, [alone(0, 70), alone(70, 10)].concat());
}

/// Beyond what is chosen for together, and with one that is alone at the end.
#[test]
fn many_answers_get_what_each_gets_alone() {
    const SEQUENCES: usize = 2 * DECODE_SEQUENCES + 1;
    let prompt = |number: usize| 60 + 5 * number;
    let tensor = |rows: usize, heads: usize, salt: usize| {
        let values = (0..rows * heads * 8).map(|i| ((i * i + 7 * i + 31 * salt) % 101) as f32 / 50.0 - 1.0).collect();
        Tensor::from_vec::<_, f32>(values, (rows, heads, 8), &Device::Cpu).unwrap()
    };
    let of = |number: usize, rows: usize| {
        // Values with a mean, which a sample can tell.
        let v = (tensor(rows, 1, number + 2) + 2.0).unwrap();
        [tensor(rows, 2, number), tensor(rows, 1, number + 1), v]
    };
    let attend = |pool: &mut KvPool, spans: Vec<Span>, [q, k, v]: [Tensor; 3]| {
        let mut batch = AttentionBatch::new(SHAPE, &PlainRotary(8), pool, spans).unwrap();
        let out = batch.attend(0, &q, &k, &v).unwrap().to_vec3::<f32>().unwrap();
        batch.finish().unwrap();
        out
    };
    // The answers' outputs, and what is reported of them, where so many of those of these numbers go together.
    let run = |decode: &serde_json::Value, numbers: std::ops::Range<usize>| {
        let spec = json!({ "decode": decode });
        let spec = Arc::new(AttentionSpec::from_json(&spec, "attention", &Artifacts::default()).unwrap());
        let mut pool = pool(numbers.clone().map(|number| prompt(number) / BLOCK_TOKENS + 1).sum());
        let mut sequences: Vec<Sequence> =
            numbers.clone().map(|number| Sequence::new(Arc::clone(&spec), number as u64, prompt(number))).collect();
        for (sequence, number) in sequences.iter_mut().zip(numbers.clone()) {
            attend(&mut pool, vec![Span { sequence, tokens: prompt(number) }], of(number, prompt(number)));
        }
        let spans = sequences.iter_mut().map(|sequence| Span { sequence, tokens: 1 }).collect();
        let rows: Vec<[Tensor; 3]> = numbers.map(|number| of(number + 100, 1)).collect();
        let joined =
            [0, 1, 2].map(|part| Tensor::cat(&rows.iter().map(|row| &row[part]).collect::<Vec<_>>(), 0).unwrap());
        let out = attend(&mut pool, spans, joined);
        let usage = |sequence: &Sequence| serde_json::to_value(sequence.usage()).unwrap()["decode"].clone();
        out.into_iter().zip(sequences.iter().map(usage).collect::<Vec<_>>()).collect::<Vec<_>>()
    };
    for decode in [
        json!({ "method": "vattention", "sink": 4, "window": 8, "pilot_tokens": 8, "epsilon": 0.3, "top": "oracle" }),
        json!({ "method": "quest", "k": 0.2, "sink": 4, "window": 8, "dense_layers": 0 }),
        json!({ "method": "santa", "samples": 16 }),
        json!({ "method": "streaming_llm", "sink": 4, "window": 30 }),
    ] {
        let together = run(&decode, 0..SEQUENCES);
        assert_eq!(together.len(), SEQUENCES);
        assert!(together.iter().any(|(_, usage)| usage["density"].as_f64().unwrap() < 0.9), "{decode}");
        for (number, got) in together.iter().enumerate() {
            assert_eq!(got, &run(&decode, number..number + 1)[0], "{decode}: {number}");
        }
    }
}

#[test]
fn spans_that_cannot_be_are_errors() {
    let mut pool = pool(1);
    let mut straddling = sequence(5, json!({ "method": "dense" }));
    let spans = vec![Span { sequence: &mut straddling, tokens: 6 }];
    assert!(matches!(AttentionBatch::new(SHAPE, &PlainRotary(8), &mut pool, spans), Err(KvError::Device(_))));
    let mut long = sequence(65, json!({ "method": "dense" }));
    let spans = vec![Span { sequence: &mut long, tokens: 65 }];
    assert!(matches!(AttentionBatch::new(SHAPE, &PlainRotary(8), &mut pool, spans), Err(KvError::OutOfBlocks { .. })));
    pool.check_integrity([long.table()]);
}

/// A request that fails takes with it all of its blocks, and what others go on to compute from them.
#[test]
fn what_stands_on_a_failed_request_is_not_remembered() {
    let mut pool = pool(12);
    let tokens: Vec<u32> = (0..400).collect();
    let start = |pool: &mut KvPool, prompt: usize| {
        let mut sequence = sequence(prompt, json!({ "method": "dense" }));
        let beginning = sequence.beginning(&tokens[..prompt], &PlainRotary(8), "");
        sequence.reuse(pool, &beginning);
        (sequence, beginning)
    };
    let go_on = |pool: &mut KvPool, sequence: &mut Sequence, tokens: usize| {
        pool.grow(&mut sequence.table, sequence.len + tokens).unwrap();
        sequence.go_on(pool, tokens);
    };
    // One computes a block, the next takes it over and computes another, the third takes both over.
    let (mut first, _) = start(&mut pool, 70);
    go_on(&mut pool, &mut first, 70);
    let (mut failing, _) = start(&mut pool, 200);
    assert_eq!((failing.len(), failing.taken), (64, 1));
    go_on(&mut pool, &mut failing, 80);
    let (mut third, beginning) = start(&mut pool, 400);
    assert_eq!((third.len(), third.taken), (128, 2));
    go_on(&mut pool, &mut third, 64);
    assert_eq!(pool.remembered(&beginning.keys), 3);
    pool.forget(&failing.table, 0);
    assert_eq!(pool.remembered(&beginning.keys), 0);
    go_on(&mut pool, &mut third, 100);
    assert_eq!(pool.remembered(&beginning.keys), 0);
    // Even where those blocks are computed again.
    let (mut again, _) = start(&mut pool, 130);
    go_on(&mut pool, &mut again, 130);
    assert_eq!(pool.remembered(&beginning.keys[..2]), 2);
    go_on(&mut pool, &mut third, 100);
    let blocks = pool.recall(&beginning.keys);
    assert_eq!(blocks.blocks(), &again.table.blocks()[..2]);
}

/// A dense question that is all of the prompt is a dense prompt: in slices, shared with such, and reported as one.
#[test]
fn a_prompt_that_is_a_dense_question_is_a_dense_prompt() {
    let mut pool = pool(12);
    let prompt: Vec<u32> = (0..300).collect();
    let asked = |question: &str, tokens: usize| {
        let value = json!({ "prefill": { "method": "delta" }, "question": question });
        let spec = AttentionSpec::from_json(&value, "attention", &Artifacts::default()).unwrap();
        Sequence::new(Arc::new(spec), 1, 300).with_question(tokens)
    };
    let whole = asked("dense", 300);
    assert!(whole.takes_slices());
    assert_eq!((whole.usage().prefill.method, asked("dense", 299).usage().prefill.method), ("dense", "delta"));
    let mut dense = sequence(300, json!({ "method": "dense" }));
    let beginning = dense.beginning(&prompt, &PlainRotary(8), "");
    dense.reuse(&mut pool, &beginning);
    pool.grow(&mut dense.table, 300).unwrap();
    dense.go_on(&mut pool, 300);
    let taken = |sequence: &Sequence| sequence.beginning(&prompt, &PlainRotary(8), "").taken(&pool);
    assert_eq!((taken(&whole), taken(&asked("dense", 100))), (4, 0));
    // By the decode method its rows are steps, however long it is.
    assert!(!asked("decode", 300).takes_slices());
}

/// What choosing works with for several rows of a long sequence is no more than for one of twice a million tokens.
#[test]
fn the_longer_a_sequence_the_fewer_rows_are_chosen_for_together() {
    let of = [1, 131_072, 131_073, 1 << 20, 1 << 21, 1 << 22].map(decode::rows_together);
    assert_eq!(of, [16, 16, 15, 2, 1, 1]);
}

#[test]
fn rows_of_one_method_are_brought_together() {
    let decode = |prompt: usize, len: usize, decode: serde_json::Value| {
        let spec = AttentionSpec::from_json(&json!({ "decode": decode }), "attention", &Artifacts::default()).unwrap();
        Sequence { len, ..Sequence::new(Arc::new(spec), 1, prompt) }
    };
    let quest = |k: usize| json!({ "method": "quest", "k": k });
    let sequences = [
        (decode(9, 9, quest(4)), 1),
        (decode(9, 9, quest(8)), 1),
        (decode(5, 7, quest(4)), 1),
        // Rows of prompts, and several rows, are read alone.
        (decode(9, 8, quest(4)), 1),
        (decode(9, 9, quest(4)), 2),
        // So are those that do not read everything apart from those that do.
        (decode(2, 90, quest(8)), 1),
        (decode(9, 9, quest(4)), 1),
        (decode(9, 9, quest(8)), 1),
        (decode(2, 300, quest(8)), 1),
    ];
    assert_eq!(leaders(sequences.iter().map(|(sequence, tokens)| (sequence, *tokens))), [0, 1, 0, 3, 4, 5, 0, 1, 5]);
}
