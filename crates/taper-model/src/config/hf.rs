//! `config.json` and `generation_config.json` of a Hugging Face folder.
//!
//! Own serde types: candle-transformers' configurations know neither YaRN nor a sliding window that may be null.

use super::ModelConfig;
use super::checked::{FieldNames, check, check_scaling, stretched};
use crate::error::ModelError;
use crate::rope::{Rope, RopeScaling};
use serde::Deserialize;
use std::path::Path;

const NAMES: FieldNames = FieldNames {
    vocab_size: "vocab_size",
    hidden_size: "hidden_size",
    intermediate_size: "intermediate_size",
    layers: "num_hidden_layers",
    q_heads: "num_attention_heads",
    kv_heads: "num_key_value_heads",
    head_dim: "head_dim",
    rms_norm_eps: "rms_norm_eps",
    rope_theta: "rope_theta",
    context_length: "max_position_embeddings",
    sliding_window: "sliding_window",
};

/// The window that Mistral's configuration has where the field is absent; v0.2 and later write null.
const MISTRAL_WINDOW: usize = 4096;

/// The key and value heads that it has where the field is absent; null are as many as there are query heads.
const MISTRAL_KV_HEADS: usize = 8;

#[derive(Deserialize)]
struct RawConfig {
    #[serde(default)]
    architectures: Option<Vec<String>>,
    #[serde(default)]
    model_type: Option<String>,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    /// Absent and null differ: see `MISTRAL_KV_HEADS`.
    #[serde(default, deserialize_with = "present")]
    num_key_value_heads: Option<Option<usize>>,
    #[serde(default)]
    head_dim: Option<usize>,
    rms_norm_eps: f64,
    #[serde(default)]
    rope_theta: Option<f64>,
    #[serde(default)]
    rope_scaling: Option<RawRope>,
    #[serde(default)]
    rope_parameters: Option<RawRope>,
    #[serde(default)]
    partial_rotary_factor: Option<f64>,
    max_position_embeddings: usize,
    /// Of models that are stretched linearly and say here how far.
    #[serde(default)]
    max_sequence_length: Option<usize>,
    /// Goes over the one beside the scaling's other numbers.
    #[serde(default)]
    original_max_position_embeddings: Option<usize>,
    /// Absent and null differ: see `MISTRAL_WINDOW`.
    #[serde(default, deserialize_with = "present")]
    sliding_window: Option<Option<usize>>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    hidden_act: Option<String>,
    #[serde(default)]
    quantization_config: Option<serde::de::IgnoredAny>,
    #[serde(default)]
    eos_token_id: Option<OneOrMany>,
}

/// The families that the forward pass knows; they differ only in the sliding window.
#[derive(Debug, Clone, Copy)]
enum Architecture {
    /// Llama 1, 2, 3, 3.1, 3.2 and SmolLM2.
    Llama,
    /// Mistral 7B v0.1 to v0.3 and NeMo.
    Mistral,
}

/// `rope_scaling` of older files, `rope_parameters` of newer ones.
#[derive(Deserialize, Default, PartialEq)]
struct RawRope {
    #[serde(default)]
    rope_type: Option<String>,
    #[serde(default, rename = "type")]
    old_type: Option<String>,
    #[serde(default)]
    rope_theta: Option<f64>,
    #[serde(default)]
    partial_rotary_factor: Option<f64>,
    #[serde(default)]
    factor: Option<f64>,
    #[serde(default)]
    original_max_position_embeddings: Option<usize>,
    #[serde(default)]
    low_freq_factor: Option<f64>,
    #[serde(default)]
    high_freq_factor: Option<f64>,
    #[serde(default)]
    beta_fast: Option<f64>,
    #[serde(default)]
    beta_slow: Option<f64>,
    #[serde(default)]
    attention_factor: Option<f64>,
    #[serde(default)]
    mscale: Option<f64>,
    #[serde(default)]
    mscale_all_dim: Option<f64>,
    #[serde(default)]
    truncate: Option<bool>,
}

/// Token ids as files write them.
#[derive(Deserialize)]
#[serde(untagged, expecting = "must be a token's id or a list of ids")]
enum OneOrMany {
    One(i64),
    Many(Vec<i64>),
}

#[derive(Deserialize)]
struct RawGeneration {
    #[serde(default)]
    eos_token_id: Option<OneOrMany>,
}

