//! The paged KV cache: a pool of 64-token blocks and the tables that map a sequence's tokens to them.
//!
//! Knows nothing of attention methods. Per layer, K and V are each `[blocks, kv_heads, 64, head_dim]`, so that one
//! block of one head is contiguous.

mod index;
mod pool;
mod prefix;
mod table;

pub use index::IndexShape;
pub use pool::{KvError, KvPool, KvShape};
pub use prefix::PrefixKey;
pub use table::BlockTable;
pub use taper_kernels::kv::BLOCK_TOKENS;
