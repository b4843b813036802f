//! What queries and keys go through before they are compared, in f32 as on the CPU: perceptrons, centroids, the rotary
//! embedding taken off. Single rows go by operations whose results depend on no other row, and so steps do; whole
//! blocks of a prompt by candle's products.

use crate::cuda::error::Result;
use crate::cuda::op::Op;
use crate::cuda::project::{self as kernels, Layer, Turns};
use crate::index::clusters::Centroids;
use crate::lent::Lent;
use crate::mlp::{Activation, Mlp, PerHead};
use crate::parallel;
use crate::rotary::{Rotation, Rotations};
use candle_core::{DType, Device, Tensor};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Tensors on the device that first asked for them.
#[derive(Debug, Default)]
pub(crate) struct OnDevice(OnceLock<(Device, Vec<Tensor>)>);

impl OnDevice {
    /// What `make` gives, made once for one device, and each time for others.
    fn get(&self, device: &Device, make: impl Fn() -> Result<Vec<Tensor>>) -> Result<Vec<Tensor>> {
        match self.0.get() {
            Some((on, tensors)) if on.same_device(device) => Ok(tensors.clone()),
            Some(_) => make(),
            None => {
                let tensors = make()?;
                Ok(self.0.get_or_init(|| (device.clone(), tensors.clone())).1.clone())
            }
        }
    }
}

/// Rows on their way through perceptrons.
pub(super) enum Rows<'a> {
    /// Single ones `[T, x_heads, inputs]`, f32, bf16 or f16, and turns `[T]` that are taken off them first.
    Single(&'a Tensor, Option<&'a [Rotation]>),
    /// Those of whole blocks, f32.
    Whole(&'a Tensor),
}

/// What all of `maps` make of rows for `heads` heads: `[T, heads, outputs]`, f32 or bf16. Weights are kept as f32, or as bf16
/// where inputs come in eights.
pub(super) fn forward(
    op: &Op,
    (maps, weights): (&PerHead<Mlp>, DType),
    rows: Rows,
    heads: usize,
    out: DType,
) -> Result<Lent> {
    let Some(first) = maps.first() else { return Err(op.error("maps", 0, "at least one")) };
    let shape = |map: &Mlp| map.layers.iter().map(|l| (l.weight.len(), l.bias.len())).collect::<Vec<_>>();
    let alike = maps.iter().all(|map| shape(map) == shape(first) && map.activation == first.activation);
    op.check(alike, "maps", "of different widths", "perceptrons of one shape")?;
    let kept_as = |inputs: usize| if inputs.is_multiple_of(8) { weights } else { DType::F32 };
    // Weights `[maps, outputs, inputs]`, then biases `[maps, outputs]`, layer after layer.
    let tensors = maps.kept.get(&op.device, || {
        let mut tensors = Vec::new();
        for (depth, layer) in first.layers.iter().enumerate() {
            let (outputs, inputs) = (layer.bias.len(), layer.weight.len() / layer.bias.len());
            let all = |of: fn(&crate::mlp::Dense) -> &[f32]| -> Vec<f32> {
                maps.iter().map(|map| of(&map.layers[depth])).collect::<Vec<_>>().concat()
            };
            let weight = op.upload(&all(|layer| &layer.weight), [maps.len(), outputs, inputs])?;
            tensors.push(weight.to_dtype(kept_as(inputs))?);
            tensors.push(op.upload(&all(|layer| &layer.bias), [maps.len(), outputs])?);
        }
        Ok(tensors)
    })?;
    let is_so =
        tensors.iter().step_by(2).all(|weight| weight.dim(2).is_ok_and(|inputs| weight.dtype() == kept_as(inputs)));
    op.check(is_so, "maps", "kept in another type", format_args!("used in {weights:?} alone"))?;
    let (mut x, mut turns, single) = match rows {
        Rows::Single(x, turns) => (Lent::from(whole(op, x)?), on_device(op, x, turns)?, true),
        Rows::Whole(x) => {
            op.apart()?;
            (by_map(x, heads, maps.len())?.into(), None, false)
        }
    };
    let last = first.layers.len() - 1;
    for (depth, layer) in tensors.chunks_exact(2).enumerate() {
        let activation = (depth < last).then_some(first.activation);
        let (weight, bias) = (&layer[0], &layer[1]);
        if single {
            let out = if depth < last { DType::F32 } else { out };
            let layer = Layer { weight, bias: Some(bias), scale: 1.0, activation, out };
            let turned = turns.take();
            x = kernels::project(&x, turned.as_ref(), heads, &layer)?;
            continue;
        }
        let sums = x.matmul(&weight.t()?)?.broadcast_add(&bias.unsqueeze(1)?)?;
        x = match activation {
            None => sums,
            Some(Activation::Relu) => sums.relu()?,
            Some(Activation::Silu) => sums.silu()?,
        }
        .into();
    }
    if single { Ok(x) } else { Ok(by_row(&x, heads)?.to_dtype(out)?.into()) }
}

