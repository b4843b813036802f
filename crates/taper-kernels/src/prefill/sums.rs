//! Sums of attention probabilities over a few rows, by key and by diagonal: what SampleAttention and MInference choose
//! keys by.

use super::tile::{Active, Columns, Dims, Operands, active, mask_scores, pack_queries, unpack_keys};
use super::{Mask, Reads, Rows};
use crate::gemm::{Gemm, gemm};
use crate::kv::{BLOCK_TOKENS, KvElement, with_kv_element};
use crate::parallel::{self, SharedMut};
use crate::simd::{Isa, Simd, dispatch, exp};
use crate::softmax::softmax_line;
use candle_core::{CpuStorage, Result, Tensor};
use std::ops::Range;

/// Sums over rows of their dense attention probabilities; n tokens up to the last row.
#[derive(Debug, Clone)]
pub struct Sums {
    /// By key `[q_heads, n]`, f32.
    pub columns: Tensor,
    /// By row less key `[q_heads, n]`, f32.
    pub diagonals: Tensor,
    /// Natural logarithm of each row's sum of exponentials `[R, q_heads]`, f32.
    pub lse: Tensor,
}

/// Blocks of keys of one work unit; units depend on lengths alone, and their results are added in order.
const SPLIT_BLOCKS: usize = 32;

/// Sums up the probabilities of all rows in two passes: log-sum-exp, then the probabilities against it. No matrix of
/// rows × keys exists.
///
/// # Errors
/// As [`prefill`](super::prefill).
pub fn sums(rows: &Rows) -> Result<Sums> {
    #[cfg(feature = "cuda")]
    if rows.q.device().is_cuda() {
        rows.dims()?;
        return Ok(crate::cuda::sums(rows)?);
    }
    sums_with(Isa::best(), rows)
}

pub(super) fn sums_with(isa: Isa, rows: &Rows) -> Result<Sums> {
    let dims = rows.dims()?;
    let n = rows.tokens();
    let mut lse = vec![f32::NEG_INFINITY; rows.positions.len() * dims.q_heads];
    let (mut columns, mut diagonals) = (vec![0f32; dims.q_heads * n], vec![0f32; dims.q_heads * n]);
    rows.with_storage(|q, k, v| {
        with_kv_element!(rows.kv.k.dtype(), T => {
            let reads = Reads::Mask(Mask::Causal);
            let with = Operands::new(rows, &reads, &dims, (q, k, v));
            run::<T>(isa, &with, &mut lse, &mut columns, &mut diagonals);
        });
        Ok(())
    })?;
    let device = rows.q.device();
    Ok(Sums {
        columns: Tensor::from_vec(columns, (dims.q_heads, n), device)?,
        diagonals: Tensor::from_vec(diagonals, (dims.q_heads, n), device)?,
        lse: Tensor::from_vec(lse, (rows.positions.len(), dims.q_heads), device)?,
    })
}

/// Keys of one unit and one KV head.
struct Split {
    kv_head: usize,
    blocks: Range<usize>,
}

struct Scratch {
    q: Vec<f32>,
    keys: Vec<f32>,
    scores: Vec<f32>,
    max: Vec<f32>,
    sum: Vec<f32>,
}

