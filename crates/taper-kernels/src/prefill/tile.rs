//! The tile kernel: some rows and heads over all of their keys, a block of 64 at a time.

use super::selection::{outside, rows_of};
use super::{Reads, Rows};
use crate::gemm::{Gemm, gemm};
use crate::kv::{BLOCK_TOKENS, KvElement};
use crate::parallel::{self, SharedMut};
use crate::simd::{Isa, Simd, dispatch};
use crate::softmax::softmax_line;
use candle_core::{CpuStorage, Result, bail};
use std::ops::Range;

#[derive(Debug, Clone, Copy)]
pub(super) struct Dims {
    pub q_heads: usize,
    pub kv_heads: usize,
    pub group: usize,
    pub head_dim: usize,
    /// `head_dim` rounded up to whole pairs of vectors on every instruction set.
    pub padded: usize,
}

/// Lines (rows × heads) of a tile: enough to pay for unpacking a block of keys.
pub(super) const TILE_LINES: usize = 192;

impl Dims {
    /// Rows of a tile of so many heads.
    pub fn tile_rows(&self, heads: usize) -> usize {
        (TILE_LINES / heads).clamp(1, BLOCK_TOKENS)
    }
}

/// Rows (by number, not position) and query heads of one KV head that read by the same lists.
#[derive(Debug, Clone)]
pub(super) struct Tile {
    pub rows: Range<usize>,
    pub heads: Range<usize>,
    run: usize,
    list: usize,
}

/// Cuts rows and heads into tiles, those of the last rows first.
pub(super) fn tiles(positions: &[u32], reads: &Reads, dims: &Dims) -> Result<Vec<Tile>> {
    let (runs, lists) = match reads {
        Reads::Mask(_) => (std::iter::once(0..positions.len()).collect(), dims.kv_heads),
        Reads::Selection(selection) => {
            let lists = selection.heads().len();
            if lists != dims.kv_heads && lists != dims.q_heads {
                bail!("prefill: a selection for {lists} heads; expected {} or {}", dims.kv_heads, dims.q_heads);
            }
            let runs: Vec<_> = selection.runs().iter().map(|run| rows_of(positions, run)).collect();
            if runs.iter().map(Range::len).sum::<usize>() != positions.len() {
                bail!("prefill: a selection of rows {:?} without some of the rows", selection.runs());
            }
            (runs, lists)
        }
    };
    let each = dims.q_heads / lists;
    let mut tiles = Vec::with_capacity((positions.len() / BLOCK_TOKENS + runs.len()) * lists);
    // Later tiles read more keys: longest first keeps the threads level.
    for (run, all) in runs.into_iter().enumerate().rev() {
        for list in alike(reads, run, lists, dims) {
            let heads = list.start * each..list.end * each;
            let rows = dims.tile_rows(heads.len());
            tiles.extend(all.clone().step_by(rows).rev().map(|start| Tile {
                rows: start..(start + rows).min(all.end),
                heads: heads.clone(),
                run,
                list: list.start,
            }));
        }
    }
    Ok(tiles)
}

/// Lists of heads, those together that are the same and of one KV head: they share what unpacking a block costs.
fn alike(reads: &Reads, run: usize, lists: usize, dims: &Dims) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::with_capacity(lists);
    let of_kv_head = lists / dims.kv_heads;
    for list in 0..lists {
        let same = |before: usize| match reads {
            Reads::Selection(selection) if before / of_kv_head == list / of_kv_head => {
                let (a, b) = (&selection.heads()[before], &selection.heads()[list]);
                a.mask == b.mask && a.lists(run) == b.lists(run)
            }
            _ => false,
        };
        match groups.last_mut() {
            Some(last) if same(last.start) => last.end = list + 1,
            _ => groups.push(list..list + 1),
        }
    }
    groups
}

/// What a tile's kernel reads.
pub(super) struct Operands<'a, S> {
    pub rows: &'a Rows<'a>,
    pub reads: &'a Reads<'a>,
    pub dims: &'a Dims,
    pub q: &'a [f32],
    pub k: S,
    pub v: S,
}

impl<'a> Operands<'a, &'a CpuStorage> {
    pub fn new(
        rows: &'a Rows<'a>,
        reads: &'a Reads<'a>,
        dims: &'a Dims,
        (q, k, v): (&'a [f32], &'a CpuStorage, &'a CpuStorage),
    ) -> Self {
        Self { rows, reads, dims, q, k, v }
    }
}

