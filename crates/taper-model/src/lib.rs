//! From a checkpoint to hidden states: configuration, weights, tokenizer, chat template and the forward pass.
//!
//! Knows the shapes of Llama and Mistral. It neither schedules nor samples, and attention is the caller's: the forward
//! pass hands over each layer's queries, keys and values and never learns what is done with them.

mod config;
mod error;
mod gguf;
#[cfg(feature = "cuda")]
mod joint;
mod json;
mod mapped;
mod memory;
mod model;
mod rope;
mod source;
mod template;
mod tokenizer;
mod weights;

pub use config::{GenerationConfig, LoadOptions, ModelConfig, Rope, RopeScaling, WeightDType};
pub use error::ModelError;
pub use memory::{free_memory, size};
pub use model::Model;
pub use source::{DEFAULT_MODEL, ModelFiles, ModelSource, Progress, ResolvedModel, default_cache, resolve};
pub use template::{ChatMessage, ChatTemplate};
pub use tokenizer::{StreamDecoder, TextStart, Tokenizer};
pub use weights::weights_digest;
