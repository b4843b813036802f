//! The steps between matrix products: rotation with the append to the cache, normalisation, activation.

use super::error::Result;
use super::ffi::{
    self, TaperAnglesParams, TaperNormParams, TaperRopeParams, TaperSiluParams, taper_angles, taper_norm, taper_rope,
    taper_silu,
};
use super::op::Op;
use super::project::rows;
use crate::kv::{BLOCK_TOKENS, Keep, PagedKv};
use candle_core::{DType, Device, Tensor};

/// Cosines and then sines of each position times each of the frequencies, all times `factor`: `[positions, 2 frequencies]`,
/// f32, on a CUDA device. What is rotated by them there is by the same bits however positions are grouped.
///
/// # Errors
/// No positions or frequencies, or a device error.
pub fn angles(positions: &[u32], frequencies: &[f32], factor: f32, device: &Device) -> Result<Tensor> {
    let (rows, half) = (positions.len(), frequencies.len());
    let mut few = [0; ffi::TAPER_FEW_ROWS as usize];
    let many = match few.get_mut(..rows) {
        Some(few) => {
            few.copy_from_slice(positions);
            None
        }
        None => Some(Tensor::from_slice(positions, rows, device)?),
    };
    let op = Op::on("angles", "device", device)?;
    op.check(rows > 0 && half > 0, "positions", format_args!("{rows} and {half} frequencies"), "at least one of each")?;
    let angles = op.empty((rows, 2 * half), DType::F32)?;
    let p = TaperAnglesParams {
        positions: op.maybe("positions", many.as_ref(), DType::U32, [rows])?,
        frequencies: op.at("frequencies", &op.kept(frequencies, [half])?, DType::F32, [half])?,
        angles: op.at("angles", &angles, DType::F32, [rows, 2 * half])?,
        rows: op.int("positions", rows)?,
        half: op.int("frequencies", half)?,
        factor,
        few,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(taper_angles, &p) }?;
    Ok(angles)
}

/// Rotates queries and keys of `qkv` `[T, (q_heads + 2 kv_heads) head_dim]`, bf16 or f16, by each token's own `angles`
/// `[T, head_dim]`, cosines then sines, f32; writes keys and values into the cache at `slots` (`block * 64 + row`), which
/// the caller has checked; returns queries `[T, q_heads, head_dim]` of the cache's dtype.
///
/// # Errors
/// Shapes or dtypes that differ; head_dim other than 64 and 128.
pub(crate) fn append_joint(
    kv: PagedKv,
    qkv: &Tensor,
    angles: &Tensor,
    slots: &[u32],
    keep: Option<Keep>,
) -> Result<Tensor> {
    let op = Op::new("append_joint", "qkv", qkv)?;
    let tokens = qkv.dim(0)?;
    op.check(slots.len() == tokens, "slots", slots.len(), tokens)?;
    append_joint_at(kv, qkv, angles, &op.kept(slots, [tokens])?, keep)
}

/// Where each row's queries of all layers begin `[R]`, i64, of tensors `[layers, q_heads, head_dim]` of a dtype; 0 for none.
pub(super) fn addresses<'a>(
    op: &Op,
    rows: impl IntoIterator<Item = Option<&'a Tensor>>,
    (layers, q_heads, head_dim): (usize, usize, usize),
    dtype: DType,
) -> Result<Tensor> {
    let address = |row: Option<&Tensor>| -> Result<i64> {
        let Some(row) = row else { return Ok(0) };
        let least = row.dims().first().is_some_and(|&of| of >= layers);
        op.check(least, "queries", format_args!("{:?}", row.dims()), format_args!("{layers} layers of them"))?;
        Ok(op.at::<u8>("queries", row, dtype, [row.dims()[0], q_heads, head_dim])? as i64)
    };
    let all = rows.into_iter().map(address).collect::<Result<Vec<_>>>()?;
    op.kept(&all, [all.len()])
}