/// Buffers of one thread for a tile and a block of keys.
struct Scratch {
    q: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    scores: Vec<f32>,
    out: Vec<f32>,
    max: Vec<f32>,
    sum: Vec<f32>,
    tokens: Vec<u32>,
    spoilt: Vec<Spoilt>,
}

/// A value that is NaN or infinite.
struct Spoilt {
    column: usize,
    dim: usize,
    value: f32,
}

/// Attends for all tiles; `out` `[T, q_heads, head_dim]` and `lse` `[T, q_heads]`.
pub(super) fn attend<T: KvElement>(
    isa: Isa,
    with: &Operands<&CpuStorage>,
    tiles: &[Tile],
    (out, lse): (&SharedMut<f32>, &SharedMut<f32>),
) {
    let Operands { rows, reads, dims, q, k, v } = *with;
    let slice = |storage| T::slice(storage).expect("the caller matched the dtype");
    let with = &Operands { rows, reads, dims, q, k: slice(k), v: slice(v) };
    let lines = tiles.iter().map(|tile| tile.rows.len() * tile.heads.len()).max().unwrap_or(0);
    let scratch = || Scratch {
        q: vec![0.0; lines * dims.padded],
        keys: vec![0.0; dims.padded * BLOCK_TOKENS],
        values: vec![0.0; BLOCK_TOKENS * dims.padded],
        scores: vec![0.0; lines * BLOCK_TOKENS],
        out: vec![0.0; lines * dims.padded],
        max: vec![0.0; lines],
        sum: vec![0.0; lines],
        tokens: Vec::new(),
        spoilt: Vec::new(),
    };
    parallel::for_each(tiles.len(), scratch, |s, unit| {
        let tile = &tiles[unit];
        dispatch!(isa, run_tile::<_, T: KvElement>(
            with: &Operands<&[T]>, tile: &Tile, s: &mut Scratch, out: &SharedMut<f32>, lse: &SharedMut<f32>
        ));
    });
}

/// The 64 or fewer keys of one step.
#[derive(Clone, Copy)]
pub(super) enum Columns<'a> {
    /// A block of the sequence.
    Block(usize),
    /// Single tokens.
    Tokens(&'a [u32]),
}

impl Columns<'_> {
    /// Which columns stand for keys of a range.
    #[inline(always)]
    fn local(&self, keys: &Range<usize>) -> Range<usize> {
        match self {
            Columns::Block(block) => {
                let start = block * BLOCK_TOKENS;
                let at = |key: usize| key.saturating_sub(start).min(BLOCK_TOKENS);
                at(keys.start)..at(keys.end)
            }
            Columns::Tokens(tokens) => {
                let at = |key: usize| tokens.partition_point(|&t| (t as usize) < key);
                at(keys.start)..at(keys.end)
            }
        }
    }
}

/// The columns that the rows of a tile read.
pub(super) struct Active {
    /// Rows of the tile that read any.
    pub rows: Range<usize>,
    /// Columns up to the last that any row reads.
    pub keys: usize,
}

/// Which rows read any of the columns; rows ascend, so they are one range.
pub(super) fn active(keys: &[[Range<usize>; 2]], columns: &Columns) -> Option<Active> {
    let reads = |k: &[Range<usize>; 2]| k.iter().any(|r| !columns.local(r).is_empty());
    let first = keys.iter().position(reads)?;
    let last = keys.iter().rposition(reads)?;
    let end = keys[first..=last].iter().flatten().map(|r| columns.local(r)).filter(|l| !l.is_empty());
    Some(Active { rows: first..last + 1, keys: end.map(|l| l.end).max()? })
}

/// Packs the queries of rows and heads, scaled, one line of `padded` each.
#[inline(always)]
pub(super) fn pack_queries(dims: &Dims, q: &[f32], rows: Range<usize>, heads: Range<usize>, to: &mut [f32]) {
    let d = dims.head_dim;
    let scale = 1.0 / (d as f32).sqrt();
    let lines = rows.flat_map(|row| heads.clone().map(move |head| row * dims.q_heads + head));
    for (line, to) in lines.zip(to.chunks_exact_mut(dims.padded)) {
        to[d..].fill(0.0);
        for (to, from) in to.iter_mut().zip(&q[line * d..][..d]) {
            *to = from * scale;
        }
    }
}

