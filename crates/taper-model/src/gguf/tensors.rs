//! Tensor entries: shape, block format, and a place in the file that is checked before anything reads it.

use super::cursor::Cursor;
use crate::error::ModelError;
use candle_core::quantized::GgmlDType;
use std::ops::Range;
use std::path::Path;

/// The most dimensions that the format has.
const MAX_DIMENSIONS: u32 = 4;

/// One tensor of a GGUF file.
#[derive(Debug, Clone)]
pub(crate) struct TensorInfo {
    /// Outermost dimension first (the file stores them the other way round).
    pub(crate) shape: Vec<usize>,
    /// Block format.
    pub(crate) dtype: GgmlDType,
    /// Bytes in the file; set by `place`.
    pub(crate) range: Range<usize>,
    /// Which of a model's files that is.
    pub(super) file: usize,
    offset: u64,
}

impl TensorInfo {
    /// Reads an entry; its place is not yet known.
    pub(super) fn read(cursor: &mut Cursor<'_>) -> Result<Self, ModelError> {
        let rank = cursor.u32()?;
        if !(1..=MAX_DIMENSIONS).contains(&rank) {
            return Err(cursor.error(format!("has {rank} dimensions, not 1 to {MAX_DIMENSIONS}")));
        }
        let mut shape = Vec::new();
        for _ in 0..rank {
            let dimension = usize::try_from(cursor.u64()?).ok().filter(|d| *d > 0);
            shape.push(dimension.ok_or_else(|| cursor.error("has a dimension of no sound size"))?);
        }
        shape.reverse();
        let tag = cursor.u32()?;
        let dtype = dtype_of(tag).ok_or_else(|| cursor.error(unread(tag)))?;
        let offset = cursor.u64()?;
        Ok(Self { shape, dtype, range: 0..0, file: 0, offset })
    }

    /// Checks that the tensor lies in the file, given where tensor data starts.
    pub(super) fn place(&mut self, path: &Path, name: &str, start: u64, file: u64) -> Result<(), ModelError> {
        let absurd = || ModelError::invalid(path, name, "has an absurd shape or offset");
        let elements = self.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).ok_or_else(absurd)?;
        let columns = self.shape[self.shape.len() - 1];
        if !columns.is_multiple_of(self.dtype.block_size()) {
            let reason = format!("rows of {columns} do not divide into blocks of {}", self.dtype.block_size());
            return Err(ModelError::invalid(path, name, reason));
        }
        // candle multiplies blocks of these two at a time.
        let in_pairs = matches!(self.dtype, GgmlDType::Q4_1 | GgmlDType::Q5_0 | GgmlDType::Q5_1);
        if in_pairs && !columns.is_multiple_of(2 * self.dtype.block_size()) {
            let reason = format!("an odd number of {:?} blocks in a row, of {columns} columns,", self.dtype);
            return Err(ModelError::unsupported(path, name, reason));
        }
        let bytes = (elements / self.dtype.block_size()).checked_mul(self.dtype.type_size()).ok_or_else(absurd)?;
        let first = start.checked_add(self.offset).ok_or_else(absurd)?;
        let end = first.checked_add(bytes as u64).ok_or_else(absurd)?;
        if end > file {
            let reason = format!("ends at byte {end} of a file of {file}: truncated, or not sound");
            return Err(ModelError::invalid(path, name, reason));
        }
        // Blocks hold 4-byte values at most; the map itself begins on a page.
        if first % 4 != 0 {
            return Err(ModelError::invalid(path, name, "is not aligned"));
        }
        self.range = first as usize..end as usize;
        Ok(())
    }

    /// Bytes of one row, the last dimension.
    pub(crate) fn row_bytes(&self) -> usize {
        self.shape[self.shape.len() - 1] / self.dtype.block_size() * self.dtype.type_size()
    }
}

/// The block formats that are read, by the format's numbers: those that candle multiplies.
const READ: [(u32, &str, GgmlDType); 13] = [
    (0, "F32", GgmlDType::F32),
    (1, "F16", GgmlDType::F16),
    (30, "BF16", GgmlDType::BF16),
    (2, "Q4_0", GgmlDType::Q4_0),
    (3, "Q4_1", GgmlDType::Q4_1),
    (6, "Q5_0", GgmlDType::Q5_0),
    (7, "Q5_1", GgmlDType::Q5_1),
    (8, "Q8_0", GgmlDType::Q8_0),
    (10, "Q2_K", GgmlDType::Q2K),
    (11, "Q3_K", GgmlDType::Q3K),
    (12, "Q4_K", GgmlDType::Q4K),
    (13, "Q5_K", GgmlDType::Q5K),
    (14, "Q6_K", GgmlDType::Q6K),
];

/// Others, for messages: files of them are about.
const UNREAD: [(u32, &str); 15] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

fn dtype_of(tag: u32) -> Option<GgmlDType> {
    READ.iter().find(|(number, ..)| *number == tag).map(|(.., dtype)| *dtype)
}

/// What is said of a block format that is not read.
fn unread(tag: u32) -> String {
    let name = UNREAD.iter().find(|(number, _)| *number == tag).map(|(_, name)| (*name).to_owned());
    let name = name.unwrap_or_else(|| format!("{tag}, of no name"));
    format!("has the block format {name}; those that are read are {}", READ.map(|(_, name, _)| name).join(", "))
}
