//! A few channels of every key: enough to guess its scores.
//!
//! Source: Double Sparsity (Yang et al. 2024, arXiv:2408.07092), section 3.

use super::{Extend, Lookup, Part, dims, for_each_part};
use crate::decode::{Decode, Importance, Kept, Over, pass};
use crate::kv::{BLOCK_TOKENS, KvElement, with_kv_element};
use crate::simd::{Isa, Simd, dispatch};
use candle_core::{Result, Storage, Tensor, bail};
use std::ops::Range;

/// Channels of a key that are scored on a device.
pub const ON_DEVICE: [usize; 4] = [16, 32, 64, 128];

/// Takes in rows of the keys `[blocks, kv_heads, 64, head_dim]`: of each KV head the channels given, in the keys' dtype.
/// The index is `[blocks, kv_heads, 64, channels]`. On the CPU the numbers of a block and head lie channel by channel, so that
/// many keys are scored at once without a sum across a vector.
///
/// # Errors
/// Shapes or dtypes that differ, or a channel beyond the head.
pub fn extend(index: &Tensor, k: &Tensor, parts: &[Part], channels: &[Vec<u32>]) -> Result<()> {
    let dims = dims(index, k, parts)?;
    check(index, channels, dims.1, dims.0)?;
    if index.dtype() != k.dtype() {
        bail!("labels: index {:?} for keys {:?}", index.dtype(), k.dtype());
    }
    #[cfg(feature = "cuda")]
    if k.device().is_cuda() {
        return Ok(crate::cuda::step::extend_labels(index, k, parts, channels)?);
    }
    let d = dims.1;
    index.inplace_op2(
        k,
        &Extend(|index: &mut _, keys: &_| {
            with_kv_element!(k.dtype(), T => {
                let (keys, index) = (T::slice(keys).expect("dtype matched"), T::slice_mut(index).expect("dtype matched"));
                for_each_part(dims, keys, index, parts, |part, head, keys, labels| {
                    for (labels, &c) in labels.chunks_exact_mut(BLOCK_TOKENS).zip(&channels[head]) {
                        part.rows.clone().for_each(|row| labels[row] = keys[row * d + c as usize]);
                    }
                });
            });
            Ok(())
        }),
    )
}

fn check(index: &Tensor, channels: &[Vec<u32>], d: usize, kv_heads: usize) -> Result<()> {
    let (_, _, rows, width) = index.dims4()?;
    let fits = |c: &Vec<u32>| c.len() == width && c.iter().all(|&c| (c as usize) < d);
    if rows != BLOCK_TOKENS || channels.len() != kv_heads || !channels.iter().all(fits) {
        bail!(
            "labels: index {:?} with channels of {} heads of {d}, {kv_heads} expected",
            index.shape(),
            channels.len()
        );
    }
    Ok(())
}

/// The share of attention mass that each key would hold by the channels kept of it, `over` the group its sum or its largest, for
/// the rows and KV heads `wanted` `[R, kv_heads]`.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn importance(
    batch: &Decode,
    index: &Tensor,
    channels: &[Vec<u32>],
    wanted: &[bool],
    over: Over,
) -> Result<Importance> {
    let (rows, q_heads, kv_heads, d) = batch.dims()?;
    check(index, channels, d, kv_heads)?;
    if wanted.len() != rows * kv_heads {
        bail!("labels: {} heads wanted of {rows} rows of {kv_heads}", wanted.len());
    }
    #[cfg(feature = "cuda")]
    if batch.q.device().is_cuda() {
        return Ok(Importance::of_scored(crate::cuda::step::labels(batch, index, channels, wanted)?, over));
    }
    let (group, r) = (q_heads / kv_heads, index.dim(3)?);
    let q = super::queries(batch)?;
    let picked = q.chunks_exact(d).enumerate().flat_map(|(i, q)| {
        let channels = &channels[i % q_heads / group];
        channels.iter().map(move |&c| q[c as usize])
    });
    let picked: Vec<f32> = picked.collect();
    let (storage, _) = index.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("labels: only the CPU is built in") };
    let spans: Vec<_> = batch.rows.iter().flat_map(|row| std::iter::repeat_n(row.visible.clone(), kv_heads)).collect();
    let (isa, scale) = (Isa::best(), 1.0 / (d as f32).sqrt());
    let heads = with_kv_element!(index.dtype(), T => {
        let lookup = &Lookup::new(T::slice(storage).expect("dtype matched"), index, kv_heads)?;
        let write = |i: usize, tokens: Range<usize>, out: *mut f32, stride: usize| {
            let (row, head) = (i / kv_heads, i % kv_heads);
            let q = &picked[(row * q_heads + head * group) * r..][..group * r];
            for (rows, labels) in lookup.whole_blocks(batch.rows[row].table, head, BLOCK_TOKENS, tokens.clone()) {
                let line = out.wrapping_add(rows.start - tokens.start);
                let rows = rows.start % BLOCK_TOKENS..(rows.end - 1) % BLOCK_TOKENS + 1;
                dispatch!(isa, score::<_, T: KvElement>(
                    q: &[f32], labels: &[T], rows: Range<usize>, scale: f32, line: *mut f32, stride: usize
                ));
            }
        };
        // SAFETY: the blocks of a run hold every one of its tokens.
        unsafe { pass(isa, &spans, wanted, (group, Kept::Shares), write) }
    });
    Ok(Importance::of_scores(1, heads.len(), |i| heads[i].as_ref(), over))
}

