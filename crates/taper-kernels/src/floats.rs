//! The numbers of tensors in host memory.

use candle_core::{CpuStorage, Result, Storage, Tensor, bail};

/// Runs something over the numbers of tensors; `what` is the operation that an error names.
///
/// # Errors
/// A tensor that is not contiguous f32 on the CPU.
pub fn with_floats<const N: usize, R>(
    what: &str,
    tensors: [&Tensor; N],
    run: impl FnOnce([&[f32]; N]) -> R,
) -> Result<R> {
    let held = tensors.map(Tensor::storage_and_layout);
    let mut all = [&[][..]; N];
    for (to, (tensor, (storage, layout))) in all.iter_mut().zip(tensors.iter().zip(&held)) {
        let (Storage::Cpu(CpuStorage::F32(data)), Some((from, end))) = (&**storage, layout.contiguous_offsets()) else {
            let place = tensor.device().location();
            bail!("{what}: {:?} {:?} on {place:?}; expected contiguous f32 on the CPU", tensor.dtype(), tensor.shape())
        };
        *to = &data[from..end];
    }
    Ok(run(all))
}