/// The same at slots on the device `[T]`, u32.
///
/// # Errors
/// As [`append_joint`].
pub(super) fn append_joint_at(
    kv: PagedKv,
    qkv: &Tensor,
    angles: &Tensor,
    slots: &Tensor,
    keep: Option<Keep>,
) -> Result<Tensor> {
    let op = Op::new("append_joint", "qkv", qkv)?;
    let (blocks, kv_heads, head_dim) = kv.dims()?;
    let (tokens, width) = qkv.dims2()?;
    let q_heads = (width / head_dim).saturating_sub(2 * kv_heads);
    let fits = q_heads > 0 && width == (q_heads + 2 * kv_heads) * head_dim && q_heads.is_multiple_of(kv_heads);
    op.check(
        fits,
        "qkv",
        format_args!("{width} wide"),
        format_args!("q heads and twice {kv_heads} KV heads of {head_dim}"),
    )?;
    let (dtype, pool) = (kv.k.dtype(), [blocks, kv_heads, BLOCK_TOKENS, head_dim]);
    let q = op.empty((tokens, q_heads, head_dim), dtype)?;
    let kept = match keep {
        None => None,
        Some(Keep { rows, layer }) => {
            op.check(rows.len() == tokens, "keep", rows.len(), tokens)?;
            Some(addresses(&op, rows.iter().map(Option::as_ref), (layer + 1, q_heads, head_dim), dtype)?)
        }
    };
    let p = TaperRopeParams {
        qkv: op.at("qkv", qkv, qkv.dtype(), [tokens, width])?,
        angles: op.at("angles", angles, DType::F32, [tokens, head_dim])?,
        slots: op.at("slots", slots, DType::U32, [tokens])?,
        q: op.at("q", &q, dtype, [tokens, q_heads, head_dim])?,
        k: op.at("kv.k", kv.k, dtype, pool)?,
        v: op.at("kv.v", kv.v, dtype, pool)?,
        kept: op.maybe("keep", kept.as_ref(), DType::I64, [tokens])?,
        tokens: op.int("qkv", tokens)?,
        q_heads: op.int("qkv", q_heads)?,
        kv_heads: op.int("kv", kv_heads)?,
        head_dim: op.int("kv", head_dim)?,
        dtype: op.dtype("kv", dtype)?,
        qkv_dtype: op.dtype("qkv", qkv.dtype())?,
        layer: op.int("keep", keep.map_or(0, |keep| keep.layer))?,
    };
    // SAFETY: every address was checked against the shapes given beside it, and slots lie within the cache.
    unsafe { op.launch(taper_rope, &p) }?;
    Ok(q)
}

/// The root-mean-square normalisation of `x` `[T, width]` times `weight` `[width]`, both f32, as bf16 or f16.
///
/// # Errors
/// Shapes that differ, another dtype, a width that is not a multiple of 8.
pub fn norm_f32(x: &Tensor, weight: &Tensor, epsilon: f32, dtype: DType) -> Result<Tensor> {
    from_f32(&Op::new("norm_f32", "x", x)?, x, Some((weight, epsilon)), dtype)
}

/// `x` `[T, width]`, f32, as bf16 or f16.
///
/// # Errors
/// As [`norm_f32`].
pub(super) fn rounded(x: &Tensor, dtype: DType) -> Result<Tensor> {
    from_f32(&Op::new("rounded", "x", x)?, x, None, dtype)
}

/// A contiguous tensor of that dtype: itself, where it is that already.
pub(super) fn cast(op: &Op, x: &Tensor, dtype: DType) -> Result<Tensor> {
    if x.is_contiguous() {
        let width = x.dims().last().copied().unwrap_or(1);
        match (x.dtype(), dtype) {
            (from, to) if from == to => return Ok(x.clone()),
            (DType::F32, DType::BF16 | DType::F16) if width.is_multiple_of(8) => {
                return Ok(rounded(&x.reshape((x.elem_count() / width, width))?, dtype)?.reshape(x.shape())?);
            }
            (DType::BF16 | DType::F16, DType::F32) if width.is_multiple_of(2) => {
                return Ok(rows(&x.reshape((x.elem_count() / width, 1, width))?)?.reshape(x.shape())?);
            }
            _ => {}
        }
    }
    op.apart()?;
    Ok(x.to_dtype(dtype)?.contiguous()?)
}

fn from_f32(op: &Op, x: &Tensor, norm: Option<(&Tensor, f32)>, dtype: DType) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    op.check(width > 0 && width.is_multiple_of(8), "x", format_args!("{width} wide"), "a multiple of 8")?;
    let out = op.empty((rows, width), dtype)?;
    let p = TaperNormParams {
        x: op.at("x", x, DType::F32, [rows, width])?,
        weight: op.maybe("weight", norm.map(|norm| norm.0), DType::F32, [width])?,
        out: op.at("out", &out, dtype, [rows, width])?,
        rows: op.int("x", rows)?,
        width: op.int("x", width)?,
        dtype: op.dtype("out", dtype)?,
        epsilon: norm.map_or(0.0, |norm| norm.1),
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(taper_norm, &p) }?;
    Ok(out)
}

/// silu(gate) · up of `[T, 2 width]`, gate first; returns `[T, width]`.
///
/// # Errors
/// A dtype other than bf16 and f16, a width that is not a multiple of 8.
pub fn silu_mul(gate_up: &Tensor) -> Result<Tensor> {
    let op = Op::new("silu_mul", "gate_up", gate_up)?;
    let ((rows, both), dtype) = (gate_up.dims2()?, gate_up.dtype());
    op.check(both > 0 && both.is_multiple_of(16), "gate_up", format_args!("{both} wide"), "a multiple of 16")?;
    let out = op.empty((rows, both / 2), dtype)?;
    let p = TaperSiluParams {
        gate_up: op.at("gate_up", gate_up, dtype, [rows, both])?,
        out: op.at("out", &out, dtype, [rows, both / 2])?,
        rows: rows as i64,
        width: op.int("gate_up", both / 2)?,
        dtype: op.dtype("gate_up", dtype)?,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(taper_silu, &p) }?;
    Ok(out)
}
