//! A bounds-checked reader over the map, whose errors name the field being read.

use crate::error::ModelError;
use std::path::Path;

/// Reads little-endian values in order.
pub(crate) struct Cursor<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    position: usize,
    field: String,
}

impl<'a> Cursor<'a> {
    /// Starts at the first byte.
    pub(crate) fn new(path: &'a Path, bytes: &'a [u8]) -> Self {
        Self { path, bytes, position: 0, field: String::new() }
    }

    /// Starts within the bytes, for a value whose place is known.
    pub(crate) fn at(path: &'a Path, bytes: &'a [u8], position: usize, field: &str) -> Self {
        Self { path, bytes, position, field: field.to_owned() }
    }

    /// Names what is read next.
    pub(crate) fn field(&mut self, name: impl Into<String>) {
        self.field = name.into();
    }

    /// Bytes read so far.
    pub(crate) fn position(&self) -> usize {
        self.position
    }

    /// The next `count` bytes.
    pub(crate) fn bytes(&mut self, count: u64) -> Result<&'a [u8], ModelError> {
        let left = self.bytes.len() - self.position;
        match usize::try_from(count) {
            Ok(count) if count <= left => {
                let start = self.position;
                self.position += count;
                Ok(&self.bytes[start..start + count])
            }
            _ => Err(self.error(format!("the file ends after {left} of {count} bytes: truncated, or not sound"))),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ModelError> {
        let mut out = [0; N];
        out.copy_from_slice(self.bytes(N as u64)?);
        Ok(out)
    }

    /// A 32-bit count or tag.
    pub(crate) fn u32(&mut self) -> Result<u32, ModelError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// A 64-bit count or offset.
    pub(crate) fn u64(&mut self) -> Result<u64, ModelError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A length and that many bytes of UTF-8.
    pub(crate) fn string(&mut self) -> Result<&'a str, ModelError> {
        let length = self.u64()?;
        let bytes = self.bytes(length)?;
        std::str::from_utf8(bytes).map_err(|_| self.error("is not UTF-8"))
    }

    /// An error at the field being read.
    pub(crate) fn error(&self, reason: impl ToString) -> ModelError {
        ModelError::invalid(self.path, &self.field, reason)
    }
}
