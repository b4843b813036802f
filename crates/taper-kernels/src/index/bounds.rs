//! Channel-wise minima and maxima of pages of keys: they bound every score of the page.
//!
//! Source: Quest (Tang et al. 2024, arXiv:2406.10774), section 3.2.

use super::{Extend, Lookup, Part, dims, for_each_part};
use crate::decode::{Decode, Importance, pass};
use crate::kv::{BLOCK_TOKENS, KvElement, with_kv_element};
use crate::simd::{Isa, Simd, dispatch};
use candle_core::{Result, Storage, Tensor, bail};
use std::ops::Range;

/// Rows and width of the index of pages of `page` tokens: minima, then maxima.
pub fn shape(page: usize, head_dim: usize) -> (usize, usize) {
    (BLOCK_TOKENS / page, 2 * head_dim)
}

/// Takes in rows of the keys `[blocks, kv_heads, 64, head_dim]`; the index is of the keys' dtype, so bounds are exact.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn extend(index: &Tensor, k: &Tensor, parts: &[Part]) -> Result<()> {
    let dims = dims(index, k, parts)?;
    let (pages, width) = (index.dim(2)?, index.dim(3)?);
    if width != 2 * dims.1 || index.dtype() != k.dtype() || pages == 0 || !BLOCK_TOKENS.is_multiple_of(pages) {
        bail!("bounds: index {:?} {:?} for keys {:?} {:?}", index.shape(), index.dtype(), k.shape(), k.dtype());
    }
    let (d, page) = (dims.1, BLOCK_TOKENS / pages);
    index.inplace_op2(
        k,
        &Extend(|index: &mut _, keys: &_| {
            with_kv_element!(k.dtype(), T => {
                let (keys, index) = (T::slice(keys).expect("dtype matched"), T::slice_mut(index).expect("dtype matched"));
                for_each_part(dims, keys, index, parts, |part, _, keys, rows| {
                    for row in part.rows.clone() {
                        let key = &keys[row * d..(row + 1) * d];
                        let (low, high) = rows[row / page * 2 * d..][..2 * d].split_at_mut(d);
                        if row % page == 0 {
                            low.copy_from_slice(key);
                            high.copy_from_slice(key);
                            continue;
                        }
                        for ((low, high), &x) in low.iter_mut().zip(high).zip(key) {
                            // NaN once is NaN from then on.
                            if x.to_f32() < low.to_f32() || x.to_f32().is_nan() {
                                *low = x;
                            }
                            if x.to_f32() > high.to_f32() || x.to_f32().is_nan() {
                                *high = x;
                            }
                        }
                    }
                });
            });
            Ok(())
        }),
    )
}

/// The share of attention mass that each page would hold if its keys scored as high as the bounds allow, summed over
/// the group, for the rows and KV heads `wanted` `[R, kv_heads]`.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn importance(batch: &Decode, index: &Tensor, wanted: &[bool]) -> Result<Importance> {
    let (rows, q_heads, kv_heads, d) = batch.dims()?;
    let (page, group) = (BLOCK_TOKENS / index.dim(2)?, q_heads / kv_heads);
    if wanted.len() != rows * kv_heads || index.dim(3)? != 2 * d {
        bail!("bounds: index {:?}, {} heads wanted of {rows} rows of {kv_heads}", index.shape(), wanted.len());
    }
    let q = super::queries(batch)?;
    let (storage, _) = index.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("bounds: only the CPU is built in") };
    let pages = |row: &crate::decode::DecodeRow| row.visible.start / page..row.visible.end.div_ceil(page);
    let spans: Vec<_> = batch.rows.iter().flat_map(|row| std::iter::repeat_n(pages(row), kv_heads)).collect();
    let (isa, scale) = (Isa::best(), 1.0 / (d as f32).sqrt());
    let heads = with_kv_element!(index.dtype(), T => {
        let lookup = &Lookup::new(T::slice(storage).expect("dtype matched"), index, kv_heads)?;
        pass(isa, &spans, wanted, group, |i: usize, pages: Range<usize>, out: *mut f32, stride: usize| {
            let (row, head) = (i / kv_heads, i % kv_heads);
            let queries = &q[(row * q_heads + head * group) * d..][..group * d];
            for (at, p) in pages.enumerate() {
                let block = lookup.block(batch.rows[row].table, head, p * page);
                let bounds = &block[p % (BLOCK_TOKENS / page) * 2 * d..][..2 * d];
                for (g, q) in queries.chunks_exact(d).enumerate() {
                    let mut score = 0f32;
                    let to = &mut score;
                    dispatch!(isa, bound::<_, T: KvElement>(q: &[f32], bounds: &[T], to: &mut f32));
                    // SAFETY: the pass gives each run its part of every line.
                    unsafe { out.add(g * stride + at).write(score * scale) };
                }
            }
        })
    });
    Ok(Importance::new(page, heads.into_iter().map(|head| head.map(|head| head.importance())).collect()))
}

/// The largest dot product that a key within the bounds can have with `q`.
#[inline(always)]
unsafe fn bound<V: Simd, T: KvElement>(q: &[f32], bounds: &[T], to: &mut f32) {
    let d = q.len();
    let (low, high) = bounds.split_at(d);
    let whole = d - d % V::LANES;
    unsafe {
        let mut acc = V::splat(0.0);
        for c in (0..whole).step_by(V::LANES) {
            let q = V::load(q.as_ptr().add(c));
            let (low, high) = (T::load::<V>(low.as_ptr().add(c)), T::load::<V>(high.as_ptr().add(c)));
            acc = acc.add(q.mul(low).max(q.mul(high)));
        }
        *to = acc.sum() + (whole..d).map(|c| (q[c] * low[c].to_f32()).max(q[c] * high[c].to_f32())).sum::<f32>();
    }
}
