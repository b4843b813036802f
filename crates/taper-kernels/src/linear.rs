//! Matrix products of activations with a layer's weights, plain or quantised.
//!
//! A weight stays as it is: no step dequantises or widens it.

use crate::dense::Panels;
use crate::floats::with_floats;
use crate::packed::{Packed, block_bytes};
use candle_core::quantized::{QMatMul, QTensor};
use candle_core::{DType, Module, Result, Tensor, bail};
use std::sync::Arc;

/// The weight of a linear layer without bias, `y = x Wᵀ`.
#[derive(Debug, Clone)]
pub enum Linear {
    /// A float weight on the CPU, rearranged for this project's kernel; activations are f32.
    Panels(Arc<Panels>),
    /// A float weight on another device, `[out, in]`; activations must have its dtype.
    Dense(Tensor),
    /// A weight on the CPU of a type that [`block_bytes`] knows, rearranged for this project's kernel.
    Packed(Arc<Packed>),
    /// A quantised weight of another type, multiplied by candle.
    Quantized(QMatMul),
}

impl Linear {
    /// Wraps a float weight `[out, in]` (f32, f16 or bf16).
    ///
    /// # Errors
    /// A tensor that is no matrix, or on the CPU of another type.
    pub fn dense(weight: Tensor) -> Result<Self> {
        Ok(if weight.device().is_cpu() { Self::Panels(Arc::new(Panels::new(&weight)?)) } else { Self::Dense(weight) })
    }

    /// Wraps a quantised weight `[out, in]` without dequantising it.
    ///
    /// # Errors
    /// candle's error if the tensor is not a matrix.
    pub fn quantized(weight: Arc<QTensor>) -> Result<Self> {
        if weight.device().is_cpu() && block_bytes(weight.dtype()).is_some() {
            let (outputs, inputs) = weight.shape().dims2()?;
            if let Some(packed) = Packed::from_gguf(weight.dtype(), &weight.data()?, outputs, inputs) {
                return Ok(Self::Packed(Arc::new(packed)));
            }
        }
        Ok(Self::Quantized(QMatMul::from_arc(weight)?))
    }

    /// Multiplies: `x` `[T, in]` → `[T, out]`; f32 in and out where the weight is quantised or on the CPU.
    ///
    /// # Errors
    /// candle's shape and dtype errors.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(w) => x.matmul(&w.t()?),
            Self::Panels(w) => on_cpu(w.dims(), x, None, |x, onto| w.multiply(x, onto)),
            Self::Packed(w) => on_cpu(w.dims(), x, None, |x, onto| w.multiply(x, onto)),
            Self::Quantized(m) => m.forward(x),
        }
    }

    /// The same on top of `onto` `[T, out]`, f32.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_onto(&self, x: &Tensor, onto: &Tensor) -> Result<Tensor> {
        match self {
            Self::Panels(w) => on_cpu(w.dims(), x, Some(onto), |x, onto| w.multiply(x, onto)),
            Self::Packed(w) => on_cpu(w.dims(), x, Some(onto), |x, onto| w.multiply(x, onto)),
            Self::Dense(_) | Self::Quantized(_) => onto + self.forward(x)?.to_dtype(DType::F32)?,
        }
    }
}

fn on_cpu(
    (outputs, inputs): (usize, usize),
    x: &Tensor,
    onto: Option<&Tensor>,
    multiply: impl FnOnce(&[f32], Option<&[f32]>) -> Vec<f32>,
) -> Result<Tensor> {
    let (tokens, width) = x.dims2()?;
    if width != inputs {
        bail!("linear: activations {:?} with a weight of {inputs} inputs", x.shape());
    }
    let out = match onto {
        None => with_floats("linear", [x], |[x]| multiply(x, None))?,
        Some(onto) if onto.dims() == [tokens, outputs] => {
            with_floats("linear", [x, onto], |[x, onto]| multiply(x, Some(onto)))?
        }
        Some(onto) => bail!("linear: {:?} to add to {tokens} tokens of {outputs} outputs", onto.shape()),
    };
    Tensor::from_vec(out, (tokens, outputs), x.device())
}
