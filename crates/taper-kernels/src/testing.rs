//! What the tests of several operations share: random caches and the plainest attention there is, in f64.

mod numbers;

use crate::kv::{self, BLOCK_TOKENS, PagedKv};
use candle_core::{DType, Device, Tensor};
use std::ops::Range;

pub use numbers::Numbers;

impl Numbers {
    pub fn tensor(&mut self, shape: &[usize]) -> Tensor {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| self.normal()).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }
}

/// One sequence in a pool whose blocks are shuffled and whose unused rows are NaN.
pub struct Cache {
    pub k: Tensor,
    pub v: Tensor,
    pub table: Vec<u32>,
    /// `[tokens][kv_heads][head_dim]` as stored, widened.
    pub keys: Vec<Vec<Vec<f32>>>,
    pub values: Vec<Vec<Vec<f32>>>,
}

impl Cache {
    pub fn new(numbers: &mut Numbers, tokens: usize, kv_heads: usize, head_dim: usize, dtype: DType) -> Self {
        let k = numbers.tensor(&[tokens, kv_heads, head_dim]);
        let v = numbers.tensor(&[tokens, kv_heads, head_dim]);
        Self::from_rows(&k, &v, dtype)
    }

    pub fn from_rows(k: &Tensor, v: &Tensor, dtype: DType) -> Self {
        let (tokens, kv_heads, head_dim) = k.dims3().unwrap();
        let used = tokens.div_ceil(BLOCK_TOKENS);
        let blocks = used + 3;
        let table: Vec<u32> = (0..used as u32).map(|b| (b * 7 + 3) % blocks as u32).collect();
        let table = if table.iter().collect::<std::collections::HashSet<_>>().len() == used {
            table
        } else {
            (0..used as u32).rev().collect()
        };
        let slots: Vec<u32> =
            (0..tokens).map(|t| table[t / BLOCK_TOKENS] * BLOCK_TOKENS as u32 + (t % BLOCK_TOKENS) as u32).collect();
        let pool = || {
            Tensor::full(f32::NAN, (blocks, kv_heads, BLOCK_TOKENS, head_dim), &Device::Cpu)
                .unwrap()
                .to_dtype(dtype)
                .unwrap()
                .contiguous()
                .unwrap()
        };
        let (pool_k, pool_v) = (pool(), pool());
        kv::append(&pool_k, k, &slots).unwrap();
        kv::append(&pool_v, v, &slots).unwrap();
        let stored = |t: &Tensor| t.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap().to_vec3().unwrap();
        Self { k: pool_k, v: pool_v, table, keys: stored(k), values: stored(v) }
    }

    pub fn kv(&self) -> PagedKv<'_> {
        PagedKv { k: &self.k, v: &self.v }
    }

    /// Scaled scores of one query of head `kv_head` with the keys given, in f64.
    pub fn scores(&self, q: &[f32], kv_head: usize, keys: &[usize]) -> Vec<f64> {
        let scale = 1.0 / (q.len() as f64).sqrt();
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        keys.iter().map(|&key| dot(q, &self.keys[key][kv_head]) * scale).collect()
    }

    /// Attention of one query of head `kv_head` over the keys given, in f64, with natural-log weights.
    pub fn attend(&self, q: &[f32], kv_head: usize, keys: impl Iterator<Item = (usize, f64)>) -> Vec<f64> {
        let scale = 1.0 / (q.len() as f64).sqrt();
        let scored: Vec<(usize, f64)> = keys
            .map(|(i, w)| {
                let dot: f64 = q.iter().zip(&self.keys[i][kv_head]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                (i, dot * scale + w)
            })
            .collect();
        let max = scored.iter().map(|s| s.1).fold(f64::NEG_INFINITY, f64::max);
        let mut out = vec![0f64; q.len()];
        let mut sum = 0.0;
        for (i, s) in scored {
            let p = (s - max).exp();
            sum += p;
            for (o, v) in out.iter_mut().zip(&self.values[i][kv_head]) {
                *o += p * f64::from(*v);
            }
        }
        out.iter().map(|o| o / sum).collect()
    }
}

/// ‖a − b‖ / ‖b‖; NaN anywhere gives NaN, which no bound admits.
pub fn relative_error(a: &[f32], b: &[f64]) -> f64 {
    let difference: f64 = a.iter().zip(b).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
    (difference / b.iter().map(|b| b * b).sum::<f64>()).sqrt()
}

/// Ranges as one iterator with weight 1.
pub fn plain(ranges: &[Range<usize>]) -> impl Iterator<Item = (usize, f64)> + '_ {
    ranges.iter().flat_map(Clone::clone).map(|i| (i, 0.0))
}
