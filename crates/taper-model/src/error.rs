//! Everything that can go wrong between a model's name and its tokens, with the file and the field at fault.

use crate::memory::size;
use std::path::{Path, PathBuf};

/// Why a model, tokenizer or template could not be had or used.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file could not be opened or read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file, field or tensor that must be there is not.
    #[error("{}: {field} is missing", path.display())]
    Missing {
        /// The file that lacks it, or that is missing itself.
        path: PathBuf,
        /// The field or tensor.
        field: String,
    },
    /// A field holds what it cannot hold, or the file's bytes contradict its header.
    #[error("{}: {field}: {reason}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The field or tensor.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A sound file asks for something that Taper does not do.
    #[error("{}: {field}: {reason} is not supported", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The field.
        field: String,
        /// What it asks for.
        reason: String,
    },
    /// A tensor's shape contradicts the configuration.
    #[error("{}: {tensor}: expected shape {expected:?}, got {got:?}", path.display())]
    Shape {
        /// The file that holds the tensor.
        path: PathBuf,
        /// The tensor's name in that file.
        tensor: String,
        /// The shape that the configuration asks for.
        expected: Vec<usize>,
        /// The shape in the file.
        got: Vec<usize>,
    },
    /// A model name that is neither a folder, nor a GGUF file, nor a hub id.
    #[error("model '{spec}': {reason}")]
    Spec {
        /// What was asked for.
        spec: String,
        /// Why it cannot be one.
        reason: String,
    },
    /// No source could deliver the model.
    #[error("model '{spec}' could not be fetched: {reason}")]
    Fetch {
        /// What was asked for.
        spec: String,
        /// What each source said.
        reason: String,
    },
    /// A context limit that the model cannot keep.
    #[error("context limit {limit}: must be between 1 and the model's own {model}")]
    ContextLimit {
        /// What was asked for.
        limit: usize,
        /// The model's context length.
        model: usize,
    },
    /// Text that the tokenizer cannot encode.
    #[error("tokenizer: {0}")]
    Encode(String),
    /// The chat template turned the conversation down (its `raise_exception`): the caller's fault.
    #[error("the chat template refuses these messages: {0}")]
    TemplateRefused(String),
    /// The chat template itself does not compile or run.
    #[error("chat template: {0}")]
    Template(String),
    /// The chat template had no time or no thread for the conversation, which it may have later.
    #[error("the chat template {0}")]
    TemplateBusy(String),
    /// Weights that there is no room for.
    #[error(
        "the weights take {} of {place} memory while they are loaded, of which there are {}: a --dtype of 16 bits, a quantised \
         file, a smaller model or another --device takes less", size(*wanted), size(*room)
    )]
    Memory {
        /// Bytes that they take, of the dtypes that they are kept in.
        wanted: u64,
        /// Bytes that can be had; of host memory with what could be moved to swap space.
        room: u64,
        /// Whose memory.
        place: &'static str,
    },
    /// A tensor operation failed while loading.
    #[error("loading weights: {0}")]
    Device(#[from] candle_core::Error),
}

/// The most characters of a file's own text that a message quotes.
const QUOTED_MAX: usize = 300;

impl ModelError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn missing(path: &Path, field: impl ToString) -> Self {
        Self::Missing { path: path.to_owned(), field: quoted(field) }
    }

    pub(crate) fn invalid(path: &Path, field: impl ToString, reason: impl ToString) -> Self {
        Self::Invalid { path: path.to_owned(), field: quoted(field), reason: quoted(reason) }
    }

    pub(crate) fn unsupported(path: &Path, field: impl ToString, reason: impl ToString) -> Self {
        Self::Unsupported { path: path.to_owned(), field: quoted(field), reason: quoted(reason) }
    }

    pub(crate) fn shape(path: &Path, tensor: &str, expected: &[usize], got: &[usize]) -> Self {
        Self::Shape { path: path.to_owned(), tensor: quoted(tensor), expected: expected.to_vec(), got: got.to_vec() }
    }

    pub(crate) fn template(reason: impl ToString) -> Self {
        Self::Template(quoted(reason))
    }
}

/// What may hold words of a file, or a template's: never so long that it hides what it is about, and without characters that
/// a terminal obeys.
pub(crate) fn quoted(text: impl ToString) -> String {
    let mut text = text.to_string();
    if let Some((end, _)) = text.char_indices().nth(QUOTED_MAX) {
        text.truncate(end);
        text.push('…');
    }
    if !text.contains(control) {
        return text;
    }
    text.chars().map(|c| if control(c) { c.escape_default().to_string() } else { c.to_string() }).collect()
}

fn control(c: char) -> bool {
    c.is_control() && c != '\n'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_says_is_quoted_in_short_and_without_control_characters() {
        let path = Path::new("m.gguf");
        let message = ModelError::unsupported(path, "key\u{1b}[2J", "▁".repeat(1000)).to_string();
        assert!(
            message.starts_with("m.gguf: key\\u{1b}[2J: ▁▁") && message.ends_with("▁… is not supported"),
            "{message}"
        );
        assert!(message.chars().count() < QUOTED_MAX + 100);
        assert_eq!(ModelError::template("line\nby line").to_string(), "chat template: line\nby line");
    }
}
