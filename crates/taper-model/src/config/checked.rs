//! The checks that both formats share: a configuration that passes can be allocated for and run.

use super::{ModelConfig, RopeScaling};
use crate::error::ModelError;
use std::path::Path;

/// Above these a size is a damaged file, not a model; products of two of them still fit 64 bits.
const SIZE_MAX: usize = 1 << 24;
const LAYERS_MAX: usize = 4096;
const CONTEXT_MAX: usize = 1 << 30;

/// The names by which the format at hand calls the fields, for messages.
pub(super) struct FieldNames {
    pub(super) vocab_size: &'static str,
    pub(super) hidden_size: &'static str,
    pub(super) intermediate_size: &'static str,
    pub(super) layers: &'static str,
    pub(super) q_heads: &'static str,
    pub(super) kv_heads: &'static str,
    pub(super) head_dim: &'static str,
    pub(super) rms_norm_eps: &'static str,
    pub(super) rope_theta: &'static str,
    pub(super) context_length: &'static str,
    pub(super) sliding_window: &'static str,
}

/// Refuses what no model can be.
pub(super) fn check(path: &Path, names: &FieldNames, config: &ModelConfig) -> Result<(), ModelError> {
    let sizes = [
        (names.vocab_size, config.vocab_size, SIZE_MAX),
        (names.hidden_size, config.hidden_size, SIZE_MAX),
        (names.intermediate_size, config.intermediate_size, SIZE_MAX),
        (names.layers, config.layers, LAYERS_MAX),
        (names.q_heads, config.q_heads, SIZE_MAX),
        (names.kv_heads, config.kv_heads, SIZE_MAX),
        (names.head_dim, config.head_dim, SIZE_MAX),
        (names.context_length, config.context_length, CONTEXT_MAX),
        (names.sliding_window, config.sliding_window.unwrap_or(1), CONTEXT_MAX),
    ];
    for (name, size, max) in sizes {
        if !(1..=max).contains(&size) {
            return Err(ModelError::invalid(path, name, format!("{size} is not between 1 and {max}")));
        }
    }
    if !config.q_heads.is_multiple_of(config.kv_heads) {
        let reason = format!("{} does not divide {} = {}", config.kv_heads, names.q_heads, config.q_heads);
        return Err(ModelError::invalid(path, names.kv_heads, reason));
    }
    // Four at least: the dynamic rule's exponent is dim / (dim - 2).
    if config.head_dim < 4 || !config.head_dim.is_multiple_of(2) {
        let reason = format!("{} is not an even number of 4 or more", config.head_dim);
        return Err(ModelError::invalid(path, names.head_dim, reason));
    }
    if !(config.rms_norm_eps.is_finite() && config.rms_norm_eps >= 0.0) {
        return Err(ModelError::invalid(path, names.rms_norm_eps, "is not a finite number of 0 or more"));
    }
    if !(config.rope.theta.is_finite() && config.rope.theta > 1.0) {
        return Err(ModelError::invalid(path, names.rope_theta, "is not a finite number above 1"));
    }
    Ok(())
}

/// Refuses scaling parameters under which frequencies would not be finite. `field` is the group that holds them.
pub(super) fn check_scaling(path: &Path, field: &str, scaling: &RopeScaling) -> Result<(), ModelError> {
    let factor = |value: f64| {
        let sound = value.is_finite() && value >= 1.0;
        sound
            .then_some(())
            .ok_or_else(|| ModelError::invalid(path, format!("{field}.factor"), "is not a number of 1 or more"))
    };
    match scaling {
        RopeScaling::Default | RopeScaling::Divisors(_) => Ok(()),
        RopeScaling::Linear { factor: f } | RopeScaling::Dynamic { factor: f, .. } => factor(*f),
        RopeScaling::Llama3 { factor: f, low_freq_factor: low, high_freq_factor: high, .. } => {
            factor(*f)?;
            if low.is_finite() && high.is_finite() && *low > 0.0 && high > low {
                return Ok(());
            }
            let reason = "must be finite and above low_freq_factor, which must be above 0";
            Err(ModelError::invalid(path, format!("{field}.high_freq_factor"), reason))
        }
        RopeScaling::Yarn { factor: f, beta_fast, beta_slow, attention_factor, .. } => {
            factor(*f)?;
            if !(beta_fast.is_finite() && *beta_slow > 0.0 && beta_fast >= beta_slow) {
                let reason = "must be finite and not below beta_slow, which must be above 0";
                return Err(ModelError::invalid(path, format!("{field}.beta_fast"), reason));
            }
            if !(attention_factor.is_finite() && *attention_factor > 0.0) {
                return Err(ModelError::invalid(path, format!("{field}.attention_factor"), "must be above 0"));
            }
            Ok(())
        }
    }
}

/// Positions that a rule reaches which stretches so many by a factor.
pub(super) fn stretched(positions: usize, factor: f64) -> usize {
    (positions as f64 * factor.max(1.0)) as usize
}
