//! A few channels of every key: enough to guess its scores.
//!
//! Source: Double Sparsity (Yang et al. 2024, arXiv:2408.07092), section 3.

use super::{Extend, Lookup, Part, dims, for_each_part};
use crate::decode::{Decode, Gathered, Importance, Over, dots, pass};
use crate::kv::{BLOCK_TOKENS, KvElement, with_kv_element};
use crate::simd::{Isa, dispatch};
use candle_core::{Result, Storage, Tensor, bail};
use std::ops::Range;

/// Channels of a key that are scored on a device.
pub const ON_DEVICE: [usize; 4] = [16, 32, 64, 128];

/// Takes in rows of the keys `[blocks, kv_heads, 64, head_dim]`: of each KV head the channels given, in the keys' dtype.
/// The index is `[blocks, kv_heads, 64, channels]`.
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
    let (d, r) = (dims.1, index.dim(3)?);
    index.inplace_op2(
        k,
        &Extend(|index: &mut _, keys: &_| {
            with_kv_element!(k.dtype(), T => {
                let (keys, index) = (T::slice(keys).expect("dtype matched"), T::slice_mut(index).expect("dtype matched"));
                for_each_part(dims, keys, index, parts, |part, head, keys, rows| {
                    for row in part.rows.clone() {
                        let to = rows[row * r..(row + 1) * r].iter_mut();
                        to.zip(&channels[head]).for_each(|(to, &c)| *to = keys[row * d + c as usize]);
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

/// The share of attention mass that each key would hold by the channels kept of it, summed over the group, for the rows
/// and KV heads `wanted` `[R, kv_heads]`.
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
        pass(isa, &spans, wanted, group, |i: usize, tokens: Range<usize>, out: *mut f32, stride: usize| {
            let (row, head) = (i / kv_heads, i % kv_heads);
            let q = &picked[(row * q_heads + head * group) * r..][..group * r];
            let first = tokens.start;
            for (start, labels) in lookup.blocks(batch.rows[row].table, head, BLOCK_TOKENS, tokens) {
                let mut keys = [std::ptr::null::<T>(); BLOCK_TOKENS];
                keys.iter_mut().zip(labels.chunks_exact(r)).for_each(|(key, label)| *key = label.as_ptr());
                let keys = Gathered { rows: &keys[..labels.len() / r], ahead: &[] };
                let line = out.wrapping_add(start - first);
                dispatch!(isa, dots::<_, T: KvElement>(
                    q: &[f32], r: usize, keys: Gathered<T>, scale: f32, line: *mut f32, stride: usize
                ));
            }
        })
    });
    Ok(Importance::of_scores(1, heads.len(), |i| heads[i].as_ref(), over))
}