fn run<T: KvElement>(
    isa: Isa,
    with: &Operands<&CpuStorage>,
    lse: &mut [f32],
    columns: &mut [f32],
    diagonals: &mut [f32],
) {
    let Operands { rows, reads, dims, q, k, v } = *with;
    let slice = |storage| T::slice(storage).expect("the caller matched the dtype");
    let with = &Operands { rows, reads, dims, q, k: slice(k), v: slice(v) };
    let (Some(&first), Some(&last)) = (rows.positions.first(), rows.positions.last()) else { return };
    let (first, last, n) = (first as usize, last as usize, rows.tokens());
    let splits = n.div_ceil(BLOCK_TOKENS).div_ceil(SPLIT_BLOCKS);
    let lines = dims.tile_rows(dims.group) * dims.group;
    let scratch = || Scratch {
        q: vec![0.0; lines * dims.padded],
        keys: vec![0.0; dims.padded * BLOCK_TOKENS],
        scores: vec![0.0; lines * BLOCK_TOKENS],
        max: vec![0.0; lines],
        sum: vec![0.0; lines],
    };
    let split_of = |unit: usize| {
        let start = unit / dims.kv_heads * SPLIT_BLOCKS;
        Split { kv_head: unit % dims.kv_heads, blocks: start..(start + SPLIT_BLOCKS).min(n.div_ceil(BLOCK_TOKENS)) }
    };
    // First pass: maximum and sum of every split and line.
    let all = lse.len();
    let mut parts = vec![(f32::NEG_INFINITY, 0f32); splits * all];
    let shared = SharedMut::new(&mut parts);
    parallel::for_each(splits * dims.kv_heads, scratch, |s, unit| {
        let (split, base) = (&split_of(unit), unit / dims.kv_heads * all);
        let parts = &shared;
        dispatch!(isa, first_pass::<_, T: KvElement>(
            with: &Operands<&[T]>, split: &Split, s: &mut Scratch, parts: &SharedMut<(f32, f32)>, base: usize
        ));
    });
    for (at, lse) in lse.iter_mut().enumerate() {
        let of_line = || parts.iter().skip(at).step_by(all);
        let max = of_line().fold(f32::NEG_INFINITY, |max, part| if part.0 > max { part.0 } else { max });
        let sum: f32 = of_line().filter(|part| part.1 != 0.0).map(|(m, sum)| sum * (m - max).exp()).sum();
        *lse = max + sum.ln();
    }
    // Second pass: probabilities by key, and by key less row, which ascend together.
    let width = SPLIT_BLOCKS * BLOCK_TOKENS + last - first;
    let mut shifted = vec![0f32; splits * dims.q_heads * width];
    let into = Targets { columns: SharedMut::new(columns), shifted: SharedMut::new(&mut shifted), n, width, lse };
    parallel::for_each(splits * dims.kv_heads, scratch, |s, unit| {
        let (split, base, into) = (&split_of(unit), unit / dims.kv_heads * dims.q_heads, &into);
        dispatch!(isa, second_pass::<_, T: KvElement>(
            with: &Operands<&[T]>, split: &Split, s: &mut Scratch, into: &Targets, base: usize
        ));
    });
    for (split, shifted) in shifted.chunks_exact(dims.q_heads * width).enumerate() {
        let zero = last - split * SPLIT_BLOCKS * BLOCK_TOKENS;
        for (shifted, diagonals) in shifted.chunks_exact(width).zip(diagonals.chunks_exact_mut(n)) {
            for (shift, mass) in shifted.iter().enumerate().take(zero + 1) {
                diagonals[zero - shift] += mass;
            }
        }
    }
}

/// Where the second pass adds.
struct Targets<'a> {
    /// `[q_heads, n]`.
    columns: SharedMut<f32>,
    /// `[splits, q_heads, width]`.
    shifted: SharedMut<f32>,
    n: usize,
    width: usize,
    lse: &'a [f32],
}

/// Rows of one tile after the other.
fn row_tiles(rows: usize, dims: &Dims) -> impl Iterator<Item = Range<usize>> + use<> {
    let step = dims.tile_rows(dims.group);
    (0..rows).step_by(step).map(move |start| start..(start + step).min(rows))
}

/// The scores of a tile's rows and a block of keys, one line of 64 for each active row and head; `s.q` is packed.
#[inline(always)]
unsafe fn score<V: Simd, T: KvElement>(
    with: &Operands<&[T]>,
    kv_head: usize,
    block: usize,
    keys: &[[Range<usize>; 2]],
    s: &mut Scratch,
) -> Option<Active> {
    let Dims { group, padded, head_dim, .. } = *with.dims;
    let columns = Columns::Block(block);
    let active = active(keys, &columns)?;
    let lines = active.rows.len() * group;
    unsafe {
        unpack_keys::<V, T>(with, kv_head, &columns, active.keys, &mut s.keys);
        gemm::<V, false>(&Gemm {
            a: s.q.as_ptr().add(active.rows.start * group * padded),
            lda: padded,
            b: s.keys.as_ptr(),
            ldb: BLOCK_TOKENS,
            c: s.scores.as_mut_ptr(),
            ldc: BLOCK_TOKENS,
            m: lines,
            n: BLOCK_TOKENS,
            k: head_dim,
        });
    }
    for line in 0..lines {
        let scores = &mut s.scores[line * BLOCK_TOKENS..][..BLOCK_TOKENS];
        mask_scores(&keys[active.rows.start + line / group], &columns, scores);
    }
    Some(active)
}

