//! The C interface of kernels/, as the build script reads it from taper_gpu.h.
#![allow(missing_docs, dead_code)]

include!(concat!(env!("OUT_DIR"), "/taper_gpu.rs"));
