//! Attention of many query rows of one sequence over its paged keys and values.
//!
//! Rows stand at any ascending absolute positions, so the same operation serves a prompt's chunk, Delta's anchors and
//! a dense tail. Scores exist for one tile of rows and one block of keys at a time.

use crate::gemm::{Gemm, gemm};
use crate::kv::{BLOCK_TOKENS, KvElement, PagedKv, with_kv_element};
use crate::parallel::{self, SharedMut};
use crate::simd::{Isa, Simd, dispatch};
use crate::softmax::softmax_line;
use candle_core::{CpuStorage, Result, Storage, Tensor, bail};
use std::ops::Range;

/// Which of the keys at or before its position a query row reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// All of them.
    Causal,
    /// The first `sink` and the last `window`, the row's own included.
    SinkWindow {
        /// Tokens at the start of the sequence.
        sink: usize,
        /// Tokens up to the row's own, at least 1.
        window: usize,
    },
}

impl Mask {
    /// The keys that a row at `position` reads: two disjoint ranges, ascending, the second never empty.
    ///
    /// `model_window` is the model's own sliding window: no row sees beyond it.
    pub fn keys(&self, position: usize, model_window: Option<usize>) -> [Range<usize>; 2] {
        let end = position + 1;
        let lowest = end.saturating_sub(model_window.unwrap_or(end));
        match *self {
            Mask::Causal => [lowest..lowest, lowest..end],
            Mask::SinkWindow { sink, window } => {
                let start = end.saturating_sub(window.max(1)).max(lowest);
                let sinks = lowest.min(start)..sink.clamp(lowest.min(start), start);
                [sinks, start..end]
            }
        }
    }

    /// How many keys a row at `position` reads.
    pub fn count(&self, position: usize, model_window: Option<usize>) -> usize {
        self.keys(position, model_window).into_iter().map(|keys| keys.len()).sum()
    }
}

/// Arguments of [`prefill`].
pub struct Prefill<'a> {
    /// Queries `[T, q_heads, head_dim]`, f32.
    pub q: &'a Tensor,
    /// The layer's cache.
    pub kv: PagedKv<'a>,
    /// The sequence's blocks in token order.
    pub table: &'a [u32],
    /// Absolute position of each row `[T]`, strictly ascending; their keys and values are in the cache.
    pub positions: &'a [u32],
    /// The model's own sliding window.
    pub window: Option<usize>,
    /// What each row reads.
    pub mask: Mask,
}

/// Attends; returns `[T, q_heads, head_dim]`, f32. Scores are scaled by 1/sqrt(head_dim) and accumulated in f32.
///
/// # Errors
/// Shapes or dtypes that differ from these, positions that do not ascend or lie beyond the table.
///
/// # Source
/// Online softmax over tiles: Dao et al. 2022, arXiv:2205.14135.
pub fn prefill(args: &Prefill) -> Result<Tensor> {
    prefill_with(Isa::best(), args)
}

fn prefill_with(isa: Isa, args: &Prefill) -> Result<Tensor> {
    let (rows, q_heads, head_dim) = args.q.dims3()?;
    let (blocks, kv_heads, kv_dim) = args.kv.dims()?;
    if head_dim != kv_dim || kv_heads == 0 || q_heads % kv_heads != 0 || rows != args.positions.len() {
        bail!(
            "prefill: q {:?}, {} positions, cache of {kv_heads} heads of {kv_dim}",
            args.q.shape(),
            args.positions.len()
        );
    }
    check_rows(args.positions, args.table, blocks)?;
    let (q, layout) = args.q.storage_and_layout();
    let (k, _) = args.kv.k.storage_and_layout();
    let (v, _) = args.kv.v.storage_and_layout();
    let (Storage::Cpu(q), Storage::Cpu(k), Storage::Cpu(v)) = (&*q, &*k, &*v) else {
        bail!("prefill: only the CPU is built in")
    };
    let (CpuStorage::F32(q), Some((from, to))) = (q, layout.contiguous_offsets()) else {
        bail!("prefill: q must be contiguous f32")
    };
    let dims = Dims { q_heads, kv_heads, group: q_heads / kv_heads, head_dim, padded: head_dim.next_multiple_of(32) };
    let mut out = vec![0f32; rows * q_heads * head_dim];
    with_kv_element!(args.kv.k.dtype(), T => {
        let (k, v) = (T::slice(k).expect("dtype matched"), T::slice(v).expect("dtype matched"));
        attend::<T>(isa, args, &dims, (&q[from..to], k, v), &mut out);
    });
    Tensor::from_vec(out, (rows, q_heads, head_dim), args.q.device())
}