/// What the rows of a tile see.
fn visible<S>(with: &Operands<S>, tile: &Range<usize>) -> Vec<[Range<usize>; 2]> {
    let positions = &with.rows.positions[tile.clone()];
    positions.iter().map(|&p| Mask::Causal.keys(p as usize, with.rows.window)).collect()
}

#[inline(always)]
unsafe fn first_pass<V: Simd, T: KvElement>(
    with: &Operands<&[T]>,
    split: &Split,
    s: &mut Scratch,
    parts: &SharedMut<(f32, f32)>,
    base: usize,
) {
    let Dims { group, q_heads, .. } = *with.dims;
    let heads = split.kv_head * group..(split.kv_head + 1) * group;
    for tile in row_tiles(with.rows.positions.len(), with.dims) {
        pack_queries(with.dims, with.q, tile.clone(), heads.clone(), &mut s.q);
        let keys = visible(with, &tile);
        s.max.fill(f32::NEG_INFINITY);
        s.sum.fill(0.0);
        for block in split.blocks.clone() {
            let Some(active) = (unsafe { score::<V, T>(with, split.kv_head, block, &keys, s) }) else { continue };
            for line in 0..active.rows.len() * group {
                let scores = &mut s.scores[line * BLOCK_TOKENS..][..BLOCK_TOKENS];
                let line = active.rows.start * group + line;
                unsafe { softmax_line::<V>(scores, &mut s.max[line], &mut s.sum[line], &mut []) };
            }
        }
        for line in 0..tile.len() * group {
            let at = base + (tile.start + line / group) * q_heads + heads.start + line % group;
            // SAFETY: a unit has its own split and heads.
            unsafe { parts.slice(at, 1)[0] = (s.max[line], s.sum[line]) };
        }
    }
}

#[inline(always)]
unsafe fn second_pass<V: Simd, T: KvElement>(
    with: &Operands<&[T]>,
    split: &Split,
    s: &mut Scratch,
    into: &Targets,
    base: usize,
) {
    let Dims { group, q_heads, .. } = *with.dims;
    let heads = split.kv_head * group..(split.kv_head + 1) * group;
    let start = split.blocks.start * BLOCK_TOKENS;
    let last = into.n - 1;
    for tile in row_tiles(with.rows.positions.len(), with.dims) {
        pack_queries(with.dims, with.q, tile.clone(), heads.clone(), &mut s.q);
        let keys = visible(with, &tile);
        for block in split.blocks.clone() {
            let Some(active) = (unsafe { score::<V, T>(with, split.kv_head, block, &keys, s) }) else { continue };
            let first = block * BLOCK_TOKENS;
            for line in 0..active.rows.len() * group {
                let row = tile.start + active.rows.start + line / group;
                let head = heads.start + line % group;
                let scores = &mut s.scores[line * BLOCK_TOKENS..][..BLOCK_TOKENS];
                let columns = BLOCK_TOKENS.min(into.n - first);
                // Offset of key less row: the split's first key and the last row have `last - start` between them.
                let shift = first - start + last - with.rows.positions[row] as usize;
                // SAFETY: a unit has its own keys of its own heads.
                unsafe {
                    weights::<V>(scores, into.lse[row * q_heads + head]);
                    add(into.columns.slice(head * into.n + first, columns), scores);
                    let shifted = into.shifted.slice((base + head) * into.width + shift, BLOCK_TOKENS);
                    add(shifted, scores);
                }
            }
        }
    }
}

/// Scores to probabilities; -inf gives 0.
#[inline(always)]
unsafe fn weights<V: Simd>(scores: &mut [f32], lse: f32) {
    for at in (0..BLOCK_TOKENS).step_by(V::LANES) {
        unsafe {
            let p = scores.as_mut_ptr().add(at);
            exp(V::load(p).sub(V::splat(lse))).store(p);
        }
    }
}

#[inline(always)]
fn add(to: &mut [f32], from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}