fn present<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Option<usize>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// Reads a folder's configuration.
pub(super) fn read(folder: &Path, name: &str) -> Result<ModelConfig, ModelError> {
    let path = folder.join("config.json");
    if !path.exists() {
        return Err(ModelError::missing(folder, "config.json, which a model's folder has,"));
    }
    let raw: RawConfig = crate::json::read(&path)?;
    let architecture = architecture(&path, &raw)?;
    refuse_unsupported(&path, &raw)?;

    let kv_heads = match (raw.num_key_value_heads, &architecture) {
        (None, Architecture::Mistral) => MISTRAL_KV_HEADS,
        (given, _) => given.flatten().unwrap_or(raw.num_attention_heads),
    };
    let head_dim = match raw.head_dim {
        Some(head_dim) => head_dim,
        None if raw.num_attention_heads > 0 && raw.hidden_size.is_multiple_of(raw.num_attention_heads) => {
            raw.hidden_size / raw.num_attention_heads
        }
        None => {
            let reason = format!("{} does not divide hidden_size = {}", raw.num_attention_heads, raw.hidden_size);
            return Err(ModelError::invalid(&path, "num_attention_heads", reason));
        }
    };
    let sliding_window = match architecture {
        Architecture::Llama => None,
        Architecture::Mistral => raw.sliding_window.unwrap_or(Some(MISTRAL_WINDOW)),
    };
    let (rope, context_length) = rope(&path, &raw, head_dim)?;
    let config = ModelConfig {
        name: name.to_owned(),
        vocab_size: raw.vocab_size,
        hidden_size: raw.hidden_size,
        intermediate_size: raw.intermediate_size,
        layers: raw.num_hidden_layers,
        q_heads: raw.num_attention_heads,
        kv_heads,
        head_dim,
        rms_norm_eps: raw.rms_norm_eps,
        rope,
        context_length,
        sliding_window,
        tie_embeddings: raw.tie_word_embeddings,
        eos_tokens: eos_tokens(folder, &path, raw.eos_token_id)?,
    };
    check(&path, &NAMES, &config)?;
    Ok(config)
}

fn architecture(path: &Path, raw: &RawConfig) -> Result<Architecture, ModelError> {
    if let Some(name) = raw.architectures.as_ref().and_then(|names| names.first()) {
        return match name.as_str() {
            "LlamaForCausalLM" | "LlamaModel" => Ok(Architecture::Llama),
            "MistralForCausalLM" | "MistralModel" => Ok(Architecture::Mistral),
            other => Err(ModelError::unsupported(path, "architectures", other)),
        };
    }
    match raw.model_type.as_deref() {
        Some("llama") => Ok(Architecture::Llama),
        Some("mistral") => Ok(Architecture::Mistral),
        Some(other) => Err(ModelError::unsupported(path, "model_type", other)),
        None => Err(ModelError::missing(path, "architectures")),
    }
}

/// Fields that change the arithmetic in ways that the forward pass does not do.
fn refuse_unsupported(path: &Path, raw: &RawConfig) -> Result<(), ModelError> {
    if raw.attention_bias {
        return Err(ModelError::unsupported(path, "attention_bias", "true"));
    }
    if raw.mlp_bias {
        return Err(ModelError::unsupported(path, "mlp_bias", "true"));
    }
    if let Some(other) = raw.hidden_act.as_deref().filter(|act| !matches!(*act, "silu" | "swish")) {
        return Err(ModelError::unsupported(path, "hidden_act", other));
    }
    if raw.quantization_config.is_some() {
        return Err(ModelError::unsupported(path, "quantization_config", "a quantised safetensors checkpoint"));
    }
    let ropes = [&raw.rope_scaling, &raw.rope_parameters].into_iter().flatten();
    let mut partial = ropes.filter_map(|rope| rope.partial_rotary_factor).chain(raw.partial_rotary_factor);
    if partial.any(|p| p != 1.0) {
        return Err(ModelError::unsupported(path, "partial_rotary_factor", "rotating a part of each head"));
    }
    Ok(())
}