/// Itself, or a contiguous copy.
fn whole(op: &Op, x: &Tensor) -> Result<Tensor> {
    if x.is_contiguous() {
        return Ok(x.clone());
    }
    op.apart()?;
    Ok(x.contiguous()?)
}

/// Turns of rows `x` `[T, heads, width]` on the device.
fn on_device(op: &Op, x: &Tensor, of: Option<&[Rotation]>) -> Result<Option<Turns>> {
    of.map(|of| turns(op, [of.len(), x.dim(2)?], |row| of[row].clone())).transpose()
}

/// Rows `[T, x_heads, width]`, f32, by the map of each of `heads` heads: `[maps, heads / maps * T, width]`.
fn by_map(x: &Tensor, heads: usize, maps: usize) -> Result<Tensor> {
    let (rows, x_heads, width) = x.dims3()?;
    let of = x.transpose(0, 1)?.unsqueeze(1)?.expand((x_heads, heads / x_heads, rows, width))?.contiguous()?;
    Ok(of.reshape((maps, heads / maps * rows, width))?)
}

/// The same back: `[T, heads, width]`.
fn by_row(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (maps, each, width) = x.dims3()?;
    Ok(x.reshape((heads, maps * each / heads, width))?.transpose(0, 1)?.contiguous()?)
}

/// [`crate::mlp::per_head`], with weights in bf16: they are most of what a step of SAAP reads besides keys.
pub(crate) fn per_head(maps: &PerHead<Mlp>, q: &Tensor, turns: Option<&[Rotation]>) -> Result<Lent> {
    let op = Op::new("per_head", "q", q)?;
    let (_, q_heads, d) = q.dims3()?;
    let fits = !maps.is_empty() && q_heads.is_multiple_of(maps.len()) && maps.iter().all(|map| map.inputs() == d);
    op.check(fits, "q", format_args!("{:?}", q.dims()), format_args!("queries for {} perceptrons", maps.len()))?;
    forward(&op, (maps, DType::BF16), Rows::Single(q, turns), q_heads, DType::F32)
}

/// The centroids of all KV heads `[kv_heads, clusters, d]`, f32.
pub(super) fn centroids(op: &Op, of: &PerHead<Centroids>) -> Result<Tensor> {
    let Some((clusters, d)) = of.first().map(|c| (c.clusters(), c.dim())) else {
        return Err(op.error("centroids", 0, "those of at least one head"));
    };
    let alike = of.iter().all(|c| (c.clusters(), c.dim()) == (clusters, d));
    op.check(alike, "centroids", "of different numbers", "as many for each head")?;
    let mut tensors = of.kept.get(&op.device, || {
        let all = of.iter().map(|c| c.transposed.as_slice()).collect::<Vec<_>>().concat();
        let padded = all.len() / (of.len() * d);
        let transposed = op.upload(&all, [of.len(), d, padded])?.narrow(2, 0, clusters)?;
        Ok(vec![transposed.transpose(1, 2)?.contiguous()?])
    })?;
    Ok(tensors.swap_remove(0))
}

