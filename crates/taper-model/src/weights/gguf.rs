//! Weights from a GGUF file, quantised as they are or turned into floats.
//!
//! llama.cpp interleaves the rows of each query and key head, so that its rotary embedding turns neighbours. Rows
//! are whole quantised blocks, so the usual order (halves) is restored exactly, by moving bytes.

use super::{Embedding, FileRows, Role, Weights, activation_dtype, expected_shape, float_dtype};
use crate::config::{LoadOptions, ModelConfig};
use crate::error::ModelError;
use crate::gguf::{Gguf, TensorInfo};
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{DType, Device, Tensor};
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;
use taper_kernels::linear::Linear;

/// An opened file with what its tensors must agree with.
pub(super) struct GgufWeights<'a> {
    gguf: Gguf,
    config: &'a ModelConfig,
    device: &'a Device,
    options: LoadOptions,
}

impl<'a> GgufWeights<'a> {
    /// Opens the file and checks that it holds no more layers than its metadata says.
    pub(super) fn open(
        path: &Path,
        config: &'a ModelConfig,
        options: &LoadOptions,
        device: &'a Device,
    ) -> Result<Self, ModelError> {
        let weights = Self { gguf: Gguf::open(path)?, config, device, options: options.clone() };
        if weights.gguf.tensor(&name(Role::AttentionNorm, config.layers)).is_some() {
            let reason = format!("is {}, but the file holds more layers", config.layers);
            return Err(ModelError::invalid(path, "llama.block_count", reason));
        }
        Ok(weights)
    }

    /// A role's tensor, its shape checked.
    fn find(&self, role: Role, layer: usize) -> Result<(String, &TensorInfo), ModelError> {
        let name = name(role, layer);
        let tensor = self.gguf.tensor(&name).ok_or_else(|| ModelError::missing(self.gguf.path(), &name))?;
        let expected = expected_shape(self.config, role);
        if tensor.shape != expected {
            return Err(ModelError::shape(self.gguf.path(), &name, &expected, &tensor.shape));
        }
        Ok((name, tensor))
    }

    /// Appends a tensor's bytes in the usual row order.
    fn append(&self, role: Role, tensor: &TensorInfo, out: &mut Vec<u8>) {
        let bytes = self.gguf.tensor_bytes(tensor);
        if !matches!(role, Role::Query | Role::Key) {
            out.extend_from_slice(bytes);
        } else {
            let row = tensor.row_bytes();
            let half = self.config.head_dim / 2;
            for head in bytes.chunks_exact(row * self.config.head_dim) {
                for second in 0..2 {
                    for pair in 0..half {
                        let first = (2 * pair + second) * row;
                        out.extend_from_slice(&head[first..first + row]);
                    }
                }
            }
        }
        self.gguf.file().release(&tensor.range);
    }

    /// Tensors of one format joined by rows.
    fn load(&self, tensors: &[(Role, &TensorInfo)]) -> Result<QTensor, ModelError> {
        let dtype = tensors[0].1.dtype;
        let size: usize = tensors.iter().map(|(_, t)| t.range.len()).sum();
        let mut bytes = Vec::with_capacity(size);
        for (role, tensor) in tensors {
            self.append(*role, tensor, &mut bytes);
        }
        let mut shape = tensors[0].1.shape.clone();
        shape[0] = tensors.iter().map(|(_, t)| t.shape[0]).sum();
        Ok(QTensor::new(storage(&bytes, dtype, self.device)?, shape)?)
    }

    /// Of weights that were quantised: f32 on the CPU unless told otherwise, for it is there to compare with.
    fn dequantized_dtype(&self) -> DType {
        float_dtype(&self.options, if self.device.is_cpu() { DType::F32 } else { DType::F16 })
    }

    /// The dtype that a matrix is kept in; none if it stays quantised.
    fn dtype(&self, stored: GgmlDType) -> Option<DType> {
        match stored {
            _ if self.options.dequantize => Some(self.dequantized_dtype()),
            GgmlDType::F16 if self.device.is_cpu() => Some(DType::F16),
            GgmlDType::BF16 if self.device.is_cpu() => Some(DType::BF16),
            stored => is_float(stored).then_some(DType::F32),
        }
    }

