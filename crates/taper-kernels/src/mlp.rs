//! A small perceptron: what learned predictors are made of.

use crate::simd::{Isa, Simd, dispatch, dot};
use candle_core::{Result, bail};

/// What stands between two layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// max(x, 0).
    Relu,
    /// x / (1 + exp(−x)).
    Silu,
}

/// Linear layers with an activation between them and none at the end.
#[derive(Debug, Clone)]
pub struct Mlp {
    layers: Vec<Dense>,
    activation: Activation,
}

#[derive(Debug, Clone)]
struct Dense {
    /// `[outputs, inputs]`.
    weight: Vec<f32>,
    bias: Vec<f32>,
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
                x.iter_mut().for_each(|x| *x = self.activation.of(*x));
            }
            let mut out = vec![0f32; rows * layer.bias.len()];
            let (from, to) = (x.as_slice(), out.as_mut_slice());
            dispatch!(isa, apply::<_>(layer: &Dense, from: &[f32], to: &mut [f32]));
            x = out;
        }
        x
    }
}

/// One layer; every weight is read once for all rows.
#[inline(always)]
unsafe fn apply<V: Simd>(layer: &Dense, from: &[f32], to: &mut [f32]) {
    let (inputs, outputs) = (layer.inputs(), layer.bias.len());
    for (o, (weight, bias)) in layer.weight.chunks_exact(inputs).zip(&layer.bias).enumerate() {
        for (row, x) in from.chunks_exact(inputs).enumerate() {
            to[row * outputs + o] = unsafe { dot::<V>(weight, x) } + bias;
        }
    }
}

impl Dense {
    fn inputs(&self) -> usize {
        self.weight.len() / self.bias.len()
    }
}

impl Activation {
    fn of(self, x: f32) -> f32 {
        match self {
            Self::Relu => x.max(0.0),
            Self::Silu => x / (1.0 + (-x).exp()),
        }
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
        for bad in [vec![], vec![(vec![1.0; 3], vec![0.0; 2])], vec![layers().remove(0), (vec![1.0; 3], vec![0.0])]] {
            assert!(Mlp::new(bad, Activation::Relu).is_err());
        }
    }
}
