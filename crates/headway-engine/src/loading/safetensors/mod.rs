//! safetensors checkpoints: one file, or shards with an index
//! (<https://github.com/huggingface/safetensors>).
//!
//! [`header`] reads and checks a file's header, [`checkpoint`] puts shards together.
//!
//! Not for what quantised tensors mean: `dequantise` reads two published formats; the others are refused by name.

pub mod checkpoint;
pub mod header;

pub(crate) use checkpoint::RawTensor;
pub use checkpoint::SafetensorsCheckpoint;
pub use header::{Entry, Header};
