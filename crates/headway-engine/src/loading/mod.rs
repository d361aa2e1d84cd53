//! Weight files: safetensors checkpoints and GGUF, memory-mapped and checked before anything is allocated.
//!
//! [`open()`] takes what a user gives (a directory, a `.gguf` or a `.safetensors` file) and returns
//! [`ModelFiles`]: the model's configuration as its format has it, and a [`Checkpoint`] that hands out
//! [`Weight`](headway_tensor::Weight)s by name. They live as long as the model.
//!
//! Not for downloading, and not for what a name or key means to an architecture: the plan of a model
//! knows that.

pub mod checkpoint;
mod dequantise;
pub mod error;
#[doc(hidden)]
pub mod fuzz;
pub mod gguf;
pub mod json;
#[expect(
    unsafe_code,
    reason = "mapping a file into memory is unsafe by nature; the file states why it is done"
)]
mod mmap;
mod names;
pub mod open;
pub mod safetensors;

pub use checkpoint::{Checkpoint, StaticFp8};
pub use error::LoadError;
pub use gguf::GgufFile;
pub use mmap::map_file;
pub use open::{HfFiles, ModelFiles, ModelKind, hf_files, open};
pub use safetensors::SafetensorsCheckpoint;
