//! A GGUF file's metadata as a configuration.

use super::ModelConfig;
use super::checked::{FieldNames, check, check_scaling, stretched};
use crate::error::ModelError;
use crate::gguf::Gguf;
use crate::rope::{Rope, RopeScaling};
use crate::tokenizer::gguf::{TOKENS, TYPES, ends_by_name};

const NAMES: FieldNames = FieldNames {
    vocab_size: "token_embd.weight",
    hidden_size: "llama.embedding_length",
    intermediate_size: "llama.feed_forward_length",
    layers: "llama.block_count",
    q_heads: "llama.attention.head_count",
    kv_heads: "llama.attention.head_count_kv",
    head_dim: "llama.attention.key_length",
    rms_norm_eps: "llama.attention.layer_norm_rms_epsilon",
    rope_theta: "llama.rope.freq_base",
    context_length: "llama.context_length",
    sliding_window: "llama.attention.sliding_window",
};

/// Reads the configuration. Mistral's GGUF files call themselves llama too.
pub(super) fn read(gguf: &Gguf, name: &str) -> Result<ModelConfig, ModelError> {
    let path = gguf.path();
    let architecture = gguf.str("general.architecture")?;
    if architecture != "llama" {
        return Err(ModelError::unsupported(path, "general.architecture", architecture));
    }
    if gguf.optional_u64("llama.expert_count")?.unwrap_or(0) > 0 {
        return Err(ModelError::unsupported(path, "llama.expert_count", "a mixture of experts"));
    }
    let size = |key| gguf.u64(key).map(|n| n as usize);
    let optional = |key| gguf.optional_u64(key).map(|n| n.map(|n| n as usize));

    let embedding = gguf.tensor("token_embd.weight").ok_or_else(|| ModelError::missing(path, "token_embd.weight"))?;
    let hidden_size = size(NAMES.hidden_size)?;
    let q_heads = size(NAMES.q_heads)?;
    let kv_heads = optional(NAMES.kv_heads)?.unwrap_or(q_heads);
    let head_dim = match optional(NAMES.head_dim)? {
        Some(head_dim) => head_dim,
        None if q_heads > 0 && hidden_size.is_multiple_of(q_heads) => hidden_size / q_heads,
        None => {
            let reason = format!("{q_heads} does not divide {} = {hidden_size}", NAMES.hidden_size);
            return Err(ModelError::invalid(path, NAMES.q_heads, reason));
        }
    };
    if let Some(width) = optional("llama.attention.value_length")?.filter(|width| *width != head_dim) {
        let reason = format!("{width} beside a key length of {head_dim}");
        return Err(ModelError::unsupported(path, "llama.attention.value_length", reason));
    }
    if let Some(width) = optional("llama.rope.dimension_count")?.filter(|width| *width != head_dim) {
        let reason = format!("rotating {width} of a head's {head_dim} dimensions");
        return Err(ModelError::unsupported(path, "llama.rope.dimension_count", reason));
    }
    let theta = gguf.optional_f64(NAMES.rope_theta)?.unwrap_or(10_000.0);
    let scaling = scaling(gguf, head_dim)?;
    let context_length = match scaling {
        RopeScaling::Yarn { factor, original_context, .. } => {
            size(NAMES.context_length)?.max(stretched(original_context, factor))
        }
        _ => size(NAMES.context_length)?,
    };
    let config = ModelConfig {
        name: name.to_owned(),
        vocab_size: embedding.shape[0],
        hidden_size,
        intermediate_size: size(NAMES.intermediate_size)?,
        layers: size(NAMES.layers)?,
        q_heads,
        kv_heads,
        head_dim,
        rms_norm_eps: gguf
            .optional_f64(NAMES.rms_norm_eps)?
            .ok_or_else(|| ModelError::missing(path, NAMES.rms_norm_eps))?,
        rope: Rope { theta, head_dim, scaling },
        context_length,
        sliding_window: optional(NAMES.sliding_window)?.filter(|window| *window > 0),
        tie_embeddings: gguf.tensor("output.weight").is_none(),
        eos_tokens: eos_tokens(gguf)?,
    };
    check(path, &NAMES, &config)?;
    Ok(config)
}

/// Llama 3.1's rule.
const ROPE_FREQS: &str = "rope_freqs.weight";

