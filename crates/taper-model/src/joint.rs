//! The forward pass on a CUDA device with 16-bit weights: normalisation, activation and the residual sum are part of the
//! products that they stand beside, rotation and storing are one operation.

use crate::model::{Layer, Model};
use candle_core::{DType, Result, Tensor};
use taper_attention::LayerAttention;
use taper_kernels::cuda::{Inputs, product, product_add, product_gated, product_into};
use taper_kernels::linear::Linear;

/// One layer's matrices `[out, in]`.
struct Matrices<'a> {
    qkv: &'a Tensor,
    output: &'a Tensor,
    gate_up: &'a Tensor,
    down: &'a Tensor,
}

/// A product's weight, where it is one 16-bit matrix on a CUDA device whose sides are multiples of 8.
pub(crate) fn matrix(linear: &Linear) -> Option<&Tensor> {
    match linear {
        Linear::Dense(weight) if weight.device().is_cuda() && weight.dtype().size_in_bytes() == 2 => {
            weight.dims().iter().all(|side| side.is_multiple_of(8)).then_some(weight)
        }
        _ => None,
    }
}

impl<'a> Matrices<'a> {
    fn of(layer: &'a Layer) -> Option<Self> {
        let one = |linears: &'a [Linear]| match linears {
            [joint] => matrix(joint),
            _ => None,
        };
        Some(Self {
            qkv: one(&layer.qkv)?,
            output: matrix(&layer.output)?,
            gate_up: one(&layer.gate_up)?,
            down: matrix(&layer.down)?,
        })
    }
}

/// Runs all layers over `x` `[T, hidden]`, f32, in place, with each token's `angles` `[T, head_dim]`, f32. False, and
/// nothing is done, where weights or attention are not made for it.
///
/// # Errors
/// Whatever `attention` or the device says.
pub(crate) fn run(model: &Model, x: &Tensor, angles: &Tensor, attention: &mut dyn LayerAttention) -> Result<bool> {
    let Some(layers) = model.layers.iter().map(Matrices::of).collect::<Option<Vec<_>>>() else { return Ok(false) };
    let epsilon = model.config().rms_norm_eps as f32;
    // All layers' projections go to the same memory.
    let mut joint: Option<Tensor> = None;
    for (index, (layer, of)) in model.layers.iter().zip(layers).enumerate() {
        let normed = |weight| Inputs { x, norm: Some((weight, epsilon)) };
        let qkv = match joint.take() {
            None => product(normed(&layer.attention_norm), of.qkv, of.qkv.dtype())?,
            Some(room) => {
                product_into(normed(&layer.attention_norm), of.qkv, &room)?;
                room
            }
        };
        let Some(attended) = attention.attend_joint(index, &qkv, angles)? else {
            if index == 0 {
                return Ok(false);
            }
            candle_core::bail!("attention took joint projections in layer 0, and not in layer {index}");
        };
        product_add(Inputs { x: &attended.flatten_from(1)?, norm: None }, of.output, x)?;
        let inner = product_gated(normed(&layer.feed_forward_norm), of.gate_up)?;
        product_add(Inputs { x: &inner, norm: None }, of.down, x)?;
        joint = Some(qkv);
    }
    Ok(true)
}

/// The scores of every token of the vocabulary for `hidden` `[R, hidden]`, f32: sums in f32 are not rounded on their way.
///
/// # Errors
/// candle's shape and device errors.
pub(crate) fn logits(head: &Tensor, hidden: &Tensor) -> Result<Tensor> {
    Ok(product(Inputs { x: hidden, norm: None }, head, DType::F32)?)
}
