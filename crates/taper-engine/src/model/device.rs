//! What computes, and what it has kernels for.

use super::LoadError;
use candle_core::{DType, Device};
use taper_attention::AttentionShape;
use taper_kernels::{CUDA_GROUP_MAX, CUDA_HEAD_DIMS};

/// What computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The CPU.
    #[default]
    Cpu,
    /// A CUDA device, by number.
    Cuda(usize),
}

impl DeviceChoice {
    /// The first CUDA device of a build that knows them, where there is one; else the CPU.
    pub fn found() -> Self {
        let cuda = Self::Cuda(0);
        if cuda.open().is_ok() { cuda } else { Self::Cpu }
    }

    /// Opens it.
    ///
    /// # Errors
    /// [`LoadError::Device`]: it is not there, or not in this build.
    pub fn open(self) -> Result<Device, LoadError> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda(_) if !cfg!(feature = "cuda") => {
                Err(LoadError::Device("this build knows only the CPU; build with --features cuda".into()))
            }
            // With a stream of its own: candle's default is one for each thread that asks, and nothing orders those.
            Self::Cuda(number) => Device::new_cuda_with_stream(number)
                .map_err(|e| LoadError::Device(format!("CUDA device {number}: {e}"))),
        }
    }
}

/// Whether a CUDA device has kernels for a model's heads and a cache of this type.
///
/// # Errors
/// [`LoadError::Device`] naming what it has none for, and what is valid.
pub fn runs_on_cuda(shape: &AttentionShape, cache: DType) -> Result<(), LoadError> {
    let &AttentionShape { q_heads, kv_heads, head_dim, .. } = shape;
    let group = q_heads / kv_heads.max(1);
    let refused = |what: String| Err(LoadError::Device(format!("the device cuda has no kernels for {what}")));
    if !matches!(cache, DType::F16 | DType::BF16) {
        return refused(format!("a KV cache of {}: --kv-dtype must be f16 or bf16 there", cache.as_str()));
    }
    if !CUDA_HEAD_DIMS.contains(&head_dim) {
        return refused(format!(
            "this model's heads of {head_dim} numbers: they must have 64 or 128, or the device be cpu"
        ));
    }
    if group > CUDA_GROUP_MAX {
        return refused(format!(
            "this model's {group} query heads a KV head: it must be {CUDA_GROUP_MAX} at most, or the device be cpu"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_kernel_has_is_refused_by_name() {
        let shape = AttentionShape { layers: 2, q_heads: 32, kv_heads: 8, head_dim: 128, window: None };
        for (head_dim, kv_heads, cache) in [(128, 8, DType::BF16), (64, 2, DType::F16)] {
            runs_on_cuda(&AttentionShape { head_dim, kv_heads, ..shape }, cache).unwrap();
        }
        for (head_dim, kv_heads, cache, says) in [
            (128, 8, DType::F32, "a KV cache of f32: --kv-dtype must be f16 or bf16"),
            (80, 8, DType::F16, "heads of 80 numbers: they must have 64 or 128"),
            (64, 1, DType::F16, "32 query heads a KV head: it must be 16 at most"),
        ] {
            let error = runs_on_cuda(&AttentionShape { head_dim, kv_heads, ..shape }, cache).unwrap_err().to_string();
            assert!(error.starts_with("the device cuda has no kernels for ") && error.contains(says), "{error}");
        }
    }
}
