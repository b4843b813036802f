//! Shapes of well-known models, for measurements with random weights: no checkpoint is read.

use super::ModelConfig;
use crate::rope::{Rope, RopeScaling};

impl ModelConfig {
    /// Names that [`ModelConfig::of_shape`] knows.
    pub const SHAPES: [&str; 3] = ["llama-3.1-8b", "mistral-7b", "smollm2-135m"];

    /// The configuration of a well-known shape, none for a name that is not one of [`ModelConfig::SHAPES`].
    pub fn of_shape(name: &str) -> Option<Self> {
        let base = Self {
            name: name.to_owned(),
            vocab_size: 128_256,
            hidden_size: 4096,
            intermediate_size: 14_336,
            layers: 32,
            q_heads: 32,
            kv_heads: 8,
            head_dim: 128,
            rms_norm_eps: 1e-5,
            rope: Rope { theta: 500_000.0, head_dim: 128, scaling: RopeScaling::Default },
            context_length: 131_072,
            sliding_window: None,
            tie_embeddings: false,
            eos_tokens: Vec::new(),
        };
        Some(match name {
            "llama-3.1-8b" => {
                let scaling = RopeScaling::Llama3 {
                    factor: 8.0,
                    low_freq_factor: 1.0,
                    high_freq_factor: 4.0,
                    original_context: 8192,
                };
                Self { rope: Rope { scaling, ..base.rope.clone() }, ..base }
            }
            "mistral-7b" => Self {
                vocab_size: 32_768,
                rope: Rope { theta: 1_000_000.0, ..base.rope },
                context_length: 32_768,
                ..base
            },
            "smollm2-135m" => Self {
                vocab_size: 49_152,
                hidden_size: 576,
                intermediate_size: 1536,
                layers: 30,
                q_heads: 9,
                kv_heads: 3,
                head_dim: 64,
                rope: Rope { theta: 100_000.0, head_dim: 64, ..base.rope },
                context_length: 8192,
                tie_embeddings: true,
                ..base
            },
            _ => return None,
        })
    }

    /// Weights that generating a token multiplies by: the projections of all layers and the head.
    pub fn multiplied_weights(&self) -> usize {
        let Self { hidden_size, intermediate_size, q_heads, kv_heads, head_dim, .. } = self;
        let attention = hidden_size * head_dim * (2 * q_heads + 2 * kv_heads);
        self.layers * (attention + 3 * hidden_size * intermediate_size) + self.vocab_size * hidden_size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_have_the_sizes_that_their_names_say() {
        let weights = |name: &str| {
            let config = ModelConfig::of_shape(name).unwrap();
            config.multiplied_weights() + usize::from(!config.tie_embeddings) * config.vocab_size * config.hidden_size
        };
        let billions = |name: &str| (weights(name) as f64 / 1e7).round() / 100.0;
        assert_eq!(ModelConfig::SHAPES.map(billions), [8.03, 7.25, 0.13]);
        assert!(ModelConfig::of_shape("llama").is_none());
    }
}
