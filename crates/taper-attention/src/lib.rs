//! Attention as a request parameter: specs, methods, selections and reports.

mod layer;

pub use layer::{AttentionShape, LayerAttention};
