//! Reads GGUF files (versions 2 and 3) from a memory map.
//!
//! Own parser rather than candle's: candle's reader allocates whatever length the file claims and copies every
//! metadata array. This one checks each length against the bytes that are left before it believes it, and keeps
//! arrays as borrowed ranges until somebody asks for them.

mod cursor;
pub(crate) mod split;
mod tensors;
mod value;

pub(crate) use tensors::TensorInfo;
pub(crate) use value::{Array, Value};

use crate::error::ModelError;
use crate::mapped::MappedFile;
use cursor::Cursor;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::Path;

/// Where tensor data begins is rounded up to this, unless the file says otherwise.
const DEFAULT_ALIGNMENT: u64 = 32;

/// An opened GGUF model: its metadata, and where its tensors lie in the maps of its file or files.
#[derive(Debug, Clone)]
pub(crate) struct Gguf {
    /// The one that was named, and the other parts of a model in several.
    files: Vec<MappedFile>,
    metadata: HashMap<String, Value>,
    tensors: HashMap<String, TensorInfo>,
}

impl Gguf {
    /// Maps a file and reads its header; of a model in parts, all files from the first on.
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let mut gguf = Self::open_one(path)?;
        split::join(&mut gguf)?;
        Ok(gguf)
    }

    fn open_one(path: &Path) -> Result<Self, ModelError> {
        let file = MappedFile::open(path)?;
        let mut cursor = Cursor::new(path, file.bytes());
        cursor.field("magic");
        if cursor.bytes(4)? != b"GGUF" {
            return Err(ModelError::invalid(path, "magic", "this is not a GGUF file"));
        }
        cursor.field("version");
        let version = cursor.u32()?;
        if !(2..=3).contains(&version) {
            return Err(ModelError::unsupported(path, "version", format!("GGUF version {version}")));
        }
        cursor.field("tensor_count");
        let tensor_count = cursor.u64()?;
        cursor.field("metadata_kv_count");
        let metadata_count = cursor.u64()?;

        // Capacities grow with what is really there, so an absurd count ends at the end of the file.
        let mut metadata = HashMap::new();
        for i in 0..metadata_count {
            cursor.field(format!("metadata entry {i}"));
            let key = cursor.string()?.to_owned();
            cursor.field(&key);
            let kind = cursor.u32()?;
            let value = Value::read(&mut cursor, kind)?;
            if let Entry::Vacant(place) = metadata.entry(key) {
                place.insert(value);
            } else {
                return Err(cursor.error("stands there twice"));
            }
        }
        let mut tensors = HashMap::new();
        for i in 0..tensor_count {
            cursor.field(format!("tensor entry {i}"));
            let name = cursor.string()?.to_owned();
            cursor.field(&name);
            let tensor = TensorInfo::read(&mut cursor)?;
            if let Entry::Vacant(place) = tensors.entry(name) {
                place.insert(tensor);
            } else {
                return Err(cursor.error("is listed twice"));
            }
        }

        let alignment = match metadata.get("general.alignment") {
            None => DEFAULT_ALIGNMENT,
            Some(value) => value
                .as_u64()
                .filter(|a| *a >= 8 && a.is_power_of_two())
                .ok_or_else(|| ModelError::invalid(path, "general.alignment", "must be a power of two, 8 or more"))?,
        };
        let start = (cursor.position() as u64).next_multiple_of(alignment);
        for (name, tensor) in &mut tensors {
            tensor.place(path, name, start, file.bytes().len() as u64)?;
        }
        refuse_shared_bytes(path, &tensors)?;
        Ok(Self { files: vec![file], metadata, tensors })
    }

    /// The file, of several the first.
    pub(crate) fn path(&self) -> &Path {
        self.files[0].path()
    }

    /// The bytes of the file that holds a tensor, shared.
    pub(crate) fn file(&self, tensor: &TensorInfo) -> &MappedFile {
        &self.files[tensor.file]
    }

    /// A tensor's entry.
    pub(crate) fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// The tensors' names, in no order.
    pub(crate) fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Names, forms and bytes of all tensors, in no order.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (&str, String, &[u8])> {
        let form = |tensor: &TensorInfo| format!("{:?} {:?}", tensor.dtype, tensor.shape);
        self.tensors.iter().map(move |(name, tensor)| (name.as_str(), form(tensor), self.tensor_bytes(tensor)))
    }

    /// The bytes of a tensor, checked to lie in the file when it was opened.
    pub(crate) fn tensor_bytes(&self, tensor: &TensorInfo) -> &[u8] {
        &self.file(tensor).bytes()[tensor.range.clone()]
    }

    /// A whole number that may be absent.
    pub(crate) fn optional_u64(&self, key: &str) -> Result<Option<u64>, ModelError> {
        self.convert(key, "a whole number", Value::as_u64)
    }

    /// A number that may be absent.
    pub(crate) fn optional_f64(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.convert(key, "a number", Value::as_f64)
    }

    /// A truth value that may be absent.
    pub(crate) fn optional_bool(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.convert(key, "true or false", Value::as_bool)
    }

    /// A string that may be absent.
    pub(crate) fn optional_str(&self, key: &str) -> Result<Option<&str>, ModelError> {
        self.convert(key, "a string", Value::as_str)
    }

    /// A whole number that must be there.
    pub(crate) fn u64(&self, key: &str) -> Result<u64, ModelError> {
        self.optional_u64(key)?.ok_or_else(|| ModelError::missing(self.path(), key))
    }

    /// A string that must be there.
    pub(crate) fn str(&self, key: &str) -> Result<&str, ModelError> {
        self.optional_str(key)?.ok_or_else(|| ModelError::missing(self.path(), key))
    }

    /// An array of strings that may be absent.
    pub(crate) fn optional_strings(&self, key: &str) -> Result<Option<Vec<&str>>, ModelError> {
        self.array(key)?.map(|a| a.strings(self.path(), self.files[0].bytes(), key)).transpose()
    }

    /// An array of whole numbers that may be absent.
    pub(crate) fn optional_integers(&self, key: &str) -> Result<Option<Vec<i64>>, ModelError> {
        self.array(key)?.map(|a| a.integers(self.path(), self.files[0].bytes(), key)).transpose()
    }

    /// An array of f32 that may be absent.
    pub(crate) fn optional_floats(&self, key: &str) -> Result<Option<Vec<f32>>, ModelError> {
        self.array(key)?.map(|a| a.floats(self.path(), self.files[0].bytes(), key)).transpose()
    }

    fn array(&self, key: &str) -> Result<Option<&Array>, ModelError> {
        self.convert(key, "an array", Value::as_array)
    }

    fn convert<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        match read(value) {
            Some(value) => Ok(Some(value)),
            None => Err(ModelError::invalid(self.path(), key, format!("must be {wanted}"))),
        }
    }
}

/// Tensors that lie apart are together no larger than the file, and so is what is loaded of them.
fn refuse_shared_bytes(path: &Path, tensors: &HashMap<String, TensorInfo>) -> Result<(), ModelError> {
    let mut all: Vec<(&String, &TensorInfo)> = tensors.iter().collect();
    all.sort_by_key(|(name, tensor)| (tensor.range.start, *name));
    for pair in all.windows(2) {
        let [(before, first), (name, second)] = pair else { continue };
        if second.range.start < first.range.end {
            let reason = format!("begins at byte {}, within {before}", second.range.start);
            return Err(ModelError::invalid(path, *name, reason));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
