//! Reading the small JSON files beside a checkpoint.

use crate::error::ModelError;
use serde::de::DeserializeOwned;
use std::path::Path;

/// Larger files than this are no configuration or tokenizer (the largest known tokenizer.json has 33 MB).
const SIZE_MAX: u64 = 512 << 20;

/// Reads text, refusing absurd sizes.
pub(crate) fn read_text(path: &Path) -> Result<String, ModelError> {
    let io = |e| ModelError::io(path, e);
    let size = std::fs::metadata(path).map_err(io)?.len();
    if size > SIZE_MAX {
        return Err(ModelError::invalid(path, "file", format!("{size} bytes are absurdly many")));
    }
    std::fs::read_to_string(path).map_err(io)
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
