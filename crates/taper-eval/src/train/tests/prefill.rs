//! The trainers of prefill methods, against the methods as they run.

use super::*;
use crate::train::kept::Tally;
use crate::train::minference::{Search, choosers};
use crate::train::prompt::{Prompt, measured, wanted};
use crate::train::sample_attention::{self, best, candidates, lengths};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use taper_attention::minference::Pattern;
use taper_attention::{AttentionBatch, AttentionShape, LayerAttention, PhaseUsage, Rotary, Sequence, Span};
use taper_kernels::prefill::query_blocks;
use taper_kv_cache::{KvPool, KvShape};

const SHAPE: AttentionShape = AttentionShape { layers: 1, q_heads: 8, kv_heads: 4, head_dim: 16, window: None };

/// Heads of one kind of attention each: to neighbours, to a few keys far apart, to one stretch of keys, to nothing much.
fn planted(tokens: usize, seed: u64, rows: &[Range<usize>]) -> Captured {
    let (d, mut rng) = (SHAPE.head_dim, ChaCha8Rng::seed_from_u64(seed));
    let mut noise = |n: usize| (0..n).map(|_| rng.random_range(-0.3..0.3f32)).collect::<Vec<_>>();
    let liked = |head: usize, token: usize| match head {
        0 => token as f32 * 0.04,
        1 if token % 97 == 50 => 6.0,
        2 if (256..384).contains(&token) => 6.0,
        _ => 0.0,
    };
    let key = |head: usize, token: usize, mut k: Vec<f32>| {
        k[..2].fill(liked(head, token));
        k
    };
    let k = (0..4).map(|head| (0..tokens).flat_map(|token| key(head, token, noise(d))).collect()).collect();
    let rows = wanted(rows.iter().cloned()).rows;
    let query = |mut q: Vec<f32>| {
        q[..2].fill(6.0);
        q
    };
    let q = (0..8).map(|_| rows.iter().flat_map(|_| query(noise(d))).collect()).collect();
    Captured { tokens, head_dim: d, k, q, rows, rotary: (vec![0.0; d / 2], 1.0) }
}

struct NoRotary;

impl Rotary for NoRotary {
    fn frequencies(&self, _: usize) -> Vec<f32> {
        vec![0.0; 8]
    }

    fn factor(&self) -> f32 {
        1.0
    }

    fn heeds_length(&self) -> bool {
        false
    }
}

/// What a request's prefill comes to over a captured sequence, all of whose rows there are.
fn usage(captured: &Captured, window: Option<usize>, prefill: &serde_json::Value) -> PhaseUsage {
    let (n, d) = (captured.tokens, captured.head_dim);
    let tensor = |heads: &[Vec<f32>]| {
        let heads: Vec<Tensor> =
            heads.iter().map(|x| Tensor::from_slice(x, (n, 1, d), &Device::Cpu).unwrap()).collect();
        Tensor::cat(&heads, 1).unwrap()
    };
    let (q, k) = (tensor(&captured.q), tensor(&captured.k));
    let spec = AttentionSpec::from_json(&json!({ "prefill": prefill }), "attention", &Artifacts::default()).unwrap();
    let kv = KvShape { layers: 1, kv_heads: SHAPE.kv_heads, head_dim: d };
    let mut pool = KvPool::new(kv, DType::F32, n.div_ceil(64), &Device::Cpu).unwrap();
    let mut sequence = Sequence::new(Arc::new(spec), 1, n);
    while sequence.len() < n {
        let (start, tokens) = (sequence.len(), sequence.chunk(usize::MAX));
        let part = |x: &Tensor| x.narrow(0, start, tokens).unwrap();
        let spans = vec![Span { sequence: &mut sequence, tokens }];
        let mut batch = AttentionBatch::new(AttentionShape { window, ..SHAPE }, &NoRotary, &mut pool, spans).unwrap();
        batch.attend(0, &part(&q), &part(&k), &part(&k)).unwrap();
        batch.finish().unwrap();
    }
    sequence.usage().prefill
}

