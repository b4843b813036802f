//! The operations on a CUDA device: safe functions over the kernels of kernels/, for the H100 and H200 (sm_90a).
//!
//! The same functions as the CPU's run on either device and come here by themselves: [`crate::kv::append`],
//! [`crate::kv::copy_block`], [`crate::prefill::prefill`] and what chooses for it, [`crate::correct::correct`],
//! [`crate::mlp::per_head`], and all of [`crate::decode`] and [`crate::index`] that decode
//! methods call: selections, scores and importance then stay on the device (`step`). What this module offers besides
//! are the parts of that, by which a step needs no host at all: [`Batch`] for [`crate::decode::Decode`], [`Lists`] for
//! [`crate::decode::Selection`].
//!
//! Every function queues its work on candle's stream of the device and returns; none waits for a launch to end, but for
//! [`Lists::read_back`], those of `step` that say so, and those that choose for a prompt, once a layer and chunk, for
//! how much that is: `probe`, [`DeviceStripes`], and in a model with a window of its own for what it is, those of
//! `pooled` and the heaviest diagonals too. Host slices are copied on the same stream, and from pageable memory: large ones may hold the caller up, so what serves many layers
//! ([`Tiles`], [`Plan`], tables) is made once a step. Caches are bf16 or f16, head_dim 64 or 128, at most 16 query
//! heads a KV head. Errors name the operation and the parameter. What tensors of tables, lengths and ids say is not
//! looked at on the host and must be true.

mod batch;
mod certain;
mod coming;
mod decode;
mod delta;
mod error;
mod ffi;
mod graph;
mod host_tail;
pub mod index;
mod kv;
mod layer;
mod op;
mod pooled;
mod prefill;
mod probe;
mod product;
mod project;
mod quantized;
mod readback;
mod sample;
mod score;
pub(crate) mod step;
mod stripes;
mod sums;
mod tape;
mod together;
mod token;
mod values;
mod walk;
mod words;

pub use batch::{Batch, Lists};
pub use decode::Plan;
pub use error::{Error, Result};
pub use graph::{PlainStep, RepeatedStep, StepInputs, graph_steps, plain_step, repeated_step};
pub use host_tail::HostTail;
pub use layer::{angles, norm_f32, silu_mul};
pub use op::prepare;
pub use prefill::{DeviceReads, KeyLists, RunLists, Sparse, TILE_ROWS, Tile, Tiles, prefill_tiles};
pub use product::{
    AfterAttention, Inputs, after_attention, after_attention_at_once, product, product_add, product_gated, product_into,
};
pub use project::gather;
pub use quantized::quantized_scores;
pub use sample::{Sampled, Scratch, Streams, draw, sampled};
pub use score::{Scores, View, scores};
pub use stripes::{Chosen, DeviceStripes, Slash, block_lists, drop_columns, stripe_bits};
pub use values::{Values, spread_values, values, values_fit};

pub(crate) use coming::Coming;
pub(crate) use delta::correct;
pub(crate) use kv::{append, copy_block};
pub(crate) use layer::append_joint;
pub(crate) use pooled::pooled;
pub(crate) use prefill::prefill;
pub(crate) use probe::probe;
pub(crate) use readback::send as send_readback;
pub(crate) use stripes::top;
pub(crate) use sums::sums;
pub(crate) use token::tokens;
