//! Tensors that are needed for a short while.

use candle_core::Tensor;
use std::ops::Deref;
use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::sync::Weak;

/// A tensor that its holders keep as long as they read it and no longer: where a step on a device goes by a tape, whose memory
/// lasts, its memory goes to the step's next tensor of that size once nobody holds it. What is a view of it must not outlive it.
#[derive(Debug, Clone)]
pub struct Lent {
    tensor: Tensor,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code))]
    held: Arc<()>,
}

impl Lent {
    /// Whether anybody holds it still.
    #[cfg(feature = "cuda")]
    pub(crate) fn holders(&self) -> Weak<()> {
        Arc::downgrade(&self.held)
    }

    /// The same in another shape.
    #[cfg(feature = "cuda")]
    pub(crate) fn reshape(self, shape: impl Into<candle_core::Shape>) -> candle_core::Result<Self> {
        Ok(Self { tensor: self.tensor.reshape(shape.into())?, held: self.held })
    }
}

impl From<Tensor> for Lent {
    fn from(tensor: Tensor) -> Self {
        Self { tensor, held: Arc::new(()) }
    }
}

impl Deref for Lent {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}