fn all(tallies: &[Tally]) -> Tally {
    tallies.iter().fold(Tally::default(), |mut sum, tally| {
        sum.add(tally);
        sum
    })
}

#[test]
fn blocks_are_measured_all_over_a_prompt() {
    for (tokens, queries, count) in [(60, 1, 1), (64, 999, 1), (1000, 999, 15), (1000, 1000, 15), (4096, 640, 10)] {
        let blocks = measured(tokens, queries, 3);
        assert_eq!(blocks.len(), count.min(tokens.div_ceil(64)), "{tokens} {queries}");
        assert!(blocks.iter().all(|b| b.start % 64 == 0 && b.end <= tokens && !b.is_empty()), "{blocks:?}");
        assert!(blocks.windows(2).all(|pair| pair[0].end <= pair[1].start), "{blocks:?}");
    }
    assert_ne!(measured(4096, 640, 3), measured(4096, 640, 4));
    assert_eq!(measured(130, 4096, 3), [0..64, 64..128, 128..130]);
}

#[test]
fn minference_is_measured_as_it_runs() {
    for window in [None, Some(400)] {
        let rows = measured(1000, 4096, 1);
        let captured = planted(1000, 1, &rows);
        for (pattern, prefill) in [
            (
                Pattern::VerticalSlash { vertical: 40, slash: 120 },
                json!({ "method": "minference", "pattern": "vertical_slash", "vertical": 40, "slash": 120 }),
            ),
            (
                Pattern::AShape { init: 30, local: 100 },
                json!({ "method": "minference", "pattern": "a_shape", "init": 30, "local": 100 }),
            ),
            (
                Pattern::BlockSparse { blocks: 3 },
                json!({ "method": "minference", "pattern": "block_sparse", "blocks": 3 }),
            ),
        ] {
            let measure = |rows: Vec<Range<usize>>| {
                let prompt = Prompt::new(&captured, window, rows).unwrap();
                all(&Search::new(vec![prompt], 1).unwrap().measure(&[vec![pattern; 8]]).unwrap()[0])
            };
            let ran = usage(&captured, window, &prefill);
            let found = measure(rows.clone());
            assert!((found.density() - ran.density).abs() < 1e-12, "{pattern:?}: {found:?} {ran:?}");
            if let Some(cra) = ran.cra {
                let last = measure(query_blocks(choosers(1000), 64)).named("");
                assert!((last.mean - cra.mean).abs() < 1e-5 && (last.min - cra.min).abs() < 1e-5, "{last:?} {cra:?}");
            }
        }
    }
}

#[test]
fn minference_finds_each_heads_pattern_at_equal_cost() {
    let rows = |seed| [measured(1000, 512, seed), vec![choosers(1000)]].concat();
    let sequences: Vec<Captured> = (1..4).map(|seed| planted(1000, seed, &rows(seed))).collect();
    let prompts = |from: usize, to: usize| {
        let prompt = |i: usize| Prompt::new(&sequences[i], None, measured(1000, 512, i as u64 + 1)).unwrap();
        (from..to).map(prompt).collect()
    };
    let search = Search::new(prompts(0, 2), 256).unwrap();
    let assigned = search.run().unwrap();
    for head in [2, 3] {
        assert!(matches!(assigned.best[head], Pattern::VerticalSlash { .. }), "keys far apart: {:?}", assigned.best);
    }
    for head in [4, 5] {
        assert_eq!(assigned.best[head], Pattern::BlockSparse { blocks: 4 }, "a stretch of keys");
    }
    // No pattern costs more than an a_shape of 256 keys, and none of one kind for all keeps as much.
    let a_shape = all(&search.measure(&[vec![Pattern::AShape { init: 0, local: 256 }; 8]]).unwrap()[0]);
    for search in [&search, &Search::new(prompts(2, 3), 256).unwrap()] {
        let report = search.report(&assigned).unwrap();
        let names: Vec<&str> = report.iter().map(|kept| kept.name.as_str()).collect();
        assert_eq!(names, ["as assigned", "a_shape", "vertical_slash", "block_sparse"]);
        assert!(report.iter().all(|kept| kept.density < 1.05 * a_shape.density()), "{report:?} {a_shape:?}");
        assert!(report[1..].iter().all(|kept| kept.mean + 0.03 < report[0].mean), "{report:?}");
    }
    // The diagonals that are always read cost too much: only the other kinds are left.
    let few = Search::new(prompts(0, 2), 100).unwrap().run().unwrap();
    assert!(few.best.iter().all(|p| !matches!(p, Pattern::VerticalSlash { .. })), "{:?}", few.best);
}