/// Checks that positions ascend and that the table reaches them inside the pool.
fn check_rows(positions: &[u32], table: &[u32], blocks: usize) -> Result<()> {
    if !positions.is_sorted_by(|a, b| a < b) {
        bail!("prefill: positions do not ascend");
    }
    let needed = positions.last().map_or(0, |&p| p as usize / BLOCK_TOKENS + 1);
    if needed > table.len() {
        bail!("prefill: position {:?} with a table of {} blocks", positions.last(), table.len());
    }
    if let Some(block) = table[..needed].iter().find(|&&b| b as usize >= blocks) {
        bail!("prefill: block {block} in a pool of {blocks}");
    }
    Ok(())
}

struct Dims {
    q_heads: usize,
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    /// `head_dim` rounded up to whole pairs of vectors on every instruction set.
    padded: usize,
}

/// Buffers of one thread for a tile of `lines` (rows × heads of a group) and a block of keys.
struct Scratch {
    q: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    scores: Vec<f32>,
    out: Vec<f32>,
    max: Vec<f32>,
    sum: Vec<f32>,
}

/// Lines (rows × heads of a group) of a tile: enough to pay for unpacking a block of keys.
const TILE_LINES: usize = 192;

fn attend<T: KvElement>(isa: Isa, args: &Prefill, dims: &Dims, (q, k, v): (&[f32], &[T], &[T]), out: &mut [f32]) {
    let tile_rows = (TILE_LINES / dims.group).clamp(1, BLOCK_TOKENS);
    let tiles = args.positions.len().div_ceil(tile_rows);
    let lines = tile_rows * dims.group;
    let scratch = || Scratch {
        q: vec![0.0; lines * dims.padded],
        keys: vec![0.0; dims.padded * BLOCK_TOKENS],
        values: vec![0.0; BLOCK_TOKENS * dims.padded],
        scores: vec![0.0; lines * BLOCK_TOKENS],
        out: vec![0.0; lines * dims.padded],
        max: vec![0.0; lines],
        sum: vec![0.0; lines],
    };
    let out = SharedMut::new(out);
    // Later tiles read more keys: longest first keeps the threads level.
    parallel::for_each(tiles * dims.kv_heads, scratch, |s, unit| {
        let head = unit % dims.kv_heads;
        let start = (tiles - 1 - unit / dims.kv_heads) * tile_rows;
        let tile = Tile { start, rows: tile_rows.min(args.positions.len() - start), head };
        let (tile, out) = (&tile, &out);
        dispatch!(isa, run_tile::<_, T: KvElement>(
            args: &Prefill, dims: &Dims, tile: &Tile, q: &[f32], k: &[T], v: &[T], s: &mut Scratch, out: &SharedMut<f32>
        ));
    });
}

/// Rows `start..start + rows` of one KV head's group.
struct Tile {
    start: usize,
    rows: usize,
    head: usize,
}

/// The keys that the rows of a tile read of one block.
struct Active {
    /// Rows of the tile that read any.
    rows: Range<usize>,
    /// Keys of the block up to the last that any row reads.
    keys: usize,
}

/// All of a tile's rows over all of their keys.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // A kernel's operands, spelt out once.
unsafe fn run_tile<V: Simd, T: KvElement>(
    args: &Prefill,
    dims: &Dims,
    tile: &Tile,
    q: &[f32],
    k: &[T],
    v: &[T],
    s: &mut Scratch,
    out: &SharedMut<f32>,
) {
    let (group, d) = (dims.group, dims.head_dim);
    let positions = &args.positions[tile.start..tile.start + tile.rows];
    let scale = 1.0 / (d as f32).sqrt();
    for line in 0..tile.rows * group {
        let (row, head) = (tile.start + line / group, tile.head * group + line % group);
        let to = &mut s.q[line * dims.padded..][..dims.padded];
        to[d..].fill(0.0);
        for (to, from) in to.iter_mut().zip(&q[(row * dims.q_heads + head) * d..][..d]) {
            *to = from * scale;
        }
    }
    s.out.fill(0.0);
    s.max.fill(f32::NEG_INFINITY);
    s.sum.fill(0.0);
    let keys: Vec<_> = positions.iter().map(|&p| args.mask.keys(p as usize, args.window)).collect();
    let last = positions[tile.rows - 1] as usize;
    for block in 0..=last / BLOCK_TOKENS {
        let Some(active) = active(&keys, block) else { continue };
        let base = (args.table[block] as usize * dims.kv_heads + tile.head) * BLOCK_TOKENS * d;
        unsafe {
            unpack_keys::<T>(&k[base..base + BLOCK_TOKENS * d], active.keys, dims, &mut s.keys);
            unpack_values::<T>(&v[base..base + BLOCK_TOKENS * d], active.keys, dims, &mut s.values);
            run_block::<V>(&keys, block, &active, dims, s);
        }
    }
    for line in 0..tile.rows * group {
        let (row, head) = (tile.start + line / group, tile.head * group + line % group);
        // SAFETY: each row and head belongs to one tile.
        let to = unsafe { out.slice((row * dims.q_heads + head) * d, d) };
        for (to, from) in to.iter_mut().zip(&s.out[line * dims.padded..]) {
            *to = from / s.sum[line];
        }
    }
}

