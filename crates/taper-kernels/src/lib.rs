//! One safe function for each device operation: attention over the paged KV cache, selection, sampling, linear
//! layers. Knows no requests and no models.

pub mod budget;
pub mod correct;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod decode;
mod dense;
pub mod floats;
mod gemm;
pub mod index;
pub mod kv;
mod lent;
pub mod linear;
pub mod logits;
mod memory;
pub mod mlp;
pub mod norm;
pub mod offload;
pub mod packed;
pub mod parallel;
pub mod philox;
pub mod prefill;
pub mod rotary;
#[allow(missing_docs)] // The lane operations of `Simd` are their names.
mod simd;
mod softmax;
pub mod swiglu;
#[cfg(test)]
#[allow(missing_docs)]
mod testing;
pub mod token;

pub use lent::Lent;

/// Most bytes of a CUDA device's memory that a thread keeps for steps that are queued as graphs.
pub const GRAPH_BYTES: usize = 512 << 20;

/// Head sizes that a CUDA device's kernels are made for.
pub const CUDA_HEAD_DIMS: [usize; 2] = [64, 128];

/// Most query heads a KV head that they are made for.
pub const CUDA_GROUP_MAX: usize = 16;
