//! Everything that can go wrong in training.

use std::path::{Path, PathBuf};
use taper_model::ModelError;

/// Why an artefact could not be trained or kept.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// An option that cannot be.
    #[error("--{option}: {message}")]
    Option {
        /// Its name on the command line.
        option: &'static str,
        /// What is wrong and what is valid.
        message: String,
    },
    /// A file that could not be read or written, or is not what it should be.
    #[error("{}: {message}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// The tokenizer.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A forward pass or a step of training.
    #[error("layer {layer}: {reason}")]
    Compute {
        /// The layer that was looked at, or the last one of a forward pass.
        layer: usize,
        /// What the device said.
        reason: candle_core::Error,
    },
    /// [`Progress::stopped`](super::Progress::stopped) said so. Layers that were finished are in the file.
    #[error("stopped")]
    Stopped,
}

impl TrainError {
    pub(crate) fn option(option: &'static str, message: impl Into<String>) -> Self {
        Self::Option { option, message: message.into() }
    }

    pub(super) fn file(path: &Path, message: impl ToString) -> Self {
        Self::File { path: path.to_owned(), message: message.to_string() }
    }

    /// For `map_err`, in a layer.
    pub(crate) fn compute(layer: usize) -> impl Fn(candle_core::Error) -> Self {
        move |reason| Self::Compute { layer, reason }
    }
}
