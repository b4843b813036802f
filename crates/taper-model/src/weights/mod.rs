//! Tensors by role, from safetensors or GGUF, each checked against the shape that the configuration asks for.

mod digest;
mod embedding;
mod gguf;
mod random;
mod safetensors;

pub use digest::weights_digest;
pub(crate) use embedding::{Embedding, FileRows};
pub(crate) use random::Random;
pub(crate) use safetensors::{INDEX, SINGLE, indexed};

use crate::config::{LoadOptions, ModelConfig, WeightDType};
use crate::error::ModelError;
use crate::source::{ModelFiles, ResolvedModel};
use candle_core::{DType, Device, Tensor};
use taper_kernels::linear::Linear;

/// A tensor's role in the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Embedding,
    FinalNorm,
    Head,
    AttentionNorm,
    Query,
    Key,
    Value,
    Output,
    FeedForwardNorm,
    Gate,
    Up,
    Down,
}

impl Role {
    /// Those outside the layers.
    const OUTSIDE: [Self; 3] = [Self::Embedding, Self::FinalNorm, Self::Head];
    /// Those of every layer.
    const IN_LAYER: [Self; 9] = [
        Self::AttentionNorm,
        Self::Query,
        Self::Key,
        Self::Value,
        Self::Output,
        Self::FeedForwardNorm,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];

    fn is_norm(self) -> bool {
        matches!(self, Self::FinalNorm | Self::AttentionNorm | Self::FeedForwardNorm)
    }
}

/// The tensors of one checkpoint. `layer` is ignored for the three roles outside the layers.
pub(crate) trait Weights {
    /// The embedding table `[vocab, hidden]`, looked up row by row.
    fn embedding(&self) -> Result<Embedding, ModelError>;

    /// A norm's weight `[hidden]`, f32.
    fn norm(&self, role: Role, layer: usize) -> Result<Tensor, ModelError>;

    /// The projections of one input joined into one, their outputs side by side in the order given; or, where their
    /// formats differ, one for each.
    fn projections(&self, roles: &[Role], layer: usize) -> Result<Vec<Linear>, ModelError>;

    /// The output head, `[vocab, hidden]`: the embedding table where they are tied.
    fn head(&self) -> Result<Linear, ModelError>;

    /// Bytes that a role's tensor takes in memory once it is loaded: none if it stays in its file or is another one's.
    fn bytes(&self, role: Role, layer: usize) -> Result<u64, ModelError>;

    /// The dtype that activations must have when they meet a projection.
    fn activation_dtype(&self) -> DType;
}

/// Bytes of what weights take in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// All of them.
    pub(crate) total: u64,
    /// What is there twice while parts are joined or turned into another dtype: on a device the most of it, in host memory, of
    /// which there may be more than it seems, the head alone, which comes last.
    pub(crate) joining: u64,
}

impl Sizes {
    /// Of a whole model.
    ///
    /// # Errors
    /// A tensor that is missing or of another shape.
    pub(crate) fn of(config: &ModelConfig, weights: &dyn Weights, device: &Device) -> Result<Self, ModelError> {
        let sum = |roles: &[Role], layer| roles.iter().map(|role| weights.bytes(*role, layer)).sum::<Result<u64, _>>();
        let layers = (0..config.layers).map(|layer| layer_bytes(weights, layer)).sum::<Result<u64, _>>()?;
        let outside = sum(&Role::OUTSIDE, 0)?;
        let head = sum(&[Role::Head], 0)?;
        let joining = if device.is_cpu() { head } else { sum(&[Role::Gate, Role::Up], 0)?.max(head) };
        Ok(Self { total: outside + layers, joining })
    }

    /// Refuses what a device that can give so many bytes cannot hold.
    pub(crate) fn fit(&self, room: u64, device: &Device) -> Result<(), ModelError> {
        let (wanted, place) = (self.total + self.joining, if device.is_cpu() { "host" } else { "device's" });
        if wanted > room { Err(ModelError::Memory { wanted, room, place }) } else { Ok(()) }
    }
}

/// Bytes that a layer's weights take in memory.
///
/// # Errors
/// A tensor that is missing or of another shape.
pub(crate) fn layer_bytes(weights: &dyn Weights, layer: usize) -> Result<u64, ModelError> {
    Role::IN_LAYER.iter().map(|role| weights.bytes(*role, layer)).sum()
}