#[test]
fn sample_attention_is_measured_as_it_runs() {
    let n = 1000;
    let captured = planted(n, 1, &measured(n, 4096, 1));
    for window in [None, Some(400)] {
        let prompt = Prompt::new(&captured, window, measured(n, 4096, 1)).unwrap();
        let tallies = sample_attention::measure(&prompt, n).unwrap();
        for (at, t) in candidates().iter().enumerate().step_by(13) {
            let (alpha_c, alpha_s, chunks) = (t.alpha_c, t.alpha_s, t.chunks);
            let prefill = json!({
                "method": "sample_attention", "alpha_c": alpha_c, "alpha_s": alpha_s, "chunks": chunks, "min_tokens": 0
            });
            let ran = usage(&captured, window, &prefill);
            assert!((tallies[at].density() - ran.density).abs() < 1e-12, "{t:?}: {:?} {ran:?}", tallies[at]);
            let ends: Vec<Range<usize>> = (1..=chunks).map(|i| i * n / chunks - 64..i * n / chunks).collect();
            let ends = Prompt::new(&captured, window, ends).unwrap();
            let (kept, cra) = (sample_attention::measure(&ends, n).unwrap()[at].named(""), ran.cra.unwrap());
            assert!((kept.mean - cra.mean).abs() < 1e-5 && (kept.min - cra.min).abs() < 1e-5, "{t:?} {kept:?} {cra:?}");
        }
    }
}

#[test]
fn sample_attentions_thresholds_are_the_cheapest_that_keep_enough() {
    let n = 1000;
    let captured = planted(n, 2, &measured(n, 4096, 1));
    let prompt = Prompt::new(&captured, None, measured(n, 4096, 1)).unwrap();
    let tallies = sample_attention::measure(&prompt, n).unwrap();
    let mut before = 0.0;
    for cra in [0.5, 0.8, 0.9, 0.99] {
        let own = &tallies[best(&tallies, cra)];
        assert!(own.mean() >= cra && own.density() >= before, "{cra}: {own:?}");
        assert!(tallies.iter().all(|other| other.mean() < cra || other.density() >= own.density()), "{cra}: {own:?}");
        before = own.density();
    }
    assert!(before > tallies[best(&tallies, 0.5)].density(), "or this says nothing");
    let dense = &tallies[best(&tallies, 1.0)];
    assert!(dense.density() == 1.0 && dense.mean() > 1.0 - 1e-5, "{dense:?}");
    assert_eq!((lengths(900), lengths(4096)), (vec![900], vec![1024, 2048, 4096]));
    assert_eq!(lengths(50_000), [6250, 12_500, 25_000, 50_000]);
}

#[test]
fn a_shorter_prompt_is_measured_on_the_longer_ones_beginning() {
    let long = planted(1000, 1, &measured(1000, 4096, 1));
    let mut short = planted(1000, 1, &measured(1000, 4096, 1));
    short.tokens = 500;
    short.k.iter_mut().for_each(|k| k.truncate(500 * 16));
    short.q.iter_mut().for_each(|q| q.truncate(500 * 16));
    short.rows.truncate(500);
    let of = |captured| {
        let prompt = Prompt::new(captured, None, measured(captured.tokens, 4096, 1)).unwrap();
        sample_attention::measure(&prompt, 500).unwrap()
    };
    let (long, short) = (of(&long), of(&short));
    for (long, short) in long.iter().zip(&short) {
        assert!(long.density() == short.density() && (long.mean() - short.mean()).abs() < 1e-6, "{long:?} {short:?}");
    }
}
