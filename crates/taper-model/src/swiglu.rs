//! The feed-forward layer's gate: `silu(gate) · up` in one pass over the joint projection's output.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, WithDType};
use taper_kernels::mlp::silu_mul;
use taper_kernels::parallel;

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
        let rows_per_task = (CHUNK / width.max(1)).max(1);
        // SAFETY: each row belongs to one task, which writes it.
        let out = unsafe {
            parallel::written(rows * half, |out| {
                let task = |(): &mut (), task: usize| {
                    for row in task * rows_per_task..rows.min((task + 1) * rows_per_task) {
                        let (gate, up) = x[row * width..][..width].split_at(half);
                        silu_mul(gate, up, out.slice(row * half, half));
                    }
                };
                parallel::for_each(rows.div_ceil(rows_per_task), || (), task);
            })
        };
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
