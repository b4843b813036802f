//! What the tests share: the golden checkpoints, and attention written as plainly as it can be.

#![allow(dead_code)] // Each test binary uses a part.

use candle_core::{Device, Result, Tensor};
use std::path::{Path, PathBuf};
use taper_attention::{AttentionShape, LayerAttention};
use taper_model::{LoadOptions, Model, ModelFiles, ResolvedModel, WeightDType};

/// The folder of golden files.
pub fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// A golden checkpoint.
pub fn checkpoint(name: &str) -> ResolvedModel {
    folder(&golden().join(name))
}

/// A checkpoint folder as a resolved model.
pub fn folder(path: &Path) -> ResolvedModel {
    ResolvedModel { name: "test".to_owned(), files: ModelFiles::Folder(path.to_owned()) }
}

/// A GGUF file as a resolved model.
pub fn gguf(path: &Path) -> ResolvedModel {
    ResolvedModel { name: "test".to_owned(), files: ModelFiles::Gguf(path.to_owned()) }
}

/// The tokens and the logits `[T, vocab]` that transformers computed.
pub fn expected(name: &str) -> (Vec<u32>, Vec<Vec<f32>>) {
    let path = golden().join(name).join("golden.safetensors");
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let tokens: Vec<i64> = tensors["tokens"].to_vec1().unwrap();
    (tokens.into_iter().map(|t| t as u32).collect(), tensors["logits"].to_vec2().unwrap())
}

/// Loads with f32 weights.
pub fn load(model: &ResolvedModel, dequantize: bool) -> Model {
    let options = LoadOptions { dtype: WeightDType::F32, dequantize, ..LoadOptions::default() };
    Model::load(model, &options, &Device::Cpu).unwrap()
}

/// The largest difference between two tables of logits.
pub fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    assert_eq!(a.len(), b.len(), "rows");
    let pairs = a.iter().zip(b).flat_map(|(a, b)| {
        assert_eq!(a.len(), b.len(), "columns");
        a.iter().zip(b)
    });
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Dense attention with the model's own window, one query at a time, over as many sequences as a test has.
///
/// Shares no code with the product, so that it checks both the model and, later, the product's attention.
pub struct PlainAttention {
    shape: AttentionShape,
    /// Which sequence each token of the next step belongs to.
    pub sequence_of: Vec<usize>,
    /// How long every sequence is said to be.
    pub length: u32,
    /// Keys and values by layer and sequence, each token's `[kv_heads * head_dim]` in turn.
    cache: Vec<Vec<(Vec<f32>, Vec<f32>)>>,
}

impl PlainAttention {
    /// Empty caches for a model.
    pub fn new(shape: AttentionShape, sequences: usize) -> Self {
        let cache = vec![vec![(Vec::new(), Vec::new()); sequences]; shape.layers];
        Self { shape, sequence_of: Vec::new(), length: 0, cache }
    }
}

impl LayerAttention for PlainAttention {
    fn length(&self, _: usize) -> u32 {
        self.length
    }

    fn attend(&mut self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let shape = self.shape;
        let (rows, heads, dim) = q.dims3()?;
        assert_eq!((heads, dim), (shape.q_heads, shape.head_dim));
        for x in [k, v] {
            assert_eq!(x.dims(), [rows, shape.kv_heads, dim]);
        }
        for x in [q, k, v] {
            assert!(x.is_contiguous() && x.dtype() == candle_core::DType::F32);
        }
        let flat = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
        let (q, k, v) = (flat(q)?, flat(k)?, flat(v)?);
        let row = shape.kv_heads * dim;
        let mut out = vec![0f32; rows * heads * dim];
        for t in 0..rows {
            let sequence = self.sequence_of.get(t).copied().unwrap_or(0);
            let (keys, values) = &mut self.cache[layer][sequence];
            keys.extend(&k[t * row..(t + 1) * row]);
            values.extend(&v[t * row..(t + 1) * row]);
            let length = keys.len() / row;
            let first = shape.window.map_or(0, |window| length.saturating_sub(window));
            for head in 0..heads {
                let kv_head = head / shape.group();
                let query = &q[(t * heads + head) * dim..][..dim];
                let score = |i: usize| {
                    let dot: f32 = query.iter().zip(part(keys, i * row + kv_head * dim, dim)).map(|(a, b)| a * b).sum();
                    dot / (dim as f32).sqrt()
                };
                let scores: Vec<f32> = (first..length).map(score).collect();
                let largest = scores.iter().copied().fold(f32::MIN, f32::max);
                let weights: Vec<f32> = scores.iter().map(|s| (s - largest).exp()).collect();
                let total: f32 = weights.iter().sum();
                let out = &mut out[(t * heads + head) * dim..][..dim];
                for (i, weight) in (first..length).zip(weights) {
                    for (out, value) in out.iter_mut().zip(part(values, i * row + kv_head * dim, dim)) {
                        *out += weight / total * value;
                    }
                }
            }
        }
        Tensor::from_vec(out, (rows, heads, dim), &Device::Cpu)
    }
}

fn part(x: &[f32], start: usize, length: usize) -> &[f32] {
    &x[start..start + length]
}

/// Logits of every token of one sequence, in one step.
pub fn logits_of(model: &Model, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut attention = PlainAttention::new(model.attention_shape(), 1);
    let positions: Vec<u32> = (0..tokens.len() as u32).collect();
    attention.length = tokens.len() as u32;
    let hidden = model.forward(tokens, &positions, &mut attention).unwrap();
    model.logits(&hidden).unwrap().to_vec2().unwrap()
}
