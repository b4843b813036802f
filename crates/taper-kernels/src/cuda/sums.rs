//! Sums of attention probabilities by key and by diagonal: [`crate::prefill::sums`] on a CUDA device.

use super::error::Result;
use super::ffi::{TaperReduceParams, taper_reduce};
use super::op::Op;
use crate::kv::BLOCK_TOKENS;
use crate::prefill::{Rows, Sums};
use candle_core::{DType, Tensor};

/// Rows of a slice, and blocks of keys that one thread block sums.
const SLICE_ROWS: usize = 64;
const SPLIT_BLOCKS: usize = 32;
/// Slices that are summed at a time: each has a number of every key, query head and row of its own for a while.
const SLICES: usize = 8;

/// As the CPU's, whose checks the caller has made; queries in f32 are rounded to the cache's dtype.
pub(crate) fn sums(rows: &Rows) -> Result<Sums> {
    let op = Op::new("sums", "q", rows.q)?;
    let (count, _, head_dim) = rows.q.dims3()?;
    op.check(count > 0, "q", "no rows", "at least one")?;
    op.head_dim("q", head_dim)?;
    let slices = slices(rows.positions);
    let n = rows.positions[count - 1] as usize + 1;
    let (key_blocks, dtype) = (n.div_ceil(BLOCK_TOKENS), rows.kv.k.dtype());
    let q = rows.q.to_dtype(dtype)?.contiguous()?;
    let table = op.kept(&rows.table[..key_blocks], [1, key_blocks])?;
    let mut groups = slices.chunks(SLICES).map(|slices| few(&op, rows, &q, &table, slices));
    let [mut columns, mut diagonals, lse] = groups.next().expect("there are rows")?;
    let mut lses = vec![lse];
    for group in groups {
        let [more_columns, more_diagonals, lse] = group?;
        (columns, diagonals) = ((columns + more_columns)?, (diagonals + more_diagonals)?);
        lses.push(lse);
    }
    Ok(Sums {
        columns: columns.narrow(1, 0, n)?.contiguous()?,
        diagonals: diagonals.narrow(1, 0, n)?.contiguous()?,
        lse: Tensor::cat(&lses, 0)?,
    })
}

/// Column and diagonal sums `[q_heads, keys]` of some slices, and their rows' log-sum-exps `[rows, q_heads]`.
fn few(op: &Op, rows: &Rows, q: &Tensor, table: &Tensor, slices: &[(u32, u32, u32)]) -> Result<[Tensor; 3]> {
    let ((count, q_heads, head_dim), (blocks, kv_heads, _)) = (q.dims3()?, rows.kv.dims()?);
    let (key_blocks, dtype) = (table.dim(1)?, q.dtype());
    let (splits, keys) = (key_blocks.div_ceil(SPLIT_BLOCKS), key_blocks * BLOCK_TOKENS);
    let words: Vec<u32> = slices.iter().flat_map(|&(row, rows, position)| [row, rows, position, 0]).collect();
    let (words, m) = (op.kept(&words, [slices.len(), 4])?, slices.len());
    let parts = op.empty((m, q_heads, splits, SLICE_ROWS, 2), DType::F32)?;
    let tiles = op.empty((m, q_heads, key_blocks, 128), DType::F32)?;
    // A slice writes no further than its own last block.
    let (columns, diagonals) = (op.zeros((m, q_heads, keys), DType::F32)?, op.zeros((m, q_heads, keys), DType::F32)?);
    let lse = op.empty((m, q_heads, SLICE_ROWS), DType::F32)?;
    let p = TaperReduceParams {
        q: op.at("q", q, dtype, [count, q_heads, head_dim])?,
        k: op.at("kv.k", rows.kv.k, dtype, [blocks, kv_heads, BLOCK_TOKENS, head_dim])?,
        block_table: op.at("table", table, DType::U32, [1, key_blocks])?,
        slices: op.at("positions", &words, DType::U32, [m, 4])?,
        parts: op.at("parts", &parts, DType::F32, parts.dims())?,
        tile_diagonals: op.at("tiles", &tiles, DType::F32, tiles.dims())?,
        columns: op.at("columns", &columns, DType::F32, columns.dims())?,
        diagonals: op.at("diagonals", &diagonals, DType::F32, diagonals.dims())?,
        lse: op.at("lse", &lse, DType::F32, lse.dims())?,
        slice_count: op.int("positions", m)?,
        q_heads: op.int("q", q_heads)?,
        kv_heads: op.int("kv", kv_heads)?,
        head_dim: op.int("kv", head_dim)?,
        dtype: op.dtype("kv", dtype)?,
        table_stride: op.int("table", key_blocks)?,
        max_blocks: op.int("positions", key_blocks)?,
        splits: op.int("positions", splits)?,
        scale: 1.0 / (head_dim as f32).sqrt(),
        window: op.int("window", rows.window.unwrap_or(0))?,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(taper_reduce, &p) }?;
    let own: Vec<Tensor> = (slices.iter().enumerate())
        .map(|(i, &(_, rows, _))| lse.get(i)?.narrow(1, 0, rows as usize)?.t())
        .collect::<candle_core::Result<_>>()?;
    // candle's sum takes a thread block for each number, which for one slice is all for nothing.
    let all = |of: Tensor| if m == 1 { of.squeeze(0) } else { of.sum(0) };
    Ok([all(columns)?, all(diagonals)?, Tensor::cat(&own, 0)?])
}

/// Runs of neighbouring rows, at most 64 each: (first row, rows, position).
fn slices(positions: &[u32]) -> Vec<(u32, u32, u32)> {
    let mut out: Vec<(u32, u32, u32)> = Vec::new();
    for (row, &position) in positions.iter().enumerate() {
        match out.last_mut() {
            Some((_, rows, first)) if *first + *rows == position && (*rows as usize) < SLICE_ROWS => *rows += 1,
            _ => out.push((row as u32, 1, position)),
        }
    }
    out
}
