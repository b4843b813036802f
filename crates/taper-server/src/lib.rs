//! The OpenAI-compatible HTTP API over [`taper_engine::Engine`].
//!
//! Knows nothing of tensors or devices. Every request body is parsed here by hand from JSON, so that each refusal is a
//! 400 in OpenAI's error format whose `param` names the field.

mod access;
mod answer;
mod app;
mod attention;
mod body;
mod chat;
mod completions;
mod embeddings;
mod error;
mod fields;
mod holding;
mod keys;
mod knobs;
mod live;
mod metrics;
mod openapi;
mod origin;
mod page;
mod request_id;
mod responses;
mod routes;
mod sampling;
mod serve;
mod spans;
mod stalled;
mod stream;
mod structured;
mod tokens;
mod tools;
mod usage;

pub use app::{Origins, ServerConfig, router};
pub use attention::nameless;
pub use keys::Keys;
pub use live::{Live, Presets};
pub use serve::{Certificate, Listening, Tls, serve};
pub use spans::Spans;
pub use usage::attention as attention_usage;
