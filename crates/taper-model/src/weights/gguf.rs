//! Weights from a GGUF file, quantised as they are or turned into floats.
//!
//! llama.cpp interleaves the rows of each query and key head, so that its rotary embedding turns neighbours. Rows
//! are whole quantised blocks, so the usual order (halves) is restored exactly, by moving bytes.

use super::{Embedding, FileRows, Role, UNREAD, Weights, activation_dtype, expected_shape, float_dtype, unread_part};
use crate::config::{LoadOptions, ModelConfig};
use crate::error::ModelError;
use crate::gguf::{Gguf, TensorInfo};
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{DType, Device, Tensor};
use std::borrow::Cow;
use std::cell::OnceCell;
use std::path::Path;
use std::sync::Arc;
use taper_kernels::linear::Linear;
use taper_kernels::packed::block_bytes;

/// An opened file with what its tensors must agree with.
pub(super) struct GgufWeights<'a> {
    gguf: Gguf,
    config: &'a ModelConfig,
    device: &'a Device,
    options: LoadOptions,
    /// The stored type of the first matrix where all are floats; none where one is quantised.
    floats: Option<DType>,
    /// The embedding table, where it is on the device.
    table: OnceCell<Tensor>,
}

impl<'a> GgufWeights<'a> {
    /// Opens the file and checks that it holds no more layers than its metadata says.
    pub(super) fn open(
        path: &Path,
        config: &'a ModelConfig,
        options: &LoadOptions,
        device: &'a Device,
    ) -> Result<Self, ModelError> {
        let (gguf, options, table) = (Gguf::open(path)?, options.clone(), OnceCell::new());
        let mut weights = Self { gguf, config, device, options, floats: None, table };
        if weights.gguf.tensor(&name(Role::AttentionNorm, config.layers)).is_some() {
            let reason = format!("is {}, but the file holds more layers", config.layers);
            return Err(ModelError::invalid(path, "llama.block_count", reason));
        }
        // Angles, which old files have beside their metadata, are no part of a layer.
        let is_unread =
            |tensor: &&str| unread_part(tensor, "blk.", name).is_some_and(|part| part != "attn_rot_embd.weight");
        if let Some(tensor) = weights.gguf.tensor_names().filter(is_unread).min() {
            return Err(ModelError::invalid(path, tensor, UNREAD));
        }
        let in_layers = (0..config.layers).flat_map(|layer| Role::IN_LAYER.map(|role| (role, layer)));
        let matrices = in_layers.filter(|(role, _)| !role.is_norm()).chain([(weights.head_role(), 0)]);
        let stored = matrices.filter_map(|(role, layer)| Some(weights.gguf.tensor(&name(role, layer))?.dtype));
        weights.floats = all_floats(stored);
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
        self.gguf.file(tensor).release(&tensor.range);
    }

    /// Whether the output head's tensor is the table on the device, dtype and all.
    fn is_table(&self, head: &TensorInfo) -> bool {
        let table = self.table_dtype(head).filter(|_| self.config.tie_embeddings);
        table.is_some() && table == self.dtype(head.dtype)
    }

    /// The bytes of tensors of one format joined by rows, and their shape.
    fn joined(&self, tensors: &[(Role, &TensorInfo)]) -> (Vec<u8>, Vec<usize>) {
        let size: usize = tensors.iter().map(|(_, t)| t.range.len()).sum();
        let mut bytes = Vec::with_capacity(size);
        for (role, tensor) in tensors {
            self.append(*role, tensor, &mut bytes);
        }
        let mut shape = tensors[0].1.shape.clone();
        shape[0] = tensors.iter().map(|(_, t)| t.shape[0]).sum();
        (bytes, shape)
    }

    /// Tensors of one format joined by rows, as they are stored.
    fn load(&self, tensors: &[(Role, &TensorInfo)]) -> Result<QTensor, ModelError> {
        let (bytes, shape) = self.joined(tensors);
        Ok(QTensor::new(storage(&bytes, tensors[0].1.dtype, self.device)?, shape)?)
    }

    /// The same of floats.
    fn float_tensor(&self, tensors: &[(Role, &TensorInfo)], stored: DType) -> Result<Tensor, ModelError> {
        let (bytes, shape) = self.joined(tensors);
        Ok(Tensor::from_raw_buffer(&bytes, stored, &shape, self.device)?)
    }

    /// The stored type of a table of embeddings that lies on the device: one of floats.
    fn table_dtype(&self, tensor: &TensorInfo) -> Option<DType> {
        float(tensor.dtype).filter(|_| self.device.is_cuda())
    }

    /// Of weights that were quantised: f32 on the CPU unless told otherwise, for it is there to compare with.
    fn dequantized_dtype(&self) -> DType {
        float_dtype(&self.options, if self.device.is_cpu() { DType::F32 } else { DType::F16 })
    }

    /// The dtype that a matrix is kept in; none if it stays quantised.
    fn dtype(&self, stored: GgmlDType) -> Option<DType> {
        if self.options.dequantize {
            return Some(self.dequantized_dtype());
        }
        Some(matrix_dtype(&self.options, float(stored)?, self.floats, self.device.is_cpu()))
    }