/// The rotary embedding, and the context length that it reaches.
fn rope(path: &Path, raw: &RawConfig, head_dim: usize) -> Result<(Rope, usize), ModelError> {
    let none = RawRope::default();
    // Beside the newer field the older one was added by hand, to stretch the context: as in transformers it holds.
    let added = raw.rope_scaling.as_ref().filter(|added| **added != none);
    let (group, given) = match (added, &raw.rope_parameters) {
        (Some(given), _) => ("rope_scaling", given),
        (None, Some(given)) => ("rope_parameters", given),
        (None, None) => ("rope_scaling", &none),
    };
    let need =
        |field: &str, value: Option<f64>| value.ok_or_else(|| ModelError::missing(path, format!("{group}.{field}")));
    let positions = raw.max_position_embeddings;
    let apart = raw.original_max_position_embeddings;
    let original = apart.or(given.original_max_position_embeddings).unwrap_or(positions);
    if original == 0 {
        let group = if apart.is_some() { String::new() } else { format!("{group}.") };
        return Err(ModelError::invalid(path, format!("{group}original_max_position_embeddings"), "is 0"));
    }
    let mut context_length = positions;
    let scaling = match given.rope_type.as_deref().or(given.old_type.as_deref()).unwrap_or("default") {
        "default" => RopeScaling::Default,
        "linear" => {
            let factor = need("factor", given.factor)?;
            // Most say the positions after the stretch, Vicuna and LongChat those before it and the others apart.
            let said = raw.max_sequence_length.unwrap_or(positions);
            context_length = positions.max(said.min(stretched(positions, factor)));
            RopeScaling::Linear { factor }
        }
        "dynamic" => {
            let factor = need("factor", given.factor)?;
            // The stretch sets in past max_position_embeddings, so the context reaches beyond it.
            context_length = stretched(positions, factor);
            RopeScaling::Dynamic { factor, original_context: positions }
        }
        "llama3" => RopeScaling::Llama3 {
            factor: need("factor", given.factor)?,
            low_freq_factor: need("low_freq_factor", given.low_freq_factor)?,
            high_freq_factor: need("high_freq_factor", given.high_freq_factor)?,
            original_context: original,
        },
        "yarn" => {
            let factor = given.factor.unwrap_or(positions as f64 / original as f64);
            // Some files say what the stretch comes to, others what there was before it.
            context_length = positions.max(stretched(original, factor));
            RopeScaling::Yarn {
                factor,
                original_context: original,
                beta_fast: given.beta_fast.unwrap_or(32.0),
                beta_slow: given.beta_slow.unwrap_or(1.0),
                truncate: given.truncate.unwrap_or(true),
                attention_factor: given.attention_factor.unwrap_or_else(|| yarn_attention_factor(given, factor)),
            }
        }
        other => return Err(ModelError::unsupported(path, format!("{group}.rope_type"), other)),
    };
    check_scaling(path, group, &scaling)?;
    let beside = raw.rope_parameters.as_ref().and_then(|parameters| parameters.rope_theta);
    let theta = given.rope_theta.or(raw.rope_theta).or(beside).unwrap_or(10_000.0);
    Ok((Rope { theta, head_dim, scaling }, context_length))
}

/// YaRN's temperature where the file does not give it.
fn yarn_attention_factor(given: &RawRope, factor: f64) -> f64 {
    let temperature = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
    match (given.mscale, given.mscale_all_dim) {
        (Some(numerator), Some(denominator)) if numerator != 0.0 && denominator != 0.0 => {
            temperature(numerator) / temperature(denominator)
        }
        _ => temperature(1.0),
    }
}

/// The tokens that end a generation: those of both files, since instruction models list more in the second.
fn eos_tokens(folder: &Path, config: &Path, from_config: Option<OneOrMany>) -> Result<Vec<u32>, ModelError> {
    let mut tokens = ids(config, from_config)?;
    let path = folder.join("generation_config.json");
    if path.exists() {
        let raw: RawGeneration = crate::json::read(&path)?;
        tokens.extend(ids(&path, raw.eos_token_id)?);
    }
    tokens.sort_unstable();
    tokens.dedup();
    Ok(tokens)
}

/// Ids that can be a token's. Negative ones stand for none: transformers warns of them too, and no token is one.
fn ids(path: &Path, given: Option<OneOrMany>) -> Result<Vec<u32>, ModelError> {
    const FIELD: &str = "eos_token_id";
    let given = match given {
        None => Vec::new(),
        Some(OneOrMany::One(id)) => vec![id],
        Some(OneOrMany::Many(ids)) => ids,
    };
    let (none, ids): (Vec<i64>, Vec<i64>) = given.into_iter().partition(|id| *id < 0);
    if let Some(id) = none.first() {
        tracing::warn!("{}: {FIELD}: {id} is no token: no answer ends by it", path.display());
    }
    let id = |id: i64| {
        let most = u32::MAX;
        u32::try_from(id).map_err(|_| ModelError::invalid(path, FIELD, format!("{id} is not between 0 and {most}")))
    };
    ids.into_iter().map(id).collect()
}
