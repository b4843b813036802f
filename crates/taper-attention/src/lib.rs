//! Attention as a request parameter: specs, methods, selections and reports.
//!
//! A request's [`AttentionSpec`] names a method for its prompt and one for its generated tokens. A method (one file
//! under `methods/`) turns queries into a choice of keys; the operations of `taper-kernels` read them. The model meets
//! all of it through [`LayerAttention`] and never names a method.

mod amount;
mod artifacts;
mod audit;
mod batch;
mod beginning;
mod chunk;
mod dense_below;
mod layer;
pub mod method;
mod methods;
mod partition;
mod probing;
mod queries;
mod report;
mod round;
mod schema;
mod sequence;
mod spec;
mod speculate;
mod top_k;
mod trace;
mod unread;

pub use artifacts::{ArtifactError, Artifacts, ModelKey, Place, Sizes};
pub use batch::{AttentionBatch, DECODE_SEQUENCES, DECODE_TOKENS, Replay, Span, leaders, replay};
pub use beginning::Beginning;
pub use chunk::{Chunk, Slice};
pub use dense_below::MOST as DENSE_BELOW_MAX;
pub use layer::{AttentionShape, LayerAttention, PlainStep, Repeats, Rotary};
pub use methods::{ArtifactInfo, MethodInfo, catalogue, phase_of};
/// MInference's patterns, for what assigns them offline.
pub mod minference {
    pub use crate::methods::minference::{Pattern, reads};
}
pub use report::{AttentionUsage, AuditUsage, CraUsage, GuessUsage, PhaseUsage, PromiseUsage, SpeculationUsage};
pub use schema::{nearest, valid_values};
pub use sequence::{Before, Held, NextRow, Sequence, decode_rows};
pub use spec::{AttentionSpec, Question, SpecError, Wire};
pub use speculate::Drafting;
pub use trace::{HeadsUsage, TokenUsage, TraceUsage};