    fn linear(&self, weight: QTensor) -> Result<Linear, ModelError> {
        match self.dtype(weight.dtype()) {
            None => Ok(Linear::quantized(Arc::new(weight))?),
            Some(dtype) => Ok(Linear::dense(weight.dequantize(self.device)?.to_dtype(dtype)?)?),
        }
    }

    /// Whose tensor the output head is.
    fn head_role(&self) -> Role {
        if self.config.tie_embeddings { Role::Embedding } else { Role::Head }
    }
}

impl Weights for GgufWeights<'_> {
    fn embedding(&self) -> Result<Embedding, ModelError> {
        let (_, tensor) = self.find(Role::Embedding, 0)?;
        Ok(Embedding::File(FileRows {
            file: self.gguf.file().clone(),
            start: tensor.range.start,
            rows: self.config.vocab_size,
            columns: self.config.hidden_size,
            dtype: tensor.dtype,
            device: self.device.clone(),
        }))
    }

    fn norm(&self, role: Role, layer: usize) -> Result<Tensor, ModelError> {
        let (_, tensor) = self.find(role, layer)?;
        Ok(self.load(&[(role, tensor)])?.dequantize(self.device)?)
    }

    fn projections(&self, roles: &[Role], layer: usize) -> Result<Vec<Linear>, ModelError> {
        let mut found = Vec::with_capacity(roles.len());
        for &role in roles {
            found.push((role, self.find(role, layer)?.1));
        }
        let joint = found.iter().all(|(_, tensor)| tensor.dtype == found[0].1.dtype);
        let groups = if joint { vec![&found[..]] } else { found.chunks(1).collect() };
        groups.into_iter().map(|group| self.linear(self.load(group)?)).collect()
    }

    fn head(&self) -> Result<Linear, ModelError> {
        let role = self.head_role();
        let (_, tensor) = self.find(role, 0)?;
        self.linear(self.load(&[(role, tensor)])?)
    }

    fn bytes(&self, role: Role, layer: usize) -> Result<u64, ModelError> {
        let (_, tensor) = self.find(if role == Role::Head { self.head_role() } else { role }, layer)?;
        let floats = |dtype: DType| tensor.shape.iter().product::<usize>() * dtype.size_in_bytes();
        Ok(match role {
            Role::Embedding => 0,
            role if role.is_norm() => floats(DType::F32),
            _ => self.dtype(tensor.dtype).map_or(tensor.range.len(), floats),
        } as u64)
    }

    /// candle's quantised products take f32; only a dequantised model may meet another dtype.
    fn activation_dtype(&self) -> DType {
        if self.options.dequantize { activation_dtype(self.dequantized_dtype(), self.device) } else { DType::F32 }
    }
}

/// A quantised storage from bytes of any alignment.
fn storage(bytes: &[u8], dtype: GgmlDType, device: &Device) -> Result<QStorage, ModelError> {
    if bytes.as_ptr().cast::<u32>().is_aligned() {
        return Ok(QStorage::from_data(Cow::Borrowed(bytes), device, dtype)?);
    }
    let mut words = vec![0u32; bytes.len().div_ceil(4)];
    let aligned = &mut bytemuck::cast_slice_mut::<u32, u8>(&mut words)[..bytes.len()];
    aligned.copy_from_slice(bytes);
    Ok(QStorage::from_data(Cow::Borrowed(aligned), device, dtype)?)
}

fn is_float(dtype: GgmlDType) -> bool {
    matches!(dtype, GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16)
}

/// llama.cpp's names.
fn name(role: Role, layer: usize) -> String {
    let in_layer = |part: &str| format!("blk.{layer}.{part}.weight");
    match role {
        Role::Embedding => "token_embd.weight".to_owned(),
        Role::FinalNorm => "output_norm.weight".to_owned(),
        Role::Head => "output.weight".to_owned(),
        Role::AttentionNorm => in_layer("attn_norm"),
        Role::Query => in_layer("attn_q"),
        Role::Key => in_layer("attn_k"),
        Role::Value => in_layer("attn_v"),
        Role::Output => in_layer("attn_output"),
        Role::FeedForwardNorm => in_layer("ffn_norm"),
        Role::Gate => in_layer("ffn_gate"),
        Role::Up => in_layer("ffn_up"),
        Role::Down => in_layer("ffn_down"),
    }
}
