//! The feed-forward layer's gate: `silu(gate) · up` in one pass over the joint projection's output.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, WithDType};
use rayon::prelude::*;
use taper_kernels::mlp::silu_mul;

/// Elements that one task handles; below this a second thread costs more than it saves.
const CHUNK: usize = 16 * 1024;

/// `x` `[T, 2·I]`, gate and up side by side → `[T, I]`, in `x`'s dtype.
///
/// # Errors
/// candle's errors for a tensor that is not a contiguous matrix of even width.
pub(crate) fn swiglu(x: &Tensor) -> Result<Tensor> {
    if x.device().is_cpu() && x.dtype() == DType::F32 { x.apply_op1_no_bwd(&Swiglu) } else { candle_nn::ops::swiglu(x) }
}

struct Swiglu;

impl CustomOp1 for Swiglu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, width) = layout.shape().dims2()?;
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("swiglu takes a contiguous tensor");
        };
        if !width.is_multiple_of(2) {
            candle_core::bail!("swiglu takes gate and up of one width, got {width} together");
        }
        let half = width / 2;
        let x = &storage.as_slice::<f32>()?[start..end];
        let mut out = vec![0f32; rows * half];
        let row = |(x, out): (&[f32], &mut [f32])| {
            let (gate, up) = x.split_at(half);
            silu_mul(gate, up, out);
        };
        let rows_per_task = (CHUNK / width.max(1)).max(1);
        if rows <= rows_per_task {
            x.chunks_exact(width).zip(out.chunks_exact_mut(half)).for_each(row);
        } else {
            let inputs = x.par_chunks_exact(width).with_min_len(rows_per_task);
            inputs.zip(out.par_chunks_exact_mut(half)).for_each(row);
        }
        Ok((f32::to_cpu_storage_owned(out), (rows, half).into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn equals_the_separate_operations() -> Result<()> {
        // One row on one thread, and many rows over several tasks.
        for rows in [1, 3, 700] {
            let x = Tensor::randn(0f32, 3.0, (rows, 62), &Device::Cpu)?;
            let chunks = x.chunk(2, 1)?;
            let expected = (chunks[0].contiguous()?.silu()? * chunks[1].contiguous()?)?;
            let difference = (swiglu(&x)? - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
            assert!(difference < 1e-5, "{rows} rows: {difference}");
        }
        Ok(())
    }
}