/// All of a tile's rows over all of their keys.
#[inline(always)]
unsafe fn run_tile<V: Simd, T: KvElement>(
    with: &Operands<&[T]>,
    tile: &Tile,
    s: &mut Scratch,
    out: &SharedMut<f32>,
    lse: &SharedMut<f32>,
) {
    let Dims { group, head_dim: d, padded, q_heads, .. } = *with.dims;
    let (kv_head, heads) = (tile.heads.start / group, tile.heads.len());
    let positions = &with.rows.positions[tile.rows.clone()];
    let (mask, blocks, tokens) = match with.reads {
        Reads::Mask(mask) => (*mask, None, &[][..]),
        Reads::Selection(selection) => {
            let reads = &selection.heads()[tile.list];
            let (blocks, tokens) = reads.lists(tile.run);
            (reads.mask, blocks, tokens)
        }
    };
    let blocks = blocks.as_deref();
    pack_queries(with.dims, with.q, tile.rows.clone(), tile.heads.clone(), &mut s.q);
    s.out.fill(0.0);
    s.max.fill(f32::NEG_INFINITY);
    s.sum.fill(0.0);
    let keys: Vec<_> = positions.iter().map(|&p| mask.keys(p as usize, with.rows.window)).collect();
    let last = positions[positions.len() - 1] as usize;
    let in_blocks = match blocks {
        None => last / BLOCK_TOKENS + 1,
        Some(blocks) => blocks.partition_point(|&b| b as usize <= last / BLOCK_TOKENS),
    };
    let mut singles = std::mem::take(&mut s.tokens);
    match blocks {
        // All blocks: no token stands outside.
        None => singles.clear(),
        Some(blocks) => outside(&tokens[..tokens.partition_point(|&t| t as usize <= last)], blocks, &mut singles),
    }
    for step in 0..in_blocks + singles.len().div_ceil(BLOCK_TOKENS) {
        let columns = match step.checked_sub(in_blocks) {
            None => Columns::Block(blocks.map_or(step, |blocks| blocks[step] as usize)),
            Some(at) => Columns::Tokens(&singles[at * BLOCK_TOKENS..singles.len().min((at + 1) * BLOCK_TOKENS)]),
        };
        let Some(active) = active(&keys, &columns) else { continue };
        unsafe {
            unpack_keys::<V, T>(with, kv_head, &columns, active.keys, &mut s.keys);
            unpack_values::<V, T>(with, kv_head, &columns, active.keys, &mut s.values);
            s.spoilt.clear();
            if !all_read(&keys[active.rows.clone()], &columns, active.keys) {
                take_out_spoilt(&mut s.values[..active.keys * padded], padded, &mut s.spoilt);
            }
            run_columns::<V>(&keys, heads, &columns, &active, with.dims, s);
        }
    }
    s.tokens = singles;
    for line in 0..tile.rows.len() * heads {
        let at = (tile.rows.start + line / heads) * q_heads + tile.heads.start + line % heads;
        let sum = s.sum[line];
        // SAFETY: each row and head belongs to one tile.
        unsafe {
            for (to, from) in out.slice(at * d, d).iter_mut().zip(&s.out[line * padded..]) {
                *to = if sum == 0.0 { 0.0 } else { from / sum };
            }
            lse.slice(at, 1)[0] = s.max[line] + sum.ln();
        }
    }
}

/// Where a block of the sequence begins in the pool, for one KV head.
#[inline(always)]
pub(super) fn base_of<S>(with: &Operands<S>, kv_head: usize, block: usize) -> usize {
    (with.rows.table[block] as usize * with.dims.kv_heads + kv_head) * BLOCK_TOKENS * with.dims.head_dim
}

/// Keys of the first `count` columns → f32 `[padded, 64]`, transposed for the score product; columns from `count` on are
/// left as they are and masked.
#[inline(always)]
pub(super) unsafe fn unpack_keys<V: Simd, T: KvElement>(
    with: &Operands<&[T]>,
    kv_head: usize,
    columns: &Columns,
    count: usize,
    to: &mut [f32],
) {
    let d = with.dims.head_dim;
    to[d * BLOCK_TOKENS..].fill(0.0);
    // Eight keys at a time: the strided writes of one column then share cache lines with the next.
    for first in (0..count).step_by(8) {
        let keys = 8.min(count - first);
        let mut rows = [&[][..]; 8];
        for (key, row) in rows.iter_mut().enumerate().take(keys) {
            *row = &with.k[start_of(with, kv_head, columns, first + key)..][..d];
        }
        let mut dim = 0;
        let mut wide = [[0f32; WIDEST]; 8];
        while dim + V::LANES <= d {
            for (wide, row) in wide.iter_mut().zip(&rows[..keys]) {
                // SAFETY: the row has another vector, and a vector has at most WIDEST lanes.
                unsafe { T::load::<V>(row[dim..].as_ptr()).store(wide.as_mut_ptr()) };
            }
            for lane in 0..V::LANES {
                let to = &mut to[(dim + lane) * BLOCK_TOKENS + first..][..keys];
                to.iter_mut().zip(&wide).for_each(|(to, wide)| *to = wide[lane]);
            }
            dim += V::LANES;
        }
        for dim in dim..d {
            let to = &mut to[dim * BLOCK_TOKENS + first..][..keys];
            to.iter_mut().zip(&rows).for_each(|(to, row)| *to = row[dim].to_f32());
        }
    }
}

