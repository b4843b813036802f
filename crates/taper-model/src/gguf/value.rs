//! Metadata values. Arrays stay in the map until they are asked for.

use super::cursor::Cursor;
use crate::error::ModelError;
use std::path::Path;

/// Tags of the value types, as the format numbers them.
mod kind {
    pub(super) const U8: u32 = 0;
    pub(super) const I8: u32 = 1;
    pub(super) const U16: u32 = 2;
    pub(super) const I16: u32 = 3;
    pub(super) const U32: u32 = 4;
    pub(super) const I32: u32 = 5;
    pub(super) const F32: u32 = 6;
    pub(super) const BOOL: u32 = 7;
    pub(super) const STRING: u32 = 8;
    pub(super) const ARRAY: u32 = 9;
    pub(super) const U64: u32 = 10;
    pub(super) const I64: u32 = 11;
    pub(super) const F64: u32 = 12;
}

/// One metadata value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    /// Any signed or unsigned whole number; u64 above `i64::MAX` does not occur in sound files and is refused.
    Integer(i64),
    /// f32 or f64.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// UTF-8 text.
    String(String),
    /// Values of one type.
    Array(Array),
}

/// Where an array lies: its elements' type, their number, and their first byte.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Array {
    kind: u32,
    count: u64,
    start: usize,
}

/// Bytes of a value of fixed size.
fn width(kind: u32) -> Option<u64> {
    match kind {
        kind::U8 | kind::I8 | kind::BOOL => Some(1),
        kind::U16 | kind::I16 => Some(2),
        kind::U32 | kind::I32 | kind::F32 => Some(4),
        kind::U64 | kind::I64 | kind::F64 => Some(8),
        _ => None,
    }
}

impl Value {
    /// Reads a value of the type tagged `kind`.
    pub(crate) fn read(cursor: &mut Cursor<'_>, kind: u32) -> Result<Self, ModelError> {
        match kind {
            kind::STRING => Ok(Self::String(cursor.string()?.to_owned())),
            kind::ARRAY => Ok(Self::Array(Array::skip(cursor)?)),
            _ => read_scalar(cursor, kind),
        }
    }

    pub(crate) fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Integer(i) => u64::try_from(*i).ok(),
            _ => None,
        }
    }

    pub(crate) fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Integer(i) => Some(*i as f64),
            Self::Float(f) => Some(*f),
            _ => None,
        }
    }

    pub(crate) fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(b) => Some(*b),
            _ => None,
        }
    }

    pub(crate) fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(s) => Some(s),
            _ => None,
        }
    }

    pub(crate) fn as_array(&self) -> Option<&Array> {
        match self {
            Self::Array(a) => Some(a),
            _ => None,
        }
    }
}

fn read_scalar(cursor: &mut Cursor<'_>, kind: u32) -> Result<Value, ModelError> {
    let Some(width) = width(kind) else {
        return Err(cursor.error(format!("has the unknown type {kind}")));
    };
    let raw = cursor.bytes(width)?;
    let mut bits = [0; 8];
    bits[..raw.len()].copy_from_slice(raw);
    let bits = u64::from_le_bytes(bits);
    Ok(match kind {
        kind::BOOL => Value::Bool(bits != 0),
        kind::I8 => Value::Integer(i64::from(bits as u8 as i8)),
        kind::I16 => Value::Integer(i64::from(bits as u16 as i16)),
        kind::I32 => Value::Integer(i64::from(bits as u32 as i32)),
        kind::I64 => Value::Integer(bits as i64),
        kind::F32 => Value::Float(f64::from(f32::from_bits(bits as u32))),
        kind::F64 => Value::Float(f64::from_bits(bits)),
        _ => Value::Integer(i64::try_from(bits).map_err(|_| cursor.error("is absurdly large"))?),
    })
}

impl Array {
    /// Notes where an array lies and steps over it.
    fn skip(cursor: &mut Cursor<'_>) -> Result<Self, ModelError> {
        let kind = cursor.u32()?;
        let count = cursor.u64()?;
        let start = cursor.position();
        if let Some(width) = width(kind) {
            let bytes = count.checked_mul(width).ok_or_else(|| cursor.error("is absurdly long"))?;
            cursor.bytes(bytes)?;
        } else if kind == kind::STRING {
            for _ in 0..count {
                let length = cursor.u64()?;
                cursor.bytes(length)?;
            }
        } else {
            return Err(cursor.error(format!("is an array of the unsupported type {kind}")));
        }
        Ok(Self { kind, count, start })
    }

    pub(crate) fn strings<'a>(&self, path: &'a Path, map: &'a [u8], key: &str) -> Result<Vec<&'a str>, ModelError> {
        if self.kind != kind::STRING {
            return Err(ModelError::invalid(path, key, "must be an array of strings"));
        }
        let mut cursor = Cursor::at(path, map, self.start, key);
        (0..self.count)
            .map(|i| {
                cursor.field(format!("{key}[{i}]"));
                let length = cursor.u64()?;
                let bytes = cursor.bytes(length)?;
                std::str::from_utf8(bytes).map_err(|_| cursor.error("is not UTF-8"))
            })
            .collect()
    }

    pub(crate) fn integers(&self, path: &Path, map: &[u8], key: &str) -> Result<Vec<i64>, ModelError> {
        self.scalars(path, map, key, "whole numbers", |value| match value {
            Value::Integer(i) => Some(i),
            _ => None,
        })
    }

    pub(crate) fn floats(&self, path: &Path, map: &[u8], key: &str) -> Result<Vec<f32>, ModelError> {
        self.scalars(path, map, key, "numbers", |value| match value {
            Value::Float(f) => Some(f as f32),
            _ => None,
        })
    }

    fn scalars<T>(
        &self,
        path: &Path,
        map: &[u8],
        key: &str,
        wanted: &str,
        read: impl Fn(Value) -> Option<T>,
    ) -> Result<Vec<T>, ModelError> {
        let mut cursor = Cursor::at(path, map, self.start, key);
        let wrong = || ModelError::invalid(path, key, format!("must be an array of {wanted}"));
        if width(self.kind).is_none() {
            return Err(wrong());
        }
        (0..self.count).map(|_| read(read_scalar(&mut cursor, self.kind)?).ok_or_else(wrong)).collect()
    }
}
