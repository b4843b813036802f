//! What a few rows go through before they are compared with something learned, in f32: the rotary embedding taken off, one
//! layer of a perceptron, products with centroids, some channels. What comes of a row does not depend on the others.

use super::error::Result;
use super::ffi::{self, TaperChannelsParams, TaperProjectParams, TaperRowsParams};
use super::op::{Op, renewing};
use crate::kv::BLOCK_TOKENS;
use crate::lent::Lent;
use crate::mlp::Activation;
use bytemuck::Zeroable;
use candle_core::{DType, Tensor};

/// Cosines and sines `[T, width / 2]`, f32, of the turns that are taken off rows.
#[derive(Debug, Clone)]
pub struct Turns {
    /// Cosines.
    pub cos: Tensor,
    /// Sines.
    pub sin: Tensor,
}

impl Turns {
    /// Where both lie, `[rows, width / 2]` each, or nulls.
    pub(super) fn at(turns: Option<&Self>, op: &Op, rows: usize, width: usize) -> Result<[*mut f32; 2]> {
        let at = |of: Option<&Tensor>| op.maybe("turns", of, DType::F32, [rows, width / 2]);
        Ok([at(turns.map(|turns| &turns.cos))?, at(turns.map(|turns| &turns.sin))?])
    }
}

/// Rows `[T, heads, width]`, f32, bf16 or f16, as f32.
///
/// # Errors
/// Shapes that differ.
pub fn rows(x: &Tensor) -> Result<Tensor> {
    let op = Op::new("rows", "x", x)?;
    let dims = x.dims3()?;
    let at = op.at::<u8>("x", x, x.dtype(), x.dims())?;
    run(&op, dims, (at, x.dtype()), None, None)
}

/// The same, turned back, of tokens of a cache `[blocks, heads, 64, width]`, each in its slot (block * 64 + row) `[T]`, u32.
///
/// # Errors
/// Shapes that differ.
pub fn cached_rows(k: &Tensor, slots: &Tensor, turns: Option<&Turns>) -> Result<Tensor> {
    let op = Op::new("cached_rows", "k", k)?;
    let (blocks, heads, _, width) = k.dims4()?;
    let at = op.at::<u8>("k", k, k.dtype(), [blocks, heads, BLOCK_TOKENS, width])?;
    run(&op, (slots.dim(0)?, heads, width), (at, k.dtype()), Some(slots), turns)
}

/// Rows of a table `[rows, width]`, f32, bf16 or f16, as f32, by their numbers `[T]`, u32: `[T, width]`. One of `u32::MAX` is
/// zeros; the others must be of the table.
///
/// # Errors
/// Shapes that differ.
pub fn gather(table: &Tensor, numbers: &Tensor) -> Result<Tensor> {
    let op = Op::new("gather", "table", table)?;
    let ((_, width), count) = (table.dims2()?, numbers.dims1()?);
    let at = op.at::<u8>("table", table, table.dtype(), table.dims())?;
    // As slots of a cache of one head.
    Ok(run(&op, (count, 1, width), (at, table.dtype()), Some(numbers), None)?.squeeze(1)?)
}

fn run(
    op: &Op,
    (tokens, heads, width): (usize, usize, usize),
    (x, dtype): (*mut u8, DType),
    slots: Option<&Tensor>,
    turns: Option<&Turns>,
) -> Result<Tensor> {
    op.check(width.is_multiple_of(2), "x", format_args!("{width} wide"), "an even width")?;
    let out = op.empty((tokens, heads, width), DType::F32)?;
    let [cos, sin] = Turns::at(turns, op, tokens, width)?;
    let p = TaperRowsParams {
        x: x.cast_const().cast(),
        slots: op.maybe("slots", slots, DType::U32, [tokens])?,
        cos,
        sin,
        out: op.at("out", &out, DType::F32, [tokens, heads, width])?,
        tokens: op.int("x", tokens)?,
        heads: op.int("x", heads)?,
        width: op.int("x", width)?,
        dtype: if dtype == DType::F32 { ffi::TAPER_BF16 } else { op.dtype("x", dtype)? },
        x_f32: (dtype == DType::F32).into(),
    };
    // SAFETY: every address was checked against the shapes given beside it; slots are the caller's, of its cache.
    unsafe { op.launch(ffi::taper_rows, &p) }?;
    Ok(out)
}

/// One layer.
#[derive(Clone, Copy)]
pub struct Layer<'a> {
    /// `[maps, outputs, inputs]`, f32, or bf16 of inputs in eights.
    pub weight: &'a Tensor,
    /// `[maps, outputs]`, f32.
    pub bias: Option<&'a Tensor>,
    /// What products are multiplied by before the bias.
    pub scale: f32,
    /// What comes after it.
    pub activation: Option<Activation>,
    /// f32 or bf16.
    pub out: DType,
}

