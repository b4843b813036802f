//! Matrix products of activations with a layer's weights, plain or quantised.
//!
//! A quantised weight stays quantised: no step dequantises it.

use crate::packed::Packed;
use candle_core::quantized::{QMatMul, QTensor};
use candle_core::{CpuStorage, Module, Result, Storage, Tensor, bail};
use std::sync::Arc;

/// The weight of a linear layer without bias, `y = x Wᵀ`.
#[derive(Debug, Clone)]
pub enum Linear {
    /// A float weight, `[out, in]`; activations must have its dtype.
    Dense(Tensor),
    /// A Q4_0, Q4_1 or Q8_0 weight on the CPU, rearranged for this project's kernel.
    Packed(Arc<Packed>),
    /// A quantised weight of another type, multiplied by candle.
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
        if weight.device().is_cpu() {
            let (outputs, inputs) = weight.shape().dims2()?;
            if let Some(packed) = Packed::from_gguf(weight.dtype(), &weight.data()?, outputs, inputs) {
                return Ok(Self::Packed(Arc::new(packed)));
            }
        }
        Ok(Self::Quantized(QMatMul::from_arc(weight)?))
    }

    /// Multiplies: `x` `[T, in]` → `[T, out]`; f32 in and out where the weight is quantised.
    ///
    /// # Errors
    /// candle's shape and dtype errors.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(w) => x.matmul(&w.t()?),
            Self::Packed(w) => packed(w, x),
            Self::Quantized(m) => m.forward(x),
        }
    }
}

fn packed(weight: &Packed, x: &Tensor) -> Result<Tensor> {
    let (outputs, inputs) = weight.dims();
    let (tokens, width) = x.dims2()?;
    let (storage, layout) = x.storage_and_layout();
    let (Storage::Cpu(CpuStorage::F32(data)), Some((from, to))) = (&*storage, layout.contiguous_offsets()) else {
        bail!("linear: activations {:?}; expected contiguous f32 on the CPU", x.dtype())
    };
    if width != inputs {
        bail!("linear: activations {:?} with a weight of {inputs} inputs", x.shape());
    }
    let mut out = vec![0f32; tokens * outputs];
    weight.multiply(&data[from..to], &mut out);
    Tensor::from_vec(out, (tokens, outputs), x.device())
}