/// The part of a layer that a tensor is, where it is none of those that are read: without it a model's numbers may be others.
/// `name` names a role's tensor, which in a layer begins with `prefix` and the layer's number.
fn unread_part<'a>(tensor: &'a str, prefix: &str, name: fn(Role, usize) -> String) -> Option<&'a str> {
    let (_, part) = tensor.strip_prefix(prefix)?.split_once('.')?;
    let first = format!("{prefix}0.{part}");
    Role::IN_LAYER.iter().all(|&role| name(role, 0) != first).then_some(part)
}

/// What is said of such a part where it is known to matter.
const UNREAD: &str = "is part of a layer, but no part that is read: answers would be others";

/// Opens a checkpoint's weights.
pub(crate) fn open<'a>(
    model: &ResolvedModel,
    config: &'a ModelConfig,
    options: &LoadOptions,
    device: &'a Device,
) -> Result<Box<dyn Weights + 'a>, ModelError> {
    Ok(match &model.files {
        ModelFiles::Folder(folder) => Box::new(safetensors::Safetensors::open(folder, config, options, device)?),
        ModelFiles::Gguf(path) => Box::new(gguf::GgufWeights::open(path, config, options, device)?),
    })
}

/// The dtype of activations that meet float weights of a dtype: on the CPU products take f32, whatever the weights are.
fn activation_dtype(weights: DType, device: &Device) -> DType {
    if device.is_cpu() { DType::F32 } else { weights }
}

/// The dtype that a float weight stored as `stored` is kept in.
fn float_dtype(options: &LoadOptions, stored: DType) -> DType {
    match options.dtype {
        WeightDType::Auto => stored,
        WeightDType::F32 => DType::F32,
        WeightDType::F16 => DType::F16,
        WeightDType::BF16 => DType::BF16,
    }
}

/// The shape of a role's tensor, rows first.
fn expected_shape(config: &ModelConfig, role: Role) -> Vec<usize> {
    let hidden = config.hidden_size;
    match role {
        Role::Embedding | Role::Head => vec![config.vocab_size, hidden],
        Role::FinalNorm | Role::AttentionNorm | Role::FeedForwardNorm => vec![hidden],
        Role::Query => vec![config.q_heads * config.head_dim, hidden],
        Role::Key | Role::Value => vec![config.kv_heads * config.head_dim, hidden],
        Role::Output => vec![hidden, config.q_heads * config.head_dim],
        Role::Gate | Role::Up => vec![config.intermediate_size, hidden],
        Role::Down => vec![hidden, config.intermediate_size],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_weights_take_is_held_against_what_is_free() {
        let (config, device) = (ModelConfig::of_shape("llama-3.1-8b").unwrap(), &Device::Cpu);
        let of = |dtype| Sizes::of(&config, &Random { config: &config, dtype, device }, device).unwrap();
        let half = of(DType::BF16);
        // 8,030,261,248 weights, of which those of 65 norms are f32.
        assert_eq!(half.total, 2 * 8_030_261_248 + 2 * 65 * 4096);
        assert_eq!(half.joining, 2 * 128_256 * 4096, "the head");
        assert_eq!(of(DType::F32).total, 4 * 8_030_261_248);
        half.fit(half.total + half.joining, device).unwrap();
        let error = half.fit(12 << 30, device).unwrap_err().to_string();
        assert!(error.contains("take 15.9 GiB of host memory") && error.contains("12.0 GiB"), "{error}");
        assert!(error.contains("--dtype"), "{error}");
    }

    /// Otherwise the system ends the process once they are half there.
    #[cfg(target_os = "linux")]
    #[test]
    fn weights_beyond_host_memory_are_refused_before_they_are_made() {
        let config = ModelConfig { layers: 1 << 20, ..ModelConfig::of_shape("llama-3.1-8b").unwrap() };
        let error = crate::Model::random(&config, DType::F32, &Device::Cpu).unwrap_err();
        assert!(matches!(error, ModelError::Memory { wanted, .. } if wanted > 800 << 40), "{error}");
    }
}
