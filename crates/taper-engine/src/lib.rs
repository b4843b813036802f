//! Requests to tokens: a bounded queue, the scheduler, the step loop on the engine's one thread, the sampler.
//!
//! Only that thread touches the device; callers reach it through [`Engine`]. Knows nothing of HTTP.

mod backend;
mod calls;
mod drafts;
mod emit;
mod engine;
mod grammar;
mod handover;
mod job;
mod model;
mod pace;
mod passes;
mod queue;
mod request;
mod run;
mod sampler;
mod schedule;
mod stop;
mod text;
mod worker;

#[cfg(any(test, feature = "stub"))]
pub mod stub;
#[cfg(any(test, feature = "stub"))]
pub mod watched;

pub use backend::{Backend, BackendError, CheckedDrafts, Input, Limits, Row, Underway, Wanted};
pub use calls::CallFormat;
pub use engine::{Counts, Engine, EngineConfig, Load, ModelInfo, Parts, StartError, Steps};
pub use grammar::{Grammar, GrammarError, Shape, json_rule};
pub use handover::{Handover, HandoverSequence};
pub use model::{
    CacheDType, CacheOptions, DeviceChoice, LoadError, ModelBackend, ModelText, Offload, load, runs_on_cuda,
};
pub use request::{
    Delta, Event, Events, Finish, Request, RequestError, Scored, StopRules, SubmitError, Times, TokenLogprob,
    TokenRecord, Usage, of_them_offloaded,
};
pub use sampler::SamplingParams;
pub use taper_kv_cache::BLOCK_TOKENS;
pub use text::{Message, Text, TextError, TokenStream, question};