    /// Matrices of one format joined by rows.
    fn linear(&self, matrices: &[(Role, &TensorInfo)]) -> Result<Linear, ModelError> {
        let stored = matrices[0].1.dtype;
        let Some(dtype) = self.dtype(stored) else {
            return Ok(Linear::quantized(Arc::new(self.load(matrices)?))?);
        };
        let weight = match float(stored) {
            Some(stored) => self.float_tensor(matrices, stored)?,
            None => self.load(matrices)?.dequantize(self.device)?,
        };
        Ok(Linear::dense(weight.to_dtype(dtype)?)?)
    }

    /// What a tensor that stays quantised takes: on the CPU as it is packed.
    fn quantised_bytes(&self, tensor: &TensorInfo) -> usize {
        let packed = block_bytes(tensor.dtype).filter(|_| self.device.is_cpu());
        packed.map_or(tensor.range.len(), |block| tensor.range.len() / tensor.dtype.type_size() * block)
    }

    /// Whose tensor the output head is.
    fn head_role(&self) -> Role {
        if self.config.tie_embeddings { Role::Embedding } else { Role::Head }
    }
}

impl Weights for GgufWeights<'_> {
    fn embedding(&self) -> Result<Embedding, ModelError> {
        let (_, tensor) = self.find(Role::Embedding, 0)?;
        if let Some(stored) = self.table_dtype(tensor) {
            // A prompt's rows would come over the bus, by way of copies on the host.
            let table = self.float_tensor(&[(Role::Embedding, tensor)], stored)?;
            return Ok(Embedding::Table(self.table.get_or_init(|| table).clone()));
        }
        Ok(Embedding::File(FileRows {
            file: self.gguf.file(tensor).clone(),
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
        groups.into_iter().map(|group| self.linear(group)).collect()
    }

    fn head(&self) -> Result<Linear, ModelError> {
        let role = self.head_role();
        let (_, tensor) = self.find(role, 0)?;
        match self.table.get().filter(|_| self.is_table(tensor)) {
            Some(table) => Ok(Linear::dense(table.clone())?),
            None => self.linear(&[(role, tensor)]),
        }
    }

    fn bytes(&self, role: Role, layer: usize) -> Result<u64, ModelError> {
        let (_, tensor) = self.find(if role == Role::Head { self.head_role() } else { role }, layer)?;
        let floats = |dtype: DType| tensor.shape.iter().product::<usize>() * dtype.size_in_bytes();
        Ok(match role {
            Role::Embedding => self.table_dtype(tensor).map_or(0, floats),
            Role::Head if self.is_table(tensor) => 0,
            role if role.is_norm() => floats(DType::F32),
            _ => self.dtype(tensor.dtype).map_or_else(|| self.quantised_bytes(tensor), floats),
        } as u64)
    }

    /// candle's quantised products take f32; only a model without them may meet another dtype.
    fn activation_dtype(&self) -> DType {
        let floats = match self.floats {
            _ if self.options.dequantize => self.dequantized_dtype(),
            Some(first) => float_dtype(&self.options, first),
            None => DType::F32,
        };
        activation_dtype(floats, self.device)
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

/// The type of a format that is not quantised.
fn float(dtype: GgmlDType) -> Option<DType> {
    match dtype {
        GgmlDType::F32 => Some(DType::F32),
        GgmlDType::F16 => Some(DType::F16),
        GgmlDType::BF16 => Some(DType::BF16),
        _ => None,
    }
}

/// The first of them, if none is quantised.
fn all_floats(stored: impl IntoIterator<Item = GgmlDType>) -> Option<DType> {
    let mut first = None;
    for dtype in stored {
        first = first.or(Some(float(dtype)?));
    }
    first
}

/// The dtype that a matrix of floats is kept in. On a device all of them meet the same activations: as the first is stored
/// (`floats`), or f32 where one of them stays quantised. On the CPU activations are f32, and each may have its own.
fn matrix_dtype(options: &LoadOptions, stored: DType, floats: Option<DType>, on_cpu: bool) -> DType {
    match floats {
        _ if on_cpu => float_dtype(options, stored),
        Some(first) => float_dtype(options, first),
        None => DType::F32,
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::WeightDType;

    #[test]
    fn floats_keep_their_type_or_have_the_one_asked_for_unless_a_device_has_quantised_ones_beside_them() {
        use GgmlDType as G;
        let half = all_floats([G::F16, G::F16, G::F32]);
        assert_eq!((half, all_floats([G::F16, G::Q8_0])), (Some(DType::F16), None));
        let dtype = |dtype, stored, floats, on_cpu| {
            matrix_dtype(&LoadOptions { dtype, ..LoadOptions::default() }, stored, floats, on_cpu)
        };
        let auto = WeightDType::Auto;
        assert_eq!(dtype(auto, DType::F16, half, false), DType::F16);
        assert_eq!(dtype(auto, DType::F32, half, false), DType::F16, "one for all");
        assert_eq!(dtype(WeightDType::BF16, DType::F16, half, false), DType::BF16);
        assert_eq!(dtype(WeightDType::BF16, DType::F16, None, false), DType::F32, "beside quantised ones");
        assert_eq!(dtype(auto, DType::F32, half, true), DType::F32);
        assert_eq!(dtype(WeightDType::F16, DType::F32, None, true), DType::F16);
    }
}
