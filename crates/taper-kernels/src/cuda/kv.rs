//! Writing to the paged cache: what [`crate::kv::append`] and [`crate::kv::copy_block`] do on a CUDA device.

use super::error::Result;
use super::ffi::{TaperWriteParams, taper_write};
use super::op::Op;
use super::tape;
use crate::kv::BLOCK_TOKENS;
use candle_core::cuda_backend::cudarc::driver::result;
use candle_core::{DType, Tensor};

/// Writes rows `[T, kv_heads, head_dim]`, f32 or of the pool's dtype, into a pool `[blocks, kv_heads, 64, head_dim]` at
/// `slots` (`block * 64 + row`), which the caller has checked.
pub(crate) fn append(pool: &Tensor, rows: &Tensor, slots: &[u32]) -> Result<()> {
    if slots.is_empty() {
        return Ok(());
    }
    let op = Op::new("kv-append", "pool", pool)?;
    let (blocks, kv_heads, _, head_dim) = pool.dims4()?;
    let tokens = slots.len();
    op.check(head_dim.is_multiple_of(8), "pool", format_args!("head_dim {head_dim}"), "a multiple of 8")?;
    let rows_f32 = rows.dtype() == DType::F32;
    let at = op.kept(slots, [tokens])?;
    let p = TaperWriteParams {
        rows: op.at("rows", rows, if rows_f32 { DType::F32 } else { pool.dtype() }, [tokens, kv_heads, head_dim])?,
        slots: op.at("slots", &at, DType::U32, [tokens])?,
        pool: op.at("pool", pool, pool.dtype(), [blocks, kv_heads, BLOCK_TOKENS, head_dim])?,
        tokens: op.int("slots", tokens)?,
        kv_heads: op.int("pool", kv_heads)?,
        head_dim: op.int("pool", head_dim)?,
        dtype: op.dtype("pool", pool.dtype())?,
        rows_f32: rows_f32.into(),
    };
    // SAFETY: every address was checked against the shapes given beside it, and slots lie within the pool.
    unsafe { op.launch(taper_write, &p) }
}

/// Copies block `from` over block `to` within a pool `[blocks, …]`; both are within it.
pub(crate) fn copy_block(pool: &Tensor, from: u32, to: u32) -> Result<()> {
    if from == to {
        return Ok(());
    }
    let op = Op::new("kv-copy-block", "pool", pool)?;
    tape::leave()?;
    let base: *mut u8 = op.at("pool", pool, pool.dtype(), pool.dims())?;
    let bytes = pool.elem_count() / pool.dim(0)? * pool.dtype().size_in_bytes();
    let block = |at: u32| base as u64 + at as u64 * bytes as u64;
    // SAFETY: both blocks lie within the pool and are not the same.
    unsafe { result::memcpy_dtod_async(block(to), block(from), bytes, op.cuda_stream().cu_stream()) }
        .map_err(candle_core::Error::wrap)?;
    Ok(())
}
