//! What queries and keys go through before they are compared, in f32 as on the CPU: perceptrons, centroids, the rotary
//! embedding taken off. By candle's own operations.

use crate::cuda::error::Result;
use crate::cuda::op::Op;
use crate::index::clusters::Centroids;
use crate::mlp::{Activation, Mlp, PerHead};
use crate::rotary::Rotation;
use candle_core::{D, DType, Device, Tensor};
use std::sync::OnceLock;

/// Tensors on the device that first asked for them.
#[derive(Debug, Default)]
pub(crate) struct Kept(OnceLock<(Device, Vec<Tensor>)>);

impl Kept {
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

/// What all of `maps` make of `x` `[maps, rows, inputs]`, f32: `[maps, rows, outputs]`.
pub(super) fn forward(op: &Op, maps: &PerHead<Mlp>, x: &Tensor) -> Result<Tensor> {
    let Some(first) = maps.first() else { return Err(op.error("maps", 0, "at least one")) };
    let shape = |map: &Mlp| map.layers.iter().map(|l| (l.weight.len(), l.bias.len())).collect::<Vec<_>>();
    let alike = maps.iter().all(|map| shape(map) == shape(first) && map.activation == first.activation);
    op.check(alike, "maps", "of different widths", "perceptrons of one shape")?;
    // Weights transposed `[maps, inputs, outputs]`, then biases `[maps, 1, outputs]`, layer after layer.
    let tensors = maps.kept.get(&op.device, || {
        let mut tensors = Vec::new();
        for (depth, layer) in first.layers.iter().enumerate() {
            let (outputs, inputs) = (layer.bias.len(), layer.weight.len() / layer.bias.len());
            let all = |of: fn(&crate::mlp::Dense) -> &[f32]| -> Vec<f32> {
                maps.iter().flat_map(|map| of(&map.layers[depth]).iter().copied()).collect()
            };
            let weight = op.upload(&all(|layer| &layer.weight), [maps.len(), outputs, inputs])?;
            tensors.push(weight.transpose(1, 2)?.contiguous()?);
            tensors.push(op.upload(&all(|layer| &layer.bias), [maps.len(), 1, outputs])?);
        }
        Ok(tensors)
    })?;
    let mut x = x.clone();
    for (i, layer) in tensors.chunks_exact(2).enumerate() {
        if i > 0 {
            x = match first.activation {
                Activation::Relu => x.relu()?,
                Activation::Silu => x.silu()?,
            };
        }
        x = x.matmul(&layer[0])?.broadcast_add(&layer[1])?;
    }
    Ok(x)
}

/// Queries `[R, q_heads, d]` by what has `maps` heads: `[maps, R * q_heads / maps, d]`.
fn by_head(q: &Tensor, maps: usize) -> Result<Tensor> {
    let (rows, q_heads, d) = q.dims3()?;
    let group = q_heads / maps;
    let q = q.to_dtype(DType::F32)?;
    Ok(q.reshape((rows, maps, group, d))?.transpose(0, 1)?.contiguous()?.reshape((maps, rows * group, d))?)
}

/// The same back: `[R, q_heads, width]` of `[maps, R * q_heads / maps, width]`.
fn by_row(x: &Tensor, rows: usize) -> Result<Tensor> {
    let (maps, each, width) = x.dims3()?;
    let x = x.reshape((maps, rows, each / rows, width))?.transpose(0, 1)?.contiguous()?;
    Ok(x.reshape((rows, maps * each / rows, width))?)
}

/// [`crate::mlp::per_head`].
pub(crate) fn per_head(maps: &PerHead<Mlp>, q: &Tensor) -> Result<Tensor> {
    let op = Op::new("per_head", "q", q)?;
    let (rows, q_heads, d) = q.dims3()?;
    let fits = !maps.is_empty() && q_heads.is_multiple_of(maps.len()) && maps.iter().all(|map| map.inputs() == d);
    op.check(fits, "q", format_args!("{:?}", q.dims()), format_args!("queries for {} perceptrons", maps.len()))?;
    by_row(&forward(&op, maps, &by_head(q, maps.len())?)?, rows)
}

/// The centroids of all KV heads `[kv_heads, d, clusters]`, f32.
pub(super) fn centroids(op: &Op, of: &PerHead<Centroids>) -> Result<Tensor> {
    let Some((clusters, d)) = of.first().map(|c| (c.clusters(), c.dim())) else {
        return Err(op.error("centroids", 0, "those of at least one head"));
    };
    let alike = of.iter().all(|c| (c.clusters(), c.dim()) == (clusters, d));
    op.check(alike, "centroids", "of different numbers", "as many for each head")?;
    let mut tensors = of.kept.get(&op.device, || {
        let all: Vec<f32> = of.iter().flat_map(|c| c.transposed.iter().copied()).collect();
        let padded = all.len() / (of.len() * d);
        Ok(vec![op.upload(&all, [of.len(), d, padded])?.narrow(2, 0, clusters)?.contiguous()?])
    })?;
    Ok(tensors.swap_remove(0))
}

/// [`crate::index::clusters::products`].
pub(crate) fn products(of: &PerHead<Centroids>, q: &Tensor) -> Result<Tensor> {
    let op = Op::new("products", "q", q)?;
    let (rows, q_heads, d) = q.dims3()?;
    let centroids = centroids(&op, of)?;
    let fits = q_heads.is_multiple_of(of.len()) && centroids.dim(1)? == d;
    op.check(fits, "q", format_args!("{:?}", q.dims()), format_args!("queries for centroids of {} heads", of.len()))?;
    let scaled = (by_head(q, of.len())?.matmul(&centroids)? / (d as f64).sqrt())?;
    by_row(&scaled, rows)
}

/// Rows `[.., turns, d]`, f32, turned back by the turn of each.
pub(super) fn turn_back(op: &Op, x: &Tensor, turns: &[Rotation]) -> Result<Tensor> {
    let half = x.dim(D::Minus1)? / 2;
    let fits = turns.iter().all(|turn| turn.0.len() == half);
    op.check(fits && x.dim(D::Minus2)? == turns.len(), "turns", turns.len(), format_args!("turns of {:?}", x.dims()))?;
    let part = |of: fn(&(f32, f32)) -> f32| {
        let all: Vec<f32> = turns.iter().flat_map(|turn| turn.0.iter().map(of)).collect();
        op.kept(&all, [turns.len(), half])
    };
    let (cos, sin) = (part(|t| t.0)?, part(|t| t.1)?);
    let (a, b) = (x.narrow(D::Minus1, 0, half)?, x.narrow(D::Minus1, half, half)?);
    let first = (a.broadcast_mul(&cos)? + b.broadcast_mul(&sin)?)?;
    let second = (b.broadcast_mul(&cos)? - a.broadcast_mul(&sin)?)?;
    Ok(Tensor::cat(&[first, second], D::Minus1)?)
}

/// [`crate::rotary::undo`], whose checks the caller has made.
pub(crate) fn undo(x: &Tensor, turns: &[Rotation]) -> Result<Tensor> {
    let op = Op::new("undo", "x", x)?;
    let x = x.to_dtype(DType::F32)?;
    Ok(turn_back(&op, &x.transpose(0, 1)?, turns)?.transpose(0, 1)?.contiguous()?)
}