/// Lanes of the widest vector.
const WIDEST: usize = 16;

/// Where the key or value of a column begins in the pool.
#[inline(always)]
fn start_of<S>(with: &Operands<S>, kv_head: usize, columns: &Columns, column: usize) -> usize {
    match columns {
        Columns::Block(block) => base_of(with, kv_head, *block) + column * with.dims.head_dim,
        Columns::Tokens(tokens) => {
            let token = tokens[column] as usize;
            base_of(with, kv_head, token / BLOCK_TOKENS) + token % BLOCK_TOKENS * with.dims.head_dim
        }
    }
}

/// Values of the first `count` columns → f32 `[64, padded]`.
#[inline(always)]
unsafe fn unpack_values<V: Simd, T: KvElement>(
    with: &Operands<&[T]>,
    kv_head: usize,
    columns: &Columns,
    count: usize,
    to: &mut [f32],
) {
    let Dims { head_dim: d, padded, .. } = *with.dims;
    for (column, to) in to.chunks_exact_mut(padded).take(count).enumerate() {
        let from = &with.v[start_of(with, kv_head, columns, column)..][..d];
        to[d..].fill(0.0);
        let whole = d - d % V::LANES;
        for dim in (0..whole).step_by(V::LANES) {
            // SAFETY: both rows have another vector.
            unsafe { T::load::<V>(from[dim..].as_ptr()).store(to[dim..].as_mut_ptr()) };
        }
        to[whole..d].iter_mut().zip(&from[whole..]).for_each(|(to, from)| *to = from.to_f32());
    }
}

/// Whether every row reads all of the first `count` columns.
#[inline(always)]
fn all_read(keys: &[[Range<usize>; 2]], columns: &Columns, count: usize) -> bool {
    keys.iter().all(|k| k.iter().any(|range| columns.local(range) == (0..count)))
}

/// Puts 0 in the place of values that are NaN or infinite. The product with the weights would carry them into rows that
/// do not read them, since 0 · NaN is NaN; rows that do are given them afterwards.
#[inline(always)]
fn take_out_spoilt(values: &mut [f32], padded: usize, to: &mut Vec<Spoilt>) {
    const EXPONENT: u32 = 0x7F80_0000;
    if values.iter().map(|v| v.to_bits() & EXPONENT).max() != Some(EXPONENT) {
        return;
    }
    for (at, value) in values.iter_mut().enumerate().filter(|(_, value)| !value.is_finite()) {
        to.push(Spoilt { column: at / padded, dim: at % padded, value: std::mem::take(value) });
    }
}

/// One step's keys: scores, online softmax, weighted values.
#[inline(always)]
unsafe fn run_columns<V: Simd>(
    keys: &[[Range<usize>; 2]],
    heads: usize,
    columns: &Columns,
    active: &Active,
    dims: &Dims,
    s: &mut Scratch,
) {
    let padded = dims.padded;
    let first = active.rows.start * heads;
    let lines = active.rows.len() * heads;
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
            mask_scores(&keys[active.rows.start + line / heads], columns, scores);
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
    for &Spoilt { column, dim, value } in &s.spoilt {
        for line in 0..lines {
            let reads = &keys[active.rows.start + line / heads];
            if reads.iter().any(|range| columns.local(range).contains(&column)) {
                s.out[(first + line) * padded + dim] += s.scores[line * BLOCK_TOKENS + column] * value;
            }
        }
    }
}

/// Sets the scores of unread keys to -inf.
#[inline(always)]
pub(super) fn mask_scores(keys: &[Range<usize>; 2], columns: &Columns, scores: &mut [f32]) {
    let (a, b) = (columns.local(&keys[0]), columns.local(&keys[1]));
    if b == (0..BLOCK_TOKENS) || a == (0..BLOCK_TOKENS) {
        return;
    }
    for (at, score) in scores.iter_mut().enumerate() {
        if !a.contains(&at) && !b.contains(&at) {
            *score = f32::NEG_INFINITY;
        }
    }
}
