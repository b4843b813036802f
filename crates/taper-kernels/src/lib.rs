//! One safe function for each device operation: attention over the paged KV cache, selection, sampling, linear
//! layers. Knows no requests and no models.

pub mod linear;
