//! Every CUDA operation against the CPU's: it takes a machine with an H100 or H200, and fails without one.

mod cache;
mod certain;
mod decode;
mod far;
mod index;
mod layer;
mod lists;
#[path = "../../src/testing/numbers.rs"]
mod numbers;
mod prefill;
mod probe;
mod project;
mod quantized;
mod sample;
mod select;
mod step;
mod token;
mod values;
