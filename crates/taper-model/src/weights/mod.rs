//! Tensors by role, from safetensors or GGUF, each checked against the shape that the configuration asks for.

mod embedding;
mod gguf;
mod random;
mod safetensors;

pub(crate) use embedding::{Embedding, FileRows};
pub(crate) use random::Random;

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

    /// The dtype that activations must have when they meet a projection.
    fn activation_dtype(&self) -> DType;
}

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
