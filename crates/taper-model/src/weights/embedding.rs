//! The embedding table. That of a file is read row by row from the map: no step touches more of it than its own tokens'
//! rows, and it costs no memory beyond the file's pages, whatever its format. On a CUDA device a table of floats lies there.

use crate::mapped::MappedFile;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{DType, Device, Result, Tensor};
use std::borrow::Cow;

/// A table `[vocab, hidden]`.
#[derive(Debug, Clone)]
pub(crate) enum Embedding {
    /// In a file.
    File(FileRows),
    /// On the device.
    Table(Tensor),
}

/// A table of `rows` rows in the map.
#[derive(Debug, Clone)]
pub(crate) struct FileRows {
    pub(super) file: MappedFile,
    /// The table's first byte.
    pub(super) start: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Float formats count as blocks of one.
    pub(super) dtype: GgmlDType,
    pub(super) device: Device,
}

impl Embedding {
    /// The rows of tokens `[T]`, u32, that are where the table is; none of a table in a file.
    pub(crate) fn lookup_there(&self, tokens: &Tensor) -> Result<Option<Tensor>> {
        match self {
            Self::File(file) if file.device.is_cpu() => self.lookup(&tokens.to_vec1()?).map(Some),
            Self::File(_) => Ok(None),
            Self::Table(table) => gathered(table, tokens).map(Some),
        }
    }

    /// The rows of `tokens`, `[T, hidden]` f32.
    pub(crate) fn lookup(&self, tokens: &[u32]) -> Result<Tensor> {
        let rows = match self {
            Self::File(file) => file.rows,
            Self::Table(table) => table.dim(0)?,
        };
        if let Some(token) = tokens.iter().find(|token| **token as usize >= rows) {
            candle_core::bail!("token {token} is not in a vocabulary of {rows}");
        }
        match self {
            Self::File(file) => file.lookup(tokens),
            Self::Table(table) => {
                let tokens = Tensor::from_slice(tokens, tokens.len(), table.device())?;
                gathered(table, &tokens)
            }
        }
    }
}

/// Those rows of a table, as f32.
fn gathered(table: &Tensor, tokens: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if table.device().is_cuda() {
        return Ok(taper_kernels::cuda::gather(table, tokens)?);
    }
    table.index_select(tokens, 0)?.to_dtype(DType::F32)
}

impl FileRows {
    fn lookup(&self, tokens: &[u32]) -> Result<Tensor> {
        let row = self.columns / self.dtype.block_size() * self.dtype.type_size();
        // Words rather than bytes: candle reads the buffer as blocks, whose alignment is up to four.
        let mut words = vec![0u32; (tokens.len() * row).div_ceil(4)];
        let gathered = &mut bytemuck::cast_slice_mut::<u32, u8>(&mut words)[..tokens.len() * row];
        for (&token, out) in tokens.iter().zip(gathered.chunks_exact_mut(row)) {
            let first = self.start + token as usize * row;
            out.copy_from_slice(&self.file.bytes()[first..first + row]);
        }
        let shape = (tokens.len(), self.columns);
        let float = match self.dtype {
            GgmlDType::F32 => Some(DType::F32),
            GgmlDType::F16 => Some(DType::F16),
            GgmlDType::BF16 => Some(DType::BF16),
            _ => None,
        };
        if let Some(dtype) = float {
            return Tensor::from_raw_buffer(gathered, dtype, &[shape.0, shape.1], &self.device)?.to_dtype(DType::F32);
        }
        let on = if self.device.is_cpu() { &self.device } else { &Device::Cpu };
        let storage = QStorage::from_data(Cow::Borrowed(gathered), on, self.dtype)?;
        QTensor::new(storage, shape)?.dequantize(on)?.to_device(&self.device)
    }
}
