//! Reading the small JSON files beside a checkpoint.

use crate::error::ModelError;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Larger files than this are no configuration or tokenizer (the largest known tokenizer.json has 33 MB).
const SIZE_MAX: u64 = 512 << 20;

/// Opens a file that has an end: a device may have none, and a pipe keeps who opens it waiting for a writer.
pub(crate) fn open_regular(path: &Path) -> Result<(File, u64), ModelError> {
    let io = |e| ModelError::io(path, e);
    let metadata = std::fs::metadata(path).map_err(io)?;
    if !metadata.is_file() {
        return Err(ModelError::invalid(path, "file", "is not a regular file"));
    }
    Ok((File::open(path).map_err(io)?, metadata.len()))
}

/// Reads text, refusing absurd sizes.
pub(crate) fn read_text(path: &Path) -> Result<String, ModelError> {
    let (file, size) = open_regular(path)?;
    if size > SIZE_MAX {
        return Err(ModelError::invalid(path, "file", format!("has {size} bytes; at most {SIZE_MAX} are read")));
    }
    let mut text = String::with_capacity(size as usize);
    file.take(SIZE_MAX).read_to_string(&mut text).map_err(|e| ModelError::io(path, e))?;
    Ok(text)
}

/// Parses a file; the error names the field.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T, ModelError> {
    let text = read_text(path)?;
    let mut deserializer = serde_json::Deserializer::from_str(&text);
    serde_path_to_error::deserialize(&mut deserializer).map_err(|e| {
        // "." is the whole file, and "?" a place that was not reached.
        let place = Some(e.path().to_string()).filter(|place| place != "." && !place.contains('?'));
        let message = e.into_inner().to_string();
        // serde knows an absent field's parent only; the field is in its message.
        let absent = message.strip_prefix("missing field `").and_then(|rest| rest.split_once('`'));
        match (absent, place) {
            (Some((field, _)), None) => ModelError::missing(path, field),
            (Some((field, _)), Some(parent)) => ModelError::missing(path, format!("{parent}.{field}")),
            (None, place) => ModelError::invalid(path, place.as_deref().unwrap_or("file"), message),
        }
    })
}
