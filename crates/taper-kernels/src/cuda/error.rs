//! What an operation refuses, and what the device answers.

use std::fmt::Display;

/// Why a CUDA operation did not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A shape, dtype, device or number that the operation does not take.
    #[error("{op}: {parameter} is {got}; expected {expected}")]
    Parameter {
        /// The operation.
        op: &'static str,
        /// The parameter.
        parameter: &'static str,
        /// What it is.
        got: String,
        /// What is valid.
        expected: String,
    },
    /// The launch failed.
    #[error("{op}: CUDA status {status}{}", hint(.status))]
    Launch {
        /// The operation.
        op: &'static str,
        /// A cudaError_t.
        status: i32,
    },
    /// candle's error: memory, or copies between host and device.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// The statuses that a wrong build or machine gives.
fn hint(status: &i32) -> &'static str {
    match status {
        1 => " (invalid value: a shape or dtype that the kernel does not take)",
        2 => " (out of memory)",
        209 => " (no kernel for this device: the kernels are built for sm_90a, H100 and H200)",
        10_000.. => " (cuBLAS's, and 10000)",
        _ => "",
    }
}

impl Error {
    pub(super) fn parameter(
        op: &'static str,
        parameter: &'static str,
        got: impl Display,
        expected: impl Display,
    ) -> Self {
        Self::Parameter { op, parameter, got: got.to_string(), expected: expected.to_string() }
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => candle_core::Error::wrap(other),
        }
    }
}

/// What CUDA operations return.
pub type Result<T> = std::result::Result<T, Error>;
