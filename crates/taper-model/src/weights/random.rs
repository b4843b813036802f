//! Random weights, made on the device: for measurements of speed.

use super::{Embedding, Role, Weights, activation_dtype, expected_shape};
use crate::config::ModelConfig;
use crate::error::ModelError;
use candle_core::{DType, Device, Tensor};
use taper_kernels::linear::Linear;

/// Normal weights that keep the size of what they are multiplied by, and norms of one.
pub(crate) struct Random<'a> {
    /// The shape.
    pub config: &'a ModelConfig,
    /// Of all matrices: f32, f16 or bf16.
    pub dtype: DType,
    /// Where they are made.
    pub device: &'a Device,
}

impl Random<'_> {
    fn matrix(&self, roles: &[Role]) -> Result<Tensor, ModelError> {
        let shapes = roles.iter().map(|role| expected_shape(self.config, *role));
        let rows = shapes.clone().map(|shape| shape[0]).sum::<usize>();
        let columns = expected_shape(self.config, roles[0])[1];
        let deviation = 1.0 / (columns as f32).sqrt();
        Ok(Tensor::randn(0f32, deviation, (rows, columns), self.device)?.to_dtype(self.dtype)?)
    }
}

impl Weights for Random<'_> {
    fn embedding(&self) -> Result<Embedding, ModelError> {
        Ok(Embedding::Table(self.matrix(&[Role::Embedding])?))
    }

    fn norm(&self, role: Role, _: usize) -> Result<Tensor, ModelError> {
        Ok(Tensor::ones(expected_shape(self.config, role), DType::F32, self.device)?)
    }

    fn projections(&self, roles: &[Role], _: usize) -> Result<Vec<Linear>, ModelError> {
        Ok(vec![Linear::dense(self.matrix(roles)?)?])
    }

    fn head(&self) -> Result<Linear, ModelError> {
        Ok(Linear::dense(self.matrix(&[Role::Head])?)?)
    }

    fn bytes(&self, role: Role, _: usize) -> Result<u64, ModelError> {
        let dtype = if role.is_norm() { DType::F32 } else { self.dtype };
        Ok((expected_shape(self.config, role).iter().product::<usize>() * dtype.size_in_bytes()) as u64)
    }

    fn activation_dtype(&self) -> DType {
        activation_dtype(self.dtype, self.device)
    }
}
