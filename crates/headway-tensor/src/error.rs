//! The errors of device-neutral memory: what was asked, what is there.

use crate::{DType, Device};

/// Result of an operation on tensors or memory.
pub type Result<T, E = TensorError> = std::result::Result<T, E>;

/// What can go wrong with a tensor, a view or an operation on them.
#[derive(Debug, thiserror::Error, Clone, PartialEq)]
#[non_exhaustive]
pub enum TensorError {
    /// The memory is on another device than the operation's.
    #[error("{what}: memory is on {found}, but the operation runs on {expected}")]
    WrongDevice {
        /// The operation.
        what: &'static str,
        /// Where the memory is.
        found: Device,
        /// Where it should be.
        expected: Device,
    },
    /// The dtype does not fit the operation.
    #[error("{what}: dtype {found} is not supported; supported: {supported}")]
    WrongDType {
        /// The operation.
        what: &'static str,
        /// The dtype that was given.
        found: DType,
        /// The dtypes that work.
        supported: &'static str,
    },
    /// The shape does not fit the operation.
    #[error("{what}: shape {found:?}, expected {expected}")]
    WrongShape {
        /// The operation.
        what: String,
        /// The shape that was given.
        found: Vec<usize>,
        /// What was expected, in words.
        expected: String,
    },
    /// Memory could not be had.
    #[error("out of memory: {}", memory(what, *bytes))]
    OutOfMemory {
        /// What the memory was for.
        what: String,
        /// Bytes asked for; 0 where whoever asked does not say: a driver that loads code, a library.
        bytes: u64,
    },
    /// The device, its driver or its compiler failed.
    #[error("{kind}: {failure}")]
    Device {
        /// The device's kind.
        kind: &'static str,
        /// What was asked of it, and what it said.
        failure: String,
    },
    /// The operation is not offered for these arguments.
    #[error("{0}")]
    Unsupported(String),
}

fn memory(what: &str, bytes: u64) -> String {
    match bytes {
        0 => what.to_owned(),
        _ => format!("{bytes} bytes for {what} could not be allocated"),
    }
}

impl TensorError {
    /// Whether memory is used up: what failed may succeed with less at a time.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. })
    }
}
