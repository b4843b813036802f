//! The forward pass on a CUDA device with 16-bit weights: normalisation, activation and the residual sum are part of the
//! products that they stand beside, rotation and storing are one operation.

use crate::model::{Layer, Model};
use candle_core::{DType, Result, Tensor};
use taper_attention::LayerAttention;
use taper_kernels::CUDA_HEAD_DIMS;
use taper_kernels::cuda::{
    AfterAttention, Inputs, PlainStep as PlainRows, RepeatedStep, after_attention, plain_step, product, repeated_step,
};
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
    let Some(layers) = matrices(model) else { return Ok(false) };
    let mut taken = false;
    layers_over(model, &layers, x, |index, qkv| {
        let attended = attention.attend_joint(index, qkv, angles)?;
        if attended.is_none() && index > 0 {
            candle_core::bail!("attention took joint projections in layer 0, and not in layer {index}");
        }
        taken = attended.is_some();
        Ok(attended)
    })?;
    Ok(taken)
}

/// The same by one call to the device, where this step's attention is plain and such a step has been before: returns
/// `[T, hidden]`, f32. None, and nothing is done, where not.
///
/// # Errors
/// Whatever `attention` or the device says.
pub(crate) fn replay(
    model: &Model,
    x: &Tensor,
    angles: &Tensor,
    attention: &mut dyn LayerAttention,
) -> Result<Option<Tensor>> {
    let Some(layers) = matrices(model) else { return Ok(None) };
    let Some(step) = attention.plain_step() else { return repeat(model, &layers, (x, angles), attention) };
    let (Some(kv), Some(of)) = (step.layers.first().copied(), layers.first()) else { return Ok(None) };
    let (q_heads, slots, rows) = (model.config().q_heads, step.slots, &step.rows[..]);
    // What `append_joint` has an operation for.
    let sixteen = kv.k.dtype().size_in_bytes() == 2 && CUDA_HEAD_DIMS.contains(&kv.k.dim(3)?);
    if !sixteen || rows.len() != x.dim(0)? {
        return Ok(None);
    }
    let (selection, weight) = (step.selection.heads()?, of.qkv);
    let plain = PlainRows { x, angles, slots, rows, selection, kv, q_heads, weight };
    let out = plain_step(&plain, |inputs| {
        let mut plan = None;
        layers_over(model, &layers, &inputs.x, |index, qkv| {
            let kv = step.layers[index];
            Ok(Some(inputs.attend(kv, &inputs.append(kv, qkv)?, &mut plan, of.output.dtype())?))
        })
    })?;
    drop(step);
    if out.is_some() {
        attention.attended()?;
    }
    Ok(out)
}

/// The same where this step's attention says that it repeats itself, and such a step has been before: all layers are
/// gone through, but what they queue is queued by a few calls.
fn repeat(
    model: &Model,
    layers: &[Matrices],
    (x, angles): (&Tensor, &Tensor),
    attention: &mut dyn LayerAttention,
) -> Result<Option<Tensor>> {
    let (Some(repeats), Some(of)) = (attention.repeats(), layers.first()) else { return Ok(None) };
    let step = RepeatedStep { x, angles, kind: repeats.kind, k: &repeats.k, weight: of.qkv };
    Ok(repeated_step(&step, |x, angles| {
        layers_over(model, layers, x, |index, qkv| match attention.attend_joint(index, qkv, angles)? {
            Some(attended) => Ok(Some(attended)),
            None => candle_core::bail!("attention that repeats itself takes no joint projections in layer {index}"),
        })
    })?)
}

fn matrices(model: &Model) -> Option<Vec<Matrices<'_>>> {
    model.layers.iter().map(Matrices::of).collect()
}

/// Runs all layers over `x` in place. `attend` takes a layer's projections and gives the outputs of its heads; none ends it.
fn layers_over(
    model: &Model,
    layers: &[Matrices],
    x: &Tensor,
    mut attend: impl FnMut(usize, &Tensor) -> Result<Option<Tensor>>,
) -> Result<()> {
    let mut joint: Option<Tensor> = None;
    for (index, (layer, of)) in model.layers.iter().zip(layers).enumerate() {
        let qkv = match joint.take() {
            Some(qkv) => qkv,
            None => project(model, layer, of, x)?,
        };
        let Some(attended) = attend(index, &qkv)? else { return Ok(()) };
        // All layers' projections go to the same memory.
        let next = model.layers.get(index + 1).zip(layers.get(index + 1)).map(|(layer, of)| (layer, of.qkv, &qkv));
        finish(model, layer, of, x, &attended, next)?;
        joint = Some(qkv);
    }
    Ok(())
}

/// One layer's queries, keys and values side by side, of rows `x` `[T, hidden]`, f32.
fn project(model: &Model, layer: &Layer, of: &Matrices, x: &Tensor) -> Result<Tensor> {
    let inputs = Inputs { x, norm: Some(norm(model, &layer.attention_norm)) };
    Ok(product(inputs, of.qkv, of.qkv.dtype())?)
}

/// What a layer does with the outputs of its heads, to `x` in place; and, if it is given, the next layer's projections by its
/// weight, written over a tensor of their shape.
fn finish(
    model: &Model,
    layer: &Layer,
    of: &Matrices,
    x: &Tensor,
    attended: &Tensor,
    next: Option<(&Layer, &Tensor, &Tensor)>,
) -> Result<()> {
    let next = next.map(|(layer, weight, out)| (norm(model, &layer.attention_norm), weight, out));
    let norm = norm(model, &layer.feed_forward_norm);
    let of = AfterAttention { output: of.output, norm, gate_up: of.gate_up, down: of.down, next };
    Ok(after_attention(&attended.flatten_from(1)?, x, &of)?)
}

fn norm<'a>(model: &Model, weight: &'a Tensor) -> (&'a Tensor, f32) {
    (weight, model.config().rms_norm_eps as f32)
}

/// Rows' way into one layer: `[T, (q_heads + 2 kv_heads) head_dim]`, or none where the weights are not made for it.
///
/// # Errors
/// The device's.
pub(crate) fn begin(model: &Model, layer: &Layer, x: &Tensor) -> Result<Option<Tensor>> {
    Matrices::of(layer).map(|of| project(model, layer, &of, x)).transpose()
}

/// Their way out of it, from the outputs of its heads `[T, q_heads, head_dim]`, in place. False, and nothing is done, as of
/// [`begin`].
///
/// # Errors
/// The device's.
pub(crate) fn end(model: &Model, layer: &Layer, x: &Tensor, attended: &Tensor) -> Result<bool> {
    let Some(of) = Matrices::of(layer) else { return Ok(false) };
    finish(model, layer, &of, x, attended, None)?;
    Ok(true)
}

/// The scores of every token of the vocabulary for `hidden` `[R, hidden]`, f32, before the final norm: sums in f32 are not rounded on
/// their way.
///
/// # Errors
/// candle's shape and device errors.
pub(crate) fn logits(model: &Model, head: &Tensor, hidden: &Tensor) -> Result<Tensor> {
    Ok(product(Inputs { x: hidden, norm: Some(norm(model, &model.norm)) }, head, DType::F32)?)
}
