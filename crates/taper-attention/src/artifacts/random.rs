//! Artefacts that nobody trained: for models of random weights, whose steps are to be timed, and for tests.

use super::{Artifacts, FORMAT, MODEL, ModelKey};
use crate::layer::AttentionShape;
use candle_core::{Device, Result, Tensor};
use std::collections::HashMap;
use taper_kernels::index::clusters::MOST_ON_DEVICE;

/// How large what random artefacts hold is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Clusters of a KV head.
    pub clusters: usize,
    /// Width of the classifier's hidden layer.
    pub classifier: usize,
    /// Width of the hidden layers of maps to codes.
    pub maps: usize,
    /// Channels of a KV head.
    pub channels: usize,
}

impl Sizes {
    /// Those that `taper train` has by default, for texts of so many tokens, but no more clusters than a device ranks.
    pub fn usual(shape: &AttentionShape, tokens: usize) -> Self {
        let clusters = (4 * tokens.isqrt()).max(1).next_power_of_two().min(MOST_ON_DEVICE);
        Self { clusters, classifier: 4 * shape.head_dim, maps: 128, channels: (shape.head_dim / 4).max(1) }
    }
}

/// Tensors by name.
type Named = Vec<(String, Tensor)>;

impl Artifacts {
    /// Random content of every kind that is tensors.
    ///
    /// # Errors
    /// More memory than there is.
    pub fn random(shape: AttentionShape, sizes: Sizes) -> Result<Self> {
        let (q_heads, kv_heads, d) = (shape.q_heads, shape.kv_heads, shape.head_dim);
        let [mut hash, mut kmeans, mut saap] = [(); 3].map(|()| Named::new());
        let mut channels = Vec::new();
        for layer in 0..shape.layers {
            let mut next = noise(1 + layer as u64);
            let mut tensor = |of: &str, dims: &[usize]| -> Result<(String, Tensor)> {
                let all: Vec<f32> = (0..dims.iter().product()).map(|_| next()).collect();
                Ok((format!("layers.{layer}.{of}"), Tensor::from_vec(all, dims, &Device::Cpu)?))
            };
            let mut perceptrons = |of: &str, heads: usize, widths: &[usize]| -> Result<Named> {
                let mut all = Named::new();
                for (depth, width) in widths.windows(2).enumerate() {
                    all.push(tensor(&format!("{of}.{depth}.weight"), &[heads, width[1], width[0]])?);
                    all.push(tensor(&format!("{of}.{depth}.bias"), &[heads, width[1]])?);
                }
                Ok(all)
            };
            hash.extend(perceptrons("query", q_heads, &[d, sizes.maps, sizes.maps, 32])?);
            hash.extend(perceptrons("key", kv_heads, &[d, sizes.maps, sizes.maps, 32])?);
            saap.extend(perceptrons("classifier", kv_heads, &[d, sizes.classifier, sizes.clusters])?);
            kmeans.push(tensor("centroids", &[kv_heads, sizes.clusters, d])?);
            let channel = |i: usize| ((i % sizes.channels * 5 + i / sizes.channels + layer) % d) as u32;
            channels.extend((0..kv_heads * sizes.channels).map(channel));
        }
        saap.extend(kmeans.iter().cloned());
        let channels = Tensor::from_vec(channels, (shape.layers, kv_heads, sizes.channels), &Device::Cpu)?;
        let files = [
            ("double_sparsity", vec![("channels".to_owned(), channels)]),
            ("hash_attention", hash),
            ("kmeans", kmeans.clone()),
            ("kmeans-rope", kmeans),
            ("saap", saap),
        ];
        let model = ModelKey { shape, fingerprint: "random".to_owned() };
        files.iter().try_fold(Self::default(), |all, (method, tensors)| {
            let bytes = written(method, tensors, &model.fingerprint)?;
            all.with(&format!("{method}.safetensors"), &bytes, &model).map_err(candle_core::Error::msg)
        })
    }
}

/// Repeatable numbers about 0, of variance 1: sums of three that are uniform between -1 and 1.
pub(crate) fn noise(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    move || next() + next() + next()
}

/// An artefact's file: tensors, and for which method and model they are.
pub(crate) fn written(method: &str, tensors: &[(String, Tensor)], fingerprint: &str) -> Result<Vec<u8>> {
    let header = [(FORMAT.0, FORMAT.1), ("method", method), (MODEL, fingerprint)];
    let header: HashMap<String, String> = header.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    let named = tensors.iter().map(|(name, tensor)| (name, tensor));
    safetensors::serialize(named, Some(header)).map_err(candle_core::Error::wrap)
}
