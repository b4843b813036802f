//! Scores of all keys by what is kept of them at 2 bits a channel.

use super::batch::{Batch, Dims};
use super::error::Result;
use super::ffi::{self, TaperQuantizedScoreParams};
use super::op::Op;
use super::score::{Passed, Scores};
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
        row_table: op.maybe("row_tables", batch.row_tables, DType::U32, [rows])?,
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
        overlap: 1,
        scale,
        ..TaperQuantizedScoreParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_quantized_score, &p) }?;
    of.summed(&op, batch)
}
