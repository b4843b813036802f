//! One layer of prefill attention by every method, beside dense in one run: time, density, and what a method took beyond
//! its density's share of dense.
//!
//! ```sh
//! cargo run --release -p taper-attention --example prefill [-- TOKENS]
//! ```
//!
//! Heads are made up (9 query heads of width 64 on 3 KV heads, an f16 cache): neighbours attend to each other, some keys
//! to everyone. Methods take turns, and the least of three times is shown. `x fair` is the time over density × dense:
//! 1 is the floor, since a key that is read costs what it costs dense attention.

use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;
use taper_attention::{
    Artifacts, AttentionBatch, AttentionShape, AttentionSpec, LayerAttention, Rotary, Sequence, Span,
};
use taper_kv_cache::{KvPool, KvShape};

const SHAPE: AttentionShape = AttentionShape { layers: 1, q_heads: 9, kv_heads: 3, head_dim: 64, window: None };

struct NoRotary;

impl Rotary for NoRotary {
    fn frequencies(&self, _: usize) -> Vec<f32> {
        vec![0.0; 32]
    }

    fn factor(&self) -> f32 {
        1.0
    }

    fn heeds_length(&self) -> bool {
        false
    }
}

/// `[n, heads, 64]`: places on circles of several sizes, noise, and a channel that some tokens have more of.
fn heads(n: usize, heads: usize, seed: u64, strength: f32) -> Tensor {
    let mut state = seed;
    let mut noise = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let mut all = Vec::with_capacity(n * heads * 64);
    for token in 0..n {
        for _ in 0..heads {
            for pair in 0..31 {
                let angle = token as f32 * 0.7f32.powi(pair / 2);
                all.extend([angle.cos(), angle.sin()].map(|x| strength * x + 0.4 * noise()));
            }
            let heavy = token < 4 || token % 641 == 77;
            all.extend([if heavy { 9.0 } else { 1.0 }, noise()]);
        }
    }
    Tensor::from_vec(all, (n, heads, 64), &Device::Cpu).expect("shape matches")
}

fn main() {
    let n: usize = std::env::args().nth(1).map_or(16_384, |n| n.parse().expect("a number of tokens"));
    let (q, k, v) = (heads(n, 9, 1, 2.5), heads(n, 3, 2, 2.5), heads(n, 3, 3, 0.1));
    let settings = [
        json!({ "method": "dense" }),
        json!({ "method": "streaming_llm", "sink": 4, "window": 2048 }),
        json!({ "method": "sample_attention", "min_tokens": 0 }),
        json!({ "method": "sample_attention", "min_tokens": 0, "alpha_c": 0.8, "alpha_s": 0.8, "chunks": 2 }),
        json!({ "method": "minference", "pattern": "a_shape", "init": 128, "local": 1920 }),
        json!({ "method": "minference", "pattern": "vertical_slash", "vertical": 500, "slash": 1500 }),
        json!({ "method": "minference", "pattern": "block_sparse", "blocks": 32 }),
        json!({ "method": "minference", "pattern": "auto", "vertical": 500, "slash": 1500 }),
        json!({ "method": "hip", "dense_layers": 0 }),
        json!({ "method": "hip", "dense_layers": 0, "sink": 64, "window": 256 }),
        json!({ "method": "delta", "gamma": 64 }),
        json!({ "method": "delta", "gamma": 64, "base": { "method": "sample_attention", "min_tokens": 0 } }),
    ];
    let mut best = vec![(f64::INFINITY, 0.0); settings.len()];
    for _ in 0..3 {
        for (best, settings) in best.iter_mut().zip(&settings) {
            let (seconds, density) = time(settings, &q, &k, &v);
            *best = (best.0.min(seconds), density);
        }
    }
    println!("{n} tokens; dense {:.3} s", best[0].0);
    println!("{:>8} {:>8} {:>8}  method", "seconds", "density", "x fair");
    for ((seconds, density), settings) in best.iter().zip(&settings) {
        println!("{seconds:>8.3} {density:>8.3} {:>8.2}  {settings}", seconds / (density * best[0].0));
    }
}

/// Seconds and density of a whole prompt.
fn time(settings: &Value, q: &Tensor, k: &Tensor, v: &Tensor) -> (f64, f64) {
    let spec = AttentionSpec::from_json(&json!({ "prefill": settings }), "attention", &Artifacts::default());
    let n = q.dims()[0];
    let kv = KvShape { layers: 1, kv_heads: SHAPE.kv_heads, head_dim: SHAPE.head_dim };
    let mut pool = KvPool::new(kv, DType::F16, n.div_ceil(64), &Device::Cpu).expect("memory");
    let mut sequence = Sequence::new(Arc::new(spec.expect("valid settings")), 1, n);
    let mut seconds = 0.0;
    while sequence.len() < n {
        let (start, tokens) = (sequence.len(), sequence.chunk(2048));
        let spans = vec![Span { sequence: &mut sequence, tokens }];
        let mut batch = AttentionBatch::new(SHAPE, &NoRotary, &mut pool, spans).expect("room");
        let part = |t: &Tensor| t.narrow(0, start, tokens).expect("within");
        let begin = Instant::now();
        batch.attend(0, &part(q), &part(k), &part(v)).expect("attention");
        seconds += begin.elapsed().as_secs_f64();
        batch.finish().unwrap();
    }
    (seconds, sequence.usage().prefill.density)
}