/// What a layer makes of rows `x` `[T, x_heads, inputs]`, f32, bf16 or f16, which it turns back first, for `heads` heads, a multiple
/// of both the maps and `x_heads`: neighbours share them: `[T, heads, outputs]`.
///
/// # Errors
/// Shapes that do not fit.
pub fn project(x: &Tensor, turns: Option<&Turns>, heads: usize, layer: &Layer) -> Result<Lent> {
    let op = Op::new("project", "x", x)?;
    let ((rows, x_heads, inputs), (maps, outputs, _)) = (x.dims3()?, layer.weight.dims3()?);
    let fits = maps > 0 && x_heads > 0 && heads.is_multiple_of(maps) && heads.is_multiple_of(x_heads);
    op.check(fits, "heads", heads, format_args!("a multiple of {maps} maps and {x_heads} heads"))?;
    op.check(matches!(layer.out, DType::F32 | DType::BF16), "out", format_args!("{:?}", layer.out), "f32 or bf16")?;
    let weights = layer.weight.dtype();
    let fits = weights == DType::F32 || (weights == DType::BF16 && inputs.is_multiple_of(8));
    op.check(fits, "weight", format_args!("{weights:?} of {inputs} inputs"), "f32, or bf16 of inputs in eights")?;
    let out = op.lent((rows, heads, outputs), layer.out)?;
    let [cos, sin] = Turns::at(turns, &op, rows, inputs)?;
    let x_f32 = x.dtype() == DType::F32;
    let p = TaperProjectParams {
        x: op.at::<u8>("x", x, x.dtype(), [rows, x_heads, inputs])?.cast_const().cast(),
        cos,
        sin,
        weight: op.at::<u8>("weight", layer.weight, weights, [maps, outputs, inputs])?.cast_const().cast(),
        bias: op.maybe("bias", layer.bias, DType::F32, [maps, outputs])?,
        out: op.at::<u8>("out", &out, layer.out, [rows, heads, outputs])?.cast(),
        rows: op.int("x", rows)?,
        heads: op.int("heads", heads)?,
        x_heads: op.int("x", x_heads)?,
        maps: op.int("weight", maps)?,
        inputs: op.int("x", inputs)?,
        outputs: op.int("weight", outputs)?,
        activation: match layer.activation {
            None => ffi::TAPER_LINEAR,
            Some(Activation::Relu) => ffi::TAPER_RELU,
            Some(Activation::Silu) => ffi::TAPER_SILU,
        },
        bf16: (layer.out == DType::BF16).into(),
        scale: layer.scale,
        weight_bf16: (weights == DType::BF16).into(),
        dtype: if x_f32 { ffi::TAPER_BF16 } else { op.dtype("x", x.dtype())? },
        x_f32: x_f32.into(),
        // New keys' clusters are nothing that it reads.
        fresh: renewing().into(),
        ..TaperProjectParams::zeroed()
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_project, &p) }?;
    Ok(out)
}

/// Of each query `[R, q_heads, head_dim]`, bf16 or f16, the channels `[kv_heads, width]`, u32, of its KV head: `[R, q_heads,
/// width]`.
///
/// # Errors
/// Shapes that do not fit.
pub fn channels(q: &Tensor, channels: &Tensor) -> Result<Tensor> {
    let op = Op::new("channels", "q", q)?;
    let ((rows, q_heads, head_dim), (kv_heads, width)) = (q.dims3()?, channels.dims2()?);
    op.check(kv_heads > 0 && q_heads.is_multiple_of(kv_heads), "channels", kv_heads, format_args!("{q_heads} heads"))?;
    op.dtype("q", q.dtype())?;
    let out = op.empty((rows, q_heads, width), q.dtype())?;
    let p = TaperChannelsParams {
        q: op.at::<u8>("q", q, q.dtype(), [rows, q_heads, head_dim])?.cast_const().cast(),
        channels: op.at("channels", channels, DType::U32, [kv_heads, width])?,
        out: op.at::<u8>("out", &out, q.dtype(), [rows, q_heads, width])?.cast(),
        rows: op.int("q", rows)?,
        q_heads: op.int("q", q_heads)?,
        kv_heads: op.int("channels", kv_heads)?,
        head_dim: op.int("q", head_dim)?,
        width: op.int("channels", width)?,
    };
    // SAFETY: every address was checked against the shapes given beside it.
    unsafe { op.launch(ffi::taper_channels, &p) }?;
    Ok(out)
}
