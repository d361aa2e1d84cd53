//! safetensors checkpoints: one file, or shards with an index
//! (<https://github.com/huggingface/safetensors>).
//!
//! [`header`] reads and checks a file's header, [`checkpoint`] puts shards together.
//!
//! Not for quantised checkpoints (F8 with block scales, packed integers): these are refused by name.

pub mod checkpoint;
pub mod header;

pub use checkpoint::SafetensorsCheckpoint;
pub use header::{Entry, Header};
