//! A small perceptron: what learned predictors are made of.

use crate::lent::Lent;
use crate::parallel::{self, SharedMut};
use crate::rotary::{self, Rotation};
use crate::simd::{Isa, Simd, dispatch, dot, exp_line, prefetch};
use candle_core::{Result, Tensor, bail};
use std::mem::MaybeUninit;
use std::ops::Range;

/// What stands between two layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// max(x, 0).
    Relu,
    /// x / (1 + exp(−x)).
    Silu,
}

/// What a layer has for each of its heads, KV or query heads.
#[derive(Debug)]
pub struct PerHead<M> {
    each: Vec<M>,
    /// A copy of all of them, side by side, on the device that first asked.
    #[cfg(feature = "cuda")]
    pub(crate) kept: crate::cuda::step::OnDevice,
}

impl<M> From<Vec<M>> for PerHead<M> {
    fn from(each: Vec<M>) -> Self {
        Self {
            each,
            #[cfg(feature = "cuda")]
            kept: Default::default(),
        }
    }
}

impl<M> FromIterator<M> for PerHead<M> {
    fn from_iter<I: IntoIterator<Item = M>>(each: I) -> Self {
        each.into_iter().collect::<Vec<_>>().into()
    }
}

impl<M> std::ops::Deref for PerHead<M> {
    type Target = [M];

    fn deref(&self) -> &[M] {
        &self.each
    }
}

/// Linear layers with an activation between them and none at the end.
#[derive(Debug, Clone)]
pub struct Mlp {
    pub(crate) layers: Vec<Dense>,
    pub(crate) activation: Activation,
}

#[derive(Debug, Clone)]
pub(crate) struct Dense {
    /// `[outputs, inputs]`.
    pub weight: Vec<f32>,
    pub bias: Vec<f32>,
}

impl Mlp {
    /// From each layer's weight `[outputs, inputs]` and bias `[outputs]`, first layer first.
    ///
    /// # Errors
    /// No layer, or one that does not fit the one before.
    pub fn new(layers: Vec<(Vec<f32>, Vec<f32>)>, activation: Activation) -> Result<Self> {
        let layers: Vec<Dense> = layers.into_iter().map(|(weight, bias)| Dense { weight, bias }).collect();
        let whole =
            |l: &Dense| !l.bias.is_empty() && !l.weight.is_empty() && l.weight.len().is_multiple_of(l.bias.len());
        let follows = |pair: &[Dense]| pair[1].inputs() == pair[0].bias.len();
        if layers.is_empty() || !layers.iter().all(whole) || !layers.windows(2).all(follows) {
            let sizes: Vec<_> = layers.iter().map(|l| (l.weight.len(), l.bias.len())).collect();
            bail!("mlp: layers of (weights, biases) {sizes:?} do not fit each other");
        }
        Ok(Self { layers, activation })
    }

    /// Width of what goes in.
    pub fn inputs(&self) -> usize {
        self.layers[0].inputs()
    }

    /// Width of what comes out.
    pub fn outputs(&self) -> usize {
        self.layers[self.layers.len() - 1].bias.len()
    }

    /// The outputs `[rows, outputs]` for `x` `[rows, inputs]`.
    pub fn forward(&self, x: &[f32]) -> Vec<f32> {
        let rows = x.len() / self.inputs();
        let isa = Isa::best();
        let mut x = x.to_vec();
        for (i, layer) in self.layers.iter().enumerate() {
            if i > 0 {
                let x = x.as_mut_slice();
                match self.activation {
                    Activation::Relu => x.iter_mut().for_each(|x| *x = x.max(0.0)),
                    Activation::Silu => dispatch!(isa, silu::<_>(x: &mut [f32])),
                }
            }
            let mut out = vec![0f32; rows * layer.bias.len()];
            let (from, to) = (x.as_slice(), SharedMut::new(&mut out));
            let span = (SPAN_WEIGHTS / layer.inputs()).max(1).next_multiple_of(4);
            parallel::for_each(
                layer.bias.len().div_ceil(span),
                || (),
                |(), i| {
                    let outputs = i * span..layer.bias.len().min((i + 1) * span);
                    dispatch!(isa, apply::<_>(layer: &Dense, outputs: Range<usize>, from: &[f32], to: SharedMut<f32>));
                },
            );
            x = out;
        }
        x
    }
}

