//! Matrix products of activations with a layer's weights, plain or quantised.
//!
//! A quantised weight stays quantised: no step dequantises it.

use candle_core::quantized::{QMatMul, QTensor};
use candle_core::{Module, Result, Tensor};
use std::sync::Arc;

/// The weight of a linear layer without bias, `y = x Wᵀ`.
#[derive(Debug, Clone)]
pub enum Linear {
    /// A float weight, `[out, in]`; activations must have its dtype.
    Dense(Tensor),
    /// A quantised weight whose type has no packed kernel here, multiplied by candle.
    Quantized(QMatMul),
}

impl Linear {
    /// Wraps a float weight `[out, in]` (f32, f16 or bf16).
    pub fn dense(weight: Tensor) -> Self {
        Self::Dense(weight)
    }

    /// Wraps a quantised weight `[out, in]` without dequantising it.
    ///
    /// # Errors
    /// candle's error if the tensor is not a matrix.
    pub fn quantized(weight: Arc<QTensor>) -> Result<Self> {
        Ok(Self::Quantized(QMatMul::from_arc(weight)?))
    }

    /// Multiplies: `x` `[T, in]` → `[T, out]`; f32 in and out where the weight is quantised.
    ///
    /// # Errors
    /// candle's shape and dtype errors.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(w) => x.matmul(&w.t()?),
            Self::Quantized(m) => m.forward(x),
        }
    }
}