/// Which rows read keys of the block; rows ascend, so they are one range.
fn active(keys: &[[Range<usize>; 2]], block: usize) -> Option<Active> {
    let span = block * BLOCK_TOKENS..(block + 1) * BLOCK_TOKENS;
    let reads = |k: &[Range<usize>; 2]| k.iter().any(|r| r.start.max(span.start) < r.end.min(span.end));
    let first = keys.iter().position(reads)?;
    let last = keys.iter().rposition(reads)?;
    let end = keys[first..=last].iter().flatten().map(|r| r.end.min(span.end)).max()?;
    Some(Active { rows: first..last + 1, keys: end - span.start })
}

/// Keys `[64, d]` → f32 `[padded, 64]`, transposed for the score product; columns from `count` on are left as they are
/// and masked.
#[inline(always)]
unsafe fn unpack_keys<T: KvElement>(from: &[T], count: usize, dims: &Dims, to: &mut [f32]) {
    let d = dims.head_dim;
    to[d * BLOCK_TOKENS..].fill(0.0);
    // Eight keys at a time: the strided reads of one column then share cache lines with the next.
    for group in (0..count).step_by(8) {
        let keys = 8.min(count - group);
        for dim in 0..d {
            let to = &mut to[dim * BLOCK_TOKENS + group..][..keys];
            for (key, to) in to.iter_mut().enumerate() {
                *to = from[(group + key) * d + dim].to_f32();
            }
        }
    }
}

/// Values `[64, d]` → f32 `[64, padded]`.
#[inline(always)]
unsafe fn unpack_values<T: KvElement>(from: &[T], count: usize, dims: &Dims, to: &mut [f32]) {
    let d = dims.head_dim;
    for (to, from) in to.chunks_exact_mut(dims.padded).zip(from.chunks_exact(d)).take(count) {
        to[d..].fill(0.0);
        for (to, &from) in to.iter_mut().zip(from) {
            *to = from.to_f32();
        }
    }
}

/// One block of keys: scores, online softmax, weighted values.
#[inline(always)]
unsafe fn run_block<V: Simd>(keys: &[[Range<usize>; 2]], block: usize, active: &Active, dims: &Dims, s: &mut Scratch) {
    let (group, padded) = (dims.group, dims.padded);
    let first = active.rows.start * group;
    let lines = active.rows.len() * group;
    unsafe {
        gemm::<V, false>(&Gemm {
            a: s.q.as_ptr().add(first * padded),
            lda: padded,
            b: s.keys.as_ptr(),
            ldb: BLOCK_TOKENS,
            c: s.scores.as_mut_ptr(),
            ldc: BLOCK_TOKENS,
            m: lines,
            n: BLOCK_TOKENS,
            k: dims.head_dim,
        });
        for line in 0..lines {
            let scores = &mut s.scores[line * BLOCK_TOKENS..][..BLOCK_TOKENS];
            mask_scores(&keys[active.rows.start + line / group], block, scores);
            let line = first + line;
            let out = &mut s.out[line * padded..][..padded];
            softmax_line::<V>(scores, &mut s.max[line], &mut s.sum[line], out);
        }
        gemm::<V, true>(&Gemm {
            a: s.scores.as_ptr(),
            lda: BLOCK_TOKENS,
            b: s.values.as_ptr(),
            ldb: padded,
            c: s.out.as_mut_ptr().add(first * padded),
            ldc: padded,
            m: lines,
            n: padded,
            k: active.keys,
        });
    }
}

/// Sets the scores of unread keys to -inf.
#[inline(always)]
fn mask_scores(keys: &[Range<usize>; 2], block: usize, scores: &mut [f32]) {
    let start = block * BLOCK_TOKENS;
    let local = |r: &Range<usize>| {
        r.start.saturating_sub(start).min(BLOCK_TOKENS)..r.end.saturating_sub(start).min(BLOCK_TOKENS)
    };
    let (a, b) = (local(&keys[0]), local(&keys[1]));
    if b == (0..BLOCK_TOKENS) || a == (0..BLOCK_TOKENS) {
        return;
    }
    for (at, score) in scores.iter_mut().enumerate() {
        if !a.contains(&at) && !b.contains(&at) {
            *score = f32::NEG_INFINITY;
        }
    }
}

#[cfg(test)]
mod tests;