/// The scaled dot products of each query `[group, r]` with the channels `[r, 64]` of a block's keys, those of some rows, into
/// lines `stride` apart.
///
/// # Safety
/// Every line of `out` covers the rows; `V`'s instruction set exists.
#[inline(always)]
unsafe fn score<V: Simd, T: KvElement>(
    q: &[f32],
    labels: &[T],
    rows: Range<usize>,
    scale: f32,
    mut out: *mut f32,
    stride: usize,
) {
    let r = labels.len() / BLOCK_TOKENS;
    let together = 3;
    for q in q.chunks(together * r) {
        unsafe {
            match q.len() / r {
                3 => score_of::<V, T, 3>(q, labels, rows.clone(), scale, out, stride),
                2 => score_of::<V, T, 2>(q, labels, rows.clone(), scale, out, stride),
                _ => score_of::<V, T, 1>(q, labels, rows.clone(), scale, out, stride),
            }
        }
        // May pass the end after the last lines; never read there.
        out = out.wrapping_add(together * stride);
    }
}

/// `G` (at most 3) queries.
#[inline(always)]
unsafe fn score_of<V: Simd, T: KvElement, const G: usize>(
    q: &[f32],
    labels: &[T],
    rows: Range<usize>,
    scale: f32,
    out: *mut f32,
    stride: usize,
) {
    // As many vectors of keys at once as leave room for their sums.
    const VECTORS: usize = 2;
    let r = labels.len() / BLOCK_TOKENS;
    // A block is scored whole: its other rows may be another thread's.
    let mut scores = [[0.0f32; BLOCK_TOKENS]; G];
    for first in (0..BLOCK_TOKENS).step_by(VECTORS * V::LANES) {
        unsafe {
            let mut acc = [[V::splat(0.0); G]; VECTORS];
            for c in 0..r {
                let keys = labels.as_ptr().add(c * BLOCK_TOKENS + first);
                let keys = [T::load::<V>(keys), T::load::<V>(keys.add(V::LANES))];
                for g in 0..G {
                    let x = V::splat(q[g * r + c]);
                    for v in 0..VECTORS {
                        acc[v][g] = x.mul_add(keys[v], acc[v][g]);
                    }
                }
            }
            for (v, acc) in acc.iter().enumerate() {
                for (scores, acc) in scores.iter_mut().zip(acc) {
                    acc.mul(V::splat(scale)).store(scores.as_mut_ptr().add(first + v * V::LANES));
                }
            }
        }
    }
    for (g, scores) in scores.iter().enumerate() {
        unsafe { std::ptr::copy_nonoverlapping(scores[rows.start..].as_ptr(), out.add(g * stride), rows.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Numbers;

    #[test]
    fn a_part_of_a_block_is_scored_by_every_instruction_set_and_nothing_beside_it() {
        type T = f32;
        let mut numbers = Numbers(61);
        for (r, group) in [(1, 1), (3, 2), (16, 3), (16, 4), (64, 8)] {
            let q: Vec<f32> = (0..group * r).map(|_| numbers.normal()).collect();
            let labels: Vec<f32> = (0..r * BLOCK_TOKENS).map(|_| numbers.normal()).collect();
            for rows in [0..BLOCK_TOKENS, 0..1, 63..64, 5..38] {
                let exact = |g: usize, row: usize| -> f32 {
                    (0..r).map(|c| q[g * r + c] * labels[c * BLOCK_TOKENS + row]).sum::<f32>() * 0.5
                };
                for isa in Isa::available() {
                    let stride = rows.len() + 2;
                    let mut lines = vec![7.0f32; group * stride];
                    let (q, labels, of, scale, out) = (&q[..], &labels[..], rows.clone(), 0.5, lines.as_mut_ptr());
                    dispatch!(isa, score::<_, T: KvElement>(
                        q: &[f32], labels: &[T], of: Range<usize>, scale: f32, out: *mut f32, stride: usize
                    ));
                    for (g, line) in lines.chunks_exact(stride).enumerate() {
                        let right = |(s, row): (&f32, usize)| (s - exact(g, row)).abs() < 1e-4;
                        assert!(line.iter().zip(rows.clone()).all(right), "{isa:?} {r} {group} {rows:?}");
                        assert_eq!(line[rows.len()..], [7.0; 2], "{isa:?} {r} {group} {rows:?}");
                    }
                }
            }
        }
    }
}