/// [`crate::index::clusters::products`].
pub(crate) fn products(of: &PerHead<Centroids>, q: &Tensor, turns: Option<&[Rotation]>) -> Result<Lent> {
    let op = Op::new("products", "q", q)?;
    let (_, q_heads, d) = q.dims3()?;
    let centroids = centroids(&op, of)?;
    let fits = q_heads.is_multiple_of(of.len()) && centroids.dim(2)? == d;
    op.check(fits, "q", format_args!("{:?}", q.dims()), format_args!("queries for centroids of {} heads", of.len()))?;
    let layer = Layer { scale: 1.0 / (d as f32).sqrt(), ..raw(&centroids) };
    let turns = on_device(&op, q, turns)?;
    kernels::project(&whole(&op, q)?, turns.as_ref(), q_heads, &layer)
}

/// Products of keys `[T, kv_heads, d]`, f32, of whole blocks with their head's centroids: `[kv_heads, T, clusters]`.
pub(super) fn key_products(op: &Op, of: &PerHead<Centroids>, keys: &Tensor) -> Result<Tensor> {
    op.apart()?;
    Ok(keys.transpose(0, 1)?.contiguous()?.matmul(&centroids(op, of)?.t()?)?)
}

fn raw(weight: &Tensor) -> Layer<'_> {
    Layer { weight, bias: None, scale: 1.0, activation: None, out: DType::F32 }
}

/// Rows whose turns a thread makes at a time.
const ROWS_AT_ONCE: usize = 256;

/// Turns of so many rows of `width` numbers on the device.
fn turns(op: &Op, [rows, width]: [usize; 2], of: impl Fn(usize) -> Rotation + Sync) -> Result<Turns> {
    let half = width / 2;
    let parts: Vec<[Vec<f32>; 2]> = parallel::map(rows.div_ceil(ROWS_AT_ONCE), |unit| {
        let rows = unit * ROWS_AT_ONCE..rows.min((unit + 1) * ROWS_AT_ONCE);
        let turns: Vec<Rotation> = rows.map(&of).collect();
        let part = |of: fn(&(f32, f32)) -> f32| turns.iter().flat_map(|turn| turn.0.iter().map(of)).collect();
        [part(|t| t.0), part(|t| t.1)]
    });
    let part = |which: usize| {
        let all = parts.iter().map(|part| part[which].as_slice()).collect::<Vec<_>>().concat();
        op.check(all.len() == rows * half, "turns", "of another width", format_args!("{half} pairs"))?;
        op.kept(&all, [rows, half])
    };
    Ok(Turns { cos: part(0)?, sin: part(1)? })
}

/// Turns of whole blocks' tokens on the device, by their positions: all layers of a step take in the same ones.
#[derive(Debug, Default)]
pub(crate) struct KeptTurns(Mutex<Vec<(Vec<usize>, Turns)>>);

/// The turns of tokens at these positions, `width` numbers each. Those of whole blocks, which have no tape, are kept.
pub(super) fn turns_at(op: &Op, of: &Rotations, (positions, width): (&[usize], usize), whole: bool) -> Result<Turns> {
    let make = || turns(op, [positions.len(), width], |row| of.at(positions[row]));
    if !whole {
        return make();
    }
    let mut kept = of.kept.0.lock().unwrap_or_else(PoisonError::into_inner);
    let same = |(known, turns): &&(Vec<usize>, Turns)| known == positions && turns.cos.device().same_device(&op.device);
    if let Some((_, turns)) = kept.iter().find(same) {
        return Ok(turns.clone());
    }
    op.apart()?;
    let made = make()?;
    kept.push((positions.to_vec(), made.clone()));
    Ok(made)
}