/// llama.cpp writes Llama 3.1's rule as a tensor of divisors, the others as metadata. Where a file has both, it applies both:
/// a frequency is divided, and what comes of it scaled.
fn scaling(gguf: &Gguf, head_dim: usize) -> Result<RopeScaling, ModelError> {
    let by_metadata = scaling_by_metadata(gguf)?;
    let Some(mut divisors) = divisors(gguf, head_dim)? else { return Ok(by_metadata) };
    match by_metadata {
        RopeScaling::Default => {}
        RopeScaling::Linear { factor } => divisors.iter_mut().for_each(|divisor| *divisor *= factor as f32),
        _ => {
            let reason = format!("yarn beside the tensor {ROPE_FREQS}");
            return Err(ModelError::unsupported(gguf.path(), "llama.rope.scaling.type", reason));
        }
    }
    if !divisors.iter().all(|d| d.is_finite() && *d > 0.0) {
        let reason = "holds values that are not above 0, or beyond all numbers";
        return Err(ModelError::invalid(gguf.path(), ROPE_FREQS, reason));
    }
    Ok(RopeScaling::Divisors(divisors))
}

/// The tensor of divisors, one for each pair of dimensions.
fn divisors(gguf: &Gguf, head_dim: usize) -> Result<Option<Vec<f32>>, ModelError> {
    let Some(tensor) = gguf.tensor(ROPE_FREQS) else { return Ok(None) };
    if tensor.dtype != candle_core::quantized::GgmlDType::F32 || tensor.shape != [head_dim / 2] {
        return Err(ModelError::invalid(gguf.path(), ROPE_FREQS, format!("must be {} f32 values", head_dim / 2)));
    }
    let bytes = gguf.tensor_bytes(tensor).chunks_exact(4);
    Ok(Some(bytes.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()))
}

fn scaling_by_metadata(gguf: &Gguf) -> Result<RopeScaling, ModelError> {
    let path = gguf.path();
    const GROUP: &str = "llama.rope.scaling";
    let factor = match gguf.optional_f64("llama.rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => gguf.optional_f64("llama.rope.scale_linear")?,
    };
    let kind = gguf.optional_str("llama.rope.scaling.type")?;
    let need_factor = || factor.ok_or_else(|| ModelError::missing(path, "llama.rope.scaling.factor"));
    let scaling = match (kind, factor) {
        (None, Some(factor)) if factor != 1.0 => RopeScaling::Linear { factor },
        (None | Some("none"), _) => RopeScaling::Default,
        (Some("linear"), _) => RopeScaling::Linear { factor: need_factor()? },
        (Some("yarn"), _) => {
            let factor = need_factor()?;
            let original = gguf.u64("llama.rope.scaling.original_context_length")? as usize;
            if original == 0 {
                return Err(ModelError::invalid(path, "llama.rope.scaling.original_context_length", "is 0"));
            }
            let extra = gguf.optional_f64("llama.rope.scaling.attn_factor")?.unwrap_or(1.0);
            let number = |key, default| gguf.optional_f64(key).map(|n| n.unwrap_or(default));
            RopeScaling::Yarn {
                factor,
                original_context: original,
                beta_fast: number("llama.rope.scaling.yarn_beta_fast", 32.0)?,
                beta_slow: number("llama.rope.scaling.yarn_beta_slow", 1.0)?,
                truncate: true,
                attention_factor: extra * (1.0 + 0.1 * factor.max(1.0).ln()),
            }
        }
        (Some(other), _) => return Err(ModelError::unsupported(path, "llama.rope.scaling.type", other)),
    };
    check_scaling(path, GROUP, &scaling)?;
    Ok(scaling)
}

/// A token id that may be absent.
pub(crate) fn token(gguf: &Gguf, key: &str) -> Result<Option<u32>, ModelError> {
    let Some(id) = gguf.optional_u64(key)? else { return Ok(None) };
    match u32::try_from(id) {
        // Files that have no such token write all ones.
        Ok(u32::MAX) => Ok(None),
        Ok(id) => Ok(Some(id)),
        Err(_) => Err(ModelError::invalid(gguf.path(), key, format!("{id} is no token id"))),
    }
}

/// End of sequence, of a turn and of a message where the file has them, and tokens that are an end by their names.
fn eos_tokens(gguf: &Gguf) -> Result<Vec<u32>, ModelError> {
    let mut tokens = Vec::new();
    for part in ["eos", "eot", "eom"] {
        tokens.extend(token(gguf, &format!("tokenizer.ggml.{part}_token_id"))?);
    }
    let types = gguf.optional_integers(TYPES)?.unwrap_or_default();
    let names = gguf.optional_strings(TOKENS)?.unwrap_or_default();
    let ends = (0u32..).zip(names).zip(types).filter(|((_, name), kind)| ends_by_name(name, *kind));
    tokens.extend(ends.map(|((id, _), _)| id));
    tokens.sort_unstable();
    tokens.dedup();
    Ok(tokens)
}