/// Runs the queries `[R, q_heads, inputs]`, f32 or, on a device, 16 bits, of each KV head through its own of `mlps` `[kv_heads]`:
/// `[R, q_heads, outputs]`; with `turns` `[R]` as they were before the rotary embedding. A device keeps weights of inputs in eights
/// in bf16, and sums in f32.
///
/// # Errors
/// Shapes that differ.
pub fn per_head(mlps: &PerHead<Mlp>, q: &Tensor, turns: Option<&[Rotation]>) -> Result<Lent> {
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        rotary::fit(q, turns)?;
        return Ok(crate::cuda::step::per_head(mlps, q, turns)?);
    }
    Ok(for_kv_heads(&rotary::undo(q, turns)?, mlps, Mlp::inputs, Mlp::outputs, Mlp::forward)?.into())
}

/// Maps the queries `[R, q_heads, d]` of each KV head by its own of `maps`; widths must be equal.
pub(crate) fn for_kv_heads<M: Sync>(
    q: &Tensor,
    maps: &[M],
    inputs: impl Fn(&M) -> usize,
    outputs: impl Fn(&M) -> usize,
    map: impl Fn(&M, &[f32]) -> Vec<f32> + Sync,
) -> Result<Tensor> {
    let (rows, q_heads, d) = q.dims3()?;
    let width = maps.first().map_or(0, &outputs);
    if width == 0 || !q_heads.is_multiple_of(maps.len()) || maps.iter().any(|m| inputs(m) != d || outputs(m) != width) {
        bail!("queries {:?} for {} maps, or maps of other widths", q.shape(), maps.len());
    }
    let each = q_heads / maps.len() * d;
    let queries = q.flatten_all()?.to_vec1::<f32>()?;
    let parts = parallel::map(rows * maps.len(), |i| map(&maps[i % maps.len()], &queries[i * each..][..each]));
    Tensor::from_vec(parts.concat(), (rows, q_heads, width), q.device())
}

/// Weights of one layer that one thread works on at a time: fewer are not worth another thread.
const SPAN_WEIGHTS: usize = 16 << 10;
/// Weights that are asked for ahead: what is read once comes no faster than it is asked for.
const AHEAD_WEIGHTS: usize = 1 << 10;

/// Some outputs of one layer, the first a multiple of four; every weight is read once for all rows. Four outputs are summed
/// beside each other.
///
/// # Safety
/// `V`'s instruction set exists; `to` covers `[rows, outputs]`, and nobody else writes these outputs.
#[inline(always)]
unsafe fn apply<V: Simd>(layer: &Dense, some: Range<usize>, from: &[f32], to: SharedMut<f32>) {
    let (inputs, outputs) = (layer.inputs(), layer.bias.len());
    let whole = inputs - inputs % V::LANES;
    let of = some.start * inputs..some.end * inputs;
    let fours = layer.weight[of].chunks(4 * inputs).zip(layer.bias[some.clone()].chunks(4));
    for (o, (weights, biases)) in some.step_by(4).zip(fours) {
        prefetch(weights.as_ptr().wrapping_add(AHEAD_WEIGHTS), weights.len());
        for (row, x) in from.chunks_exact(inputs).enumerate() {
            let to = unsafe { to.slice(row * outputs + o, biases.len()) };
            if biases.len() < 4 {
                let rows = weights.chunks_exact(inputs).zip(biases);
                to.iter_mut().zip(rows).for_each(|(to, (w, bias))| *to = unsafe { dot::<V>(w, x) } + bias);
                continue;
            }
            let mut sums = [unsafe { V::splat(0.0) }; 4];
            for c in (0..whole).step_by(V::LANES) {
                unsafe {
                    let x = V::load(x.as_ptr().add(c));
                    for (i, sum) in sums.iter_mut().enumerate() {
                        *sum = V::load(weights.as_ptr().add(i * inputs + c)).mul_add(x, *sum);
                    }
                }
            }
            let sums = unsafe { V::sum4(sums) };
            for (i, (to, sum)) in to.iter_mut().zip(sums).enumerate() {
                *to = sum + (whole..inputs).map(|c| weights[i * inputs + c] * x[c]).sum::<f32>() + biases[i];
            }
        }
    }
}

