//! The largest norm of the values of each page.

use super::{Extend, Part, dims, for_each_part};
use crate::kv::{BLOCK_TOKENS, KvElement, with_kv_element};
use candle_core::{CpuStorage, Result, Tensor, bail};

/// Takes in rows of the values `[blocks, kv_heads, 64, head_dim]`; the index is `[blocks, kv_heads, 64 / page, 1]`, f32.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn extend(index: &Tensor, v: &Tensor, parts: &[Part]) -> Result<()> {
    let dims = dims(index, v, parts)?;
    let (d, pages) = (dims.1, dims.2);
    if index.dim(3)? != 1 || pages == 0 || !BLOCK_TOKENS.is_multiple_of(pages) {
        bail!("norms: index {:?} for values {:?}", index.shape(), v.shape());
    }
    #[cfg(feature = "cuda")]
    if v.device().is_cuda() {
        return Ok(crate::cuda::step::extend_norms(index, v, parts)?);
    }
    let page = BLOCK_TOKENS / pages;
    index.inplace_op2(
        v,
        &Extend(|index: &mut _, values: &_| {
            let CpuStorage::F32(index) = index else { bail!("norms: an index of another dtype than f32") };
            with_kv_element!(v.dtype(), T => {
                let values = T::slice(values).expect("dtype matched");
                for_each_part(dims, values, index, parts, |part, _, values, rows| {
                    for row in part.rows.clone() {
                        let value = &values[row * d..(row + 1) * d];
                        let norm = value.iter().map(|x| f64::from(x.to_f32()).powi(2)).sum::<f64>().sqrt();
                        // Up, so that it stays a bound.
                        let norm = (norm as f32).next_up();
                        let to = &mut rows[row / page];
                        // NaN once is NaN from then on.
                        *to = if row % page == 0 || norm.is_nan() || norm > *to { norm } else { *to };
                    }
                });
            });
            Ok(())
        }),
    )
}
