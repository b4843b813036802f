//! What methods learn offline: random content, for the small model.

use crate::backend;
use candle_core::{Device, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::fs;
use std::sync::LazyLock;
use taper_attention::Artifacts;
use taper_engine::CacheOptions;

type Named = (String, Tensor);

/// Artefacts of every kind: 8 clusters, 8 channels, maps by way of 16 to 32 bits.
pub static ARTIFACTS: LazyLock<Artifacts> = LazyLock::new(|| {
    let key = backend(1, CacheOptions::default()).unwrap().key();
    let (q, kv, d) = (key.shape.q_heads, key.shape.kv_heads, key.shape.head_dim);
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut random = |dims: &[usize]| {
        let values: Vec<f32> = (0..dims.iter().product()).map(|_| rng.random_range(-1.0..1.0)).collect();
        Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
    };
    let mut layers = |of: &str, heads: usize, widths: &[usize]| -> Vec<Named> {
        let mut all = Vec::new();
        for (layer, (i, w)) in
            (0..key.shape.layers).flat_map(|layer| widths.windows(2).enumerate().map(move |w| (layer, w)))
        {
            all.push((format!("layers.{layer}.{of}.{i}.weight"), random(&[heads, w[1], w[0]])));
            all.push((format!("layers.{layer}.{of}.{i}.bias"), random(&[heads, w[1]])));
        }
        all
    };
    let maps = [layers("query", q, &[d, 16, 16, 32]), layers("key", kv, &[d, 16, 16, 32])].concat();
    let classifier = layers("classifier", kv, &[d, 16, 8]);
    let mut centroids = || -> Vec<Named> {
        (0..key.shape.layers).map(|layer| (format!("layers.{layer}.centroids"), random(&[kv, 8, d]))).collect()
    };
    let channels = Tensor::from_iter((0..key.shape.layers * kv * 8).map(|i| (i % 8 * 2) as u32), &Device::Cpu).unwrap();
    let channels = channels.reshape((key.shape.layers, kv, 8)).unwrap();
    let files = [
        ("double_sparsity", vec![("channels".to_owned(), channels)]),
        ("hash_attention", maps),
        ("kmeans", centroids()),
        ("kmeans-rope", centroids()),
        ("saap", [centroids(), classifier].concat()),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (method, tensors) in files {
        let header = [("format", "taper-artefact-1"), ("method", method), ("model", &key.fingerprint)];
        let header = header.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        let bytes = safetensors::serialize(tensors.iter().map(|(name, tensor)| (name, tensor)), Some(header)).unwrap();
        fs::write(folder.path().join(format!("{method}.safetensors")), bytes).unwrap();
    }
    Artifacts::open(folder.path(), &key).unwrap()
});