/// x / (1 + exp(−x)), from exponentials of what is not positive.
#[inline(always)]
unsafe fn silu<V: Simd>(x: &mut [f32]) {
    let mut below: Vec<f32> = x.iter().map(|x| -x.abs()).collect();
    unsafe { exp_line::<V>(&mut below, 0.0) };
    x.iter_mut().zip(below).for_each(|(x, e)| *x = silu_by(*x, e));
}

/// silu(x) by e = exp(−|x|).
#[inline(always)]
fn silu_by(x: f32, e: f32) -> f32 {
    x * if x < 0.0 { e } else { 1.0 } / (1.0 + e)
}

/// silu(gate) · up, element by element, where silu(x) = x / (1 + exp(−x)).
pub(crate) fn silu_mul(gate: &[f32], up: &[f32], out: &mut [MaybeUninit<f32>]) {
    dispatch!(Isa::best(), gated::<_>(gate: &[f32], up: &[f32], out: &mut [MaybeUninit<f32>]));
}

#[inline(always)]
unsafe fn gated<V: Simd>(gate: &[f32], up: &[f32], out: &mut [MaybeUninit<f32>]) {
    let n = out.len();
    let (gate, up) = (&gate[..n], &up[..n]);
    for i in 0..n {
        out[i].write(-gate[i].abs());
    }
    // SAFETY: all of it was written.
    let out = unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<f32>(), n) };
    unsafe { exp_line::<V>(out, 0.0) };
    for i in 0..n {
        out[i] = silu_by(gate[i], out[i]) * up[i];
    }
}

impl Dense {
    fn inputs(&self) -> usize {
        self.weight.len() / self.bias.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_follow_each_other_and_must_fit() {
        let layers = || vec![(vec![1., 2., -3., 4.], vec![0.5, -1.]), (vec![2., 10.], vec![1.])];
        let mlp = Mlp::new(layers(), Activation::Relu).unwrap();
        assert_eq!((mlp.inputs(), mlp.outputs()), (2, 1));
        // First layer: 1 + 2 + 0.5 = 3.5 and −3 + 4 − 1 = 0.
        assert_eq!(mlp.forward(&[1., 1.]), [8.0]);
        // −3 − 4 − 1 = −8 is cut off; SiLU lets a little of it through.
        let silu = Mlp::new(layers(), Activation::Silu).unwrap().forward(&[1., -1.])[0];
        let of = |x: f32| x / (1.0 + (-x).exp());
        assert!((silu - (1.0 + 2.0 * of(-0.5) + 10.0 * of(-8.0))).abs() < 1e-5, "{silu}");
        let q = Tensor::new(&[[[1f32, 1.], [1., -1.], [2., 0.], [0., 2.]]], &candle_core::Device::Cpu).unwrap();
        let other = Mlp::new(vec![(vec![1., 0.], vec![0.])], Activation::Relu).unwrap();
        let both = per_head(&vec![mlp.clone(), other].into(), &q, None)
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap();
        assert_eq!(both, [mlp.forward(&[1., 1., 1., -1.]), vec![2.0, 0.0]].concat());
        let three = vec![mlp.clone(), mlp.clone(), mlp.clone()];
        assert!(per_head(&Vec::new().into(), &q, None).is_err() && per_head(&three.into(), &q, None).is_err());
        for bad in [vec![], vec![(vec![1.0; 3], vec![0.0; 2])], vec![layers().remove(0), (vec![1.0; 3], vec![0.0])]] {
            assert!(Mlp::new(bad, Activation::Relu).is_err());
        }
    }
}
