//! Scores of all keys by what is kept of them at 2 bits a channel, and choices by those.

use super::batch::{Batch, Dims, Lists, WORDS};
use super::error::Result;
use super::ffi::{self, TaperPickTokensParams, TaperQuantizedScoreParams};
use super::op::{self, Op};
use super::sample::Scratch;
use super::score::{Between, Passed, Scores, reduce};
use crate::decode::Over;
use crate::index::quantized;
use bytemuck::Zeroable;
use candle_core::{DType, Tensor};

/// Scores every token that rows see by its quantized key, the batch's queries rounded to bf16; `index`
/// `[blocks, kv_heads, 1, 5 head_dim]`, u32, as [`super::index::extend`] makes it. Scores are multiplied by `scale`.
///
/// # Errors
/// Shapes or dtypes that differ.
pub fn quantized_scores(batch: &Batch, index: &Tensor, scale: f32) -> Result<Scores> {
    let op = Op::new("quantized_scores", "q", batch.q)?;
    let Dims { rows, q_heads, kv_heads, head_dim, blocks, tables, stride, dtype } = batch.dims(&op)?;
    let (one, words) = quantized::shape(head_dim);
    let of = Passed::new(&op, (rows, q_heads), batch.max_len, 1)?;
    let (entries, tiles) = (of.entries, of.entries / 64);
    let p = TaperQuantizedScoreParams {
        q: op.at("q", batch.q, dtype, [rows, q_heads, head_dim])?,
        index: op.at("index", index, DType::U32, [blocks, kv_heads, one, words])?,
        block_table: op.at("tables", batch.tables, DType::U32, [tables, stride])?,
        lens: op.at("lens", batch.lens, DType::U32, [rows])?,
        out: op.at("out", &of.scores, DType::F32, [rows, q_heads, entries])?,
        tile_max: op.at("tiles", &of.top, DType::F32, [rows, q_heads, tiles])?,
        tile_sum: op.at("tiles", &of.sum, DType::F32, [rows, q_heads, tiles])?,
        rows: op.int("q", rows)?,
        q_heads: op.int("q", q_heads)?,
        kv_heads: op.int("kv", kv_heads)?,
        head_dim: op.int("q", head_dim)?,
        dtype: op.dtype("q", dtype)?,
        table_stride: op.int("tables", stride)?,
        max_len: op.int("max_len", batch.max_len)?,
        stride: op.int("max_len", entries)?,
        tile_stride: op.int("max_len", tiles)?,
        scale,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_quantized_score, &p) }?;
    of.summed(&op, batch)
}

/// The entries between that cost less than sampling around them by their quantized keys' shares, scored and chosen in one launch:
/// of each list as many as `k` `[lists]`, u32, says, at most `most`; `noise`, above 0, is what sampling costs, in squared shares.
/// `longest` is what the row that sees most sees.
pub(super) fn pick_quantized(
    op: &Op,
    batch: &Batch,
    index: &Tensor,
    between: Between,
    (most, k, noise): (usize, &Tensor, f32),
    (longest, over): (usize, Over),
) -> Result<Lists> {
    let Dims { rows, q_heads, kv_heads, head_dim, blocks, tables, stride, dtype } = batch.dims(op)?;
    let (one, words) = quantized::shape(head_dim);
    let Between { lists, begins, ends, .. } = between;
    lists.fits(op, rows, kv_heads)?;
    let (count, entries) = (rows * kv_heads, batch.max_len.next_multiple_of(64));
    let capacity = most.clamp(1, entries);
    let ids = op.lent((count, capacity), DType::U32)?;
    // What does not fit where it is made.
    let scores = op.lent((rows, q_heads, entries), DType::F32)?;
    let (told, work) = Lists::told(op, count)?;
    let scratch = Scratch::kept(batch.q, rows, q_heads, kv_heads)?;
    let p = TaperPickTokensParams {
        q: op.at("q", batch.q, dtype, [rows, q_heads, head_dim])?,
        index: op.at("index", index, DType::U32, [blocks, kv_heads, one, words])?,
        block_table: op.at("tables", batch.tables, DType::U32, [tables, stride])?,
        lens: op.at("lens", batch.lens, DType::U32, [rows])?,
        begins: op.at("between", &begins, DType::U32, [count])?,
        ends: op.at("between", &ends, DType::U32, [count])?,
        ks: op.at("k", k, DType::U32, [count])?,
        lists: op.at("between", &lists.work, DType::U32, [count, WORDS])?,
        scores: op.at("scores", &scores, DType::F32, [rows, q_heads, entries])?,
        ids: op.at("ids", &ids, DType::U32, [count, capacity])?,
        work: op.at("work", &work, DType::U32, [count, WORDS])?,
        sync: op.at("scratch", &scratch.sync, DType::U32, [2 + count, 32])?,
        sums: op.at("scratch", &scratch.sums, DType::I64, scratch.sums.dims())?,
        bins: op.at("scratch", &scratch.bins, DType::U32, scratch.bins.dims())?,
        rows: op.int("q", rows)?,
        q_heads: op.int("q", q_heads)?,
        kv_heads: op.int("kv", kv_heads)?,
        head_dim: op.int("q", head_dim)?,
        dtype: op.dtype("q", dtype)?,
        table_stride: op.int("tables", stride)?,
        stride: op.int("max_len", entries)?,
        capacity: op.int("k", capacity)?,
        reduce: reduce(over),
        // Older tokens' blocks are scored while those of the newest are being made.
        fresh: op::fresh(longest),
        scale: 1.0 / (head_dim as f32).sqrt(),
        noise,
        ..TaperPickTokensParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_pick_tokens, &p) }?;
    Ok(Lists { work, told, token_ids: Some(ids.reshape(count * capacity)?), ..lists })
}
