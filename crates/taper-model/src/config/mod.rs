//! What a checkpoint says about itself, checked once: the same for a Hugging Face folder and for a GGUF file.

mod checked;
mod generation;
pub(crate) mod gguf;
mod hf;
mod shapes;

use crate::error::ModelError;
pub use crate::rope::{Rope, RopeScaling};
pub use generation::GenerationConfig;

use crate::source::{ModelFiles, Progress, ResolvedModel};
use sha2::{Digest, Sha256};
use std::path::PathBuf;
use taper_attention::{AttentionShape, ModelKey};

/// The dtype that a float checkpoint's weights are kept in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WeightDType {
    /// The checkpoint's own dtype.
    #[default]
    Auto,
    /// 32-bit floats.
    F32,
    /// 16-bit floats with 10 bits of fraction.
    F16,
    /// 16-bit floats with the range of f32.
    BF16,
}

/// How to load a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// The dtype for float weights, and for quantised ones under `dequantize`. On a device floats beside quantised ones are f32.
    pub dtype: WeightDType,
    /// Turns a GGUF's quantised weights into floats while loading, instead of keeping them quantised.
    pub dequantize: bool,
    /// Lowers the context length that the model reports; a limit above the model's own is an error.
    pub context_limit: Option<usize>,
    /// A file of the chat template that stands in place of the model's own.
    pub chat_template: Option<PathBuf>,
    /// Whether loading says how far it is.
    pub progress: Progress,
}

/// A checkpoint's hyperparameters.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The model's name, for `/v1/models`.
    pub name: String,
    /// Rows of the embedding table, and logits of a token.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads of a layer.
    pub q_heads: usize,
    /// Key and value heads of a layer; divides `q_heads`.
    pub kv_heads: usize,
    /// Width of a head; need not be `hidden_size / q_heads`.
    pub head_dim: usize,
    /// The epsilon of the RMS norms.
    pub rms_norm_eps: f64,
    /// Rotary position embedding.
    pub rope: Rope,
    /// The most tokens that a sequence may hold.
    pub context_length: usize,
    /// The model's own sliding window in tokens, the query's token included.
    pub sliding_window: Option<usize>,
    /// Whether the output head is the embedding table, as far as the checkpoint has no other.
    pub tie_embeddings: bool,
    /// The tokens that end a generation.
    pub eos_tokens: Vec<u32>,
}

impl ModelConfig {
    /// Reads the configuration alone: `config.json` and `generation_config.json`, or a GGUF's metadata.
    ///
    /// # Errors
    /// [`ModelError`] naming the file and the field that is missing, malformed, contradictory or not supported.
    pub fn read(model: &ResolvedModel) -> Result<Self, ModelError> {
        match &model.files {
            ModelFiles::Folder(folder) => hf::read(folder, &model.name),
            ModelFiles::Gguf(path) => gguf::read(&crate::gguf::Gguf::open(path)?, &model.name),
        }
    }

    /// What attention needs to know.
    pub fn attention_shape(&self) -> AttentionShape {
        AttentionShape {
            layers: self.layers,
            q_heads: self.q_heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            window: self.sliding_window,
        }
    }

    /// What artefacts made for this model are known by: its shape, and a hash of the sizes, the rotary base and its scaling that
    /// a folder and a GGUF file of one model agree on.
    pub fn key(&self) -> ModelKey {
        let Self { layers, q_heads, kv_heads, head_dim, hidden_size, intermediate_size, vocab_size, .. } = self;
        // GGUF files round it to this.
        let theta = self.rope.theta as f32;
        let sizes = [layers, q_heads, kv_heads, head_dim, hidden_size, intermediate_size, vocab_size];
        let mut text = sizes.map(ToString::to_string).join(" ") + &format!(" {theta}");
        if let Some((rule, factor)) = self.rope.stretch() {
            text += &format!(" {rule} {factor}");
        }
        let fingerprint = fingerprint(Sha256::new().chain_update(text));
        ModelKey { shape: self.attention_shape(), fingerprint }
    }

    /// Lowers the context length to a caller's limit.
    pub(crate) fn limit_context(&mut self, limit: Option<usize>) -> Result<(), ModelError> {
        match limit {
            None => Ok(()),
            Some(limit) if (1..=self.context_length).contains(&limit) => {
                self.context_length = limit;
                Ok(())
            }
            Some(limit) => Err(ModelError::ContextLimit { limit, model: self.context_length }),
        }
    }
}

/// The beginning of a hash, enough to tell things apart that nobody makes alike on purpose.
pub(crate) fn fingerprint(hash: Sha256) -> String {
    hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_models_key_tells_how_its_rotary_embedding_is_stretched() {
        let scaled = ModelConfig::of_shape("llama-3.1-8b").unwrap();
        let with = |scaling| ModelConfig { rope: Rope { scaling, ..scaled.rope.clone() }, ..scaled.clone() };
        let key = |config: &ModelConfig| config.key().fingerprint;
        let plain = with(RopeScaling::Default);
        // As it was before scaling was part of it: what was trained for such models stays valid.
        assert_eq!(key(&plain), "1857fb37095f4c4f");
        assert_ne!(key(&scaled), key(&plain));
        let ratios = plain.rope.frequencies(1).into_iter().zip(scaled.rope.frequencies(1));
        let divisors: Vec<f32> = ratios.map(|(plain, scaled)| plain / scaled).collect();
        assert_eq!(key(&with(RopeScaling::Divisors(divisors))), key(&scaled), "a GGUF file of the same model");
        assert_eq!(key(&with(RopeScaling::Divisors(vec![1.0; 64]))), key(&plain));
        let based = |theta| key(&ModelConfig { rope: Rope { theta, ..plain.rope.clone() }, ..plain.clone() });
        // llama-3-8b-instruct-gradient-1048k's.
        assert_eq!(based(3_580_165_449.0), based(f64::from(3_580_165_449f32)), "a GGUF file of the same model");
        let linear = with(RopeScaling::Linear { factor: 8.0 });
        assert!(key(&linear) != key(&scaled) && key(&linear) != key(&with(RopeScaling::Linear { factor: 4.0 })));
    }
}
