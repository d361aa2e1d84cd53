//! GGUF, versions 2 and 3, little-endian (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>).
//!
//! [`header`] reads and checks what stands before the tensor data, [`mod@file`] puts the parts of a split file
//! together and hands out weights. Everything in a header is untrusted: counts, lengths and offsets are
//! checked against the file's size before they are used.
//!
//! Not for writing model files ([`write`](mod@write) serves tests), nor for what a key means.

pub mod check;
pub mod file;
pub mod header;
pub mod metadata;
mod reader;
mod split;
pub mod tensors;
pub mod value;
#[doc(hidden)]
pub mod write;

pub use file::GgufFile;
pub use header::Header;
pub use metadata::Metadata;
pub use tensors::TensorInfo;
pub use value::{Array, Strings, Value, ValueType};
