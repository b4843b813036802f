//! The embedding table, read row by row from the map: no step touches more of it than its own tokens' rows, and it
//! costs no memory beyond the file's pages, whatever its format.

use crate::mapped::MappedFile;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Result, Tensor};
use std::borrow::Cow;

/// A table of `rows` rows in the map.
#[derive(Debug, Clone)]
pub(crate) struct Embedding {
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
    /// The rows of `tokens`, `[T, hidden]` f32.
    pub(crate) fn lookup(&self, tokens: &[u32]) -> Result<Tensor> {
        let row = self.columns / self.dtype.block_size() * self.dtype.type_size();
        // Words rather than bytes: candle reads the buffer as blocks, whose alignment is up to four.
        let mut words = vec![0u32; (tokens.len() * row).div_ceil(4)];
        let gathered = &mut bytemuck::cast_slice_mut::<u32, u8>(&mut words)[..tokens.len() * row];
        for (&token, out) in tokens.iter().zip(gathered.chunks_exact_mut(row)) {
            let token = token as usize;
            if token >= self.rows {
                candle_core::bail!("token {token} is not in a vocabulary of {}", self.rows);
            }
            let first = self.start + token * row;
            out.copy_from_slice(&self.file.bytes()[first..first + row]);
        }
        let storage = QStorage::from_data(Cow::Borrowed(gathered), &self.device, self.dtype)?;
        QTensor::new(storage, (tokens.len(), self.columns))?.dequantize(&self.device)
    }
}
