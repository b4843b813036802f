//! Everything that can go wrong in an evaluation.

use std::path::PathBuf;
use taper_engine::BackendError;
use taper_model::ModelError;

/// Why an evaluation could not be planned, run or kept.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// A name that no task has.
    #[error("no task is called '{name}'{hint}; tasks: {known}, or all")]
    Task {
        /// What was asked for.
        name: String,
        /// A near name, as `, did you mean …?`, or nothing.
        hint: String,
        /// All names.
        known: String,
    },
    /// A length too short for what the task has to say.
    #[error("length {length}: {task} takes some {least} tokens at least, prompt and answer together")]
    Length {
        /// The length asked for, in tokens.
        length: usize,
        /// The task's name.
        task: &'static str,
        /// About the least length, in tokens: it differs a little from question to question.
        least: usize,
    },
    /// A length beyond what the model or its cache holds.
    #[error("length {length}: {what} holds {most} tokens")]
    Room {
        /// The length asked for, in tokens.
        length: usize,
        /// `the model's context`, or `the KV cache`.
        what: &'static str,
        /// Its size in tokens.
        most: usize,
    },
    /// A method's name or parameters.
    #[error("{path}: {message}")]
    Method {
        /// Where in the method, such as `prefill.window`.
        path: String,
        /// What is wrong and what is valid.
        message: String,
    },
    /// A method that needs an artefact which is not there.
    #[error("{path}: {message}")]
    Artefact {
        /// Where in the method.
        path: String,
        /// What is missing, and what makes it.
        message: String,
    },
    /// A plan without tasks, lengths, samples or methods.
    #[error("nothing to run: {0} must be at least 1")]
    Empty(&'static str),
    /// The tokenizer or the chat template.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A forward pass.
    #[error("{task}, {length} tokens, sample {sample}: {reason}")]
    Step {
        /// The task's name.
        task: &'static str,
        /// The length in tokens.
        length: usize,
        /// The sample's number, from 0.
        sample: usize,
        /// What the backend said.
        reason: BackendError,
    },
    /// A device, while steps were timed.
    #[error("{length} tokens: {reason}")]
    Device {
        /// Tokens of the context.
        length: usize,
        /// What it said.
        reason: String,
    },
    /// A result file that could not be read or written.
    #[error("{}: {reason}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: std::io::Error,
    },
    /// A result file that is not one, or is another run's.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The field and what is wrong with it.
        reason: String,
    },
}
