//! One device: its context and stream, memory, uploads and reads, events, graphs. Not for kernels or operations.

mod capture;
mod driver;
mod error;
mod event;
mod exec;
mod fault;
mod fill;
mod info;
mod ledger;
mod memory;
mod options;
mod pinned;
mod read;
mod ring;
mod staging;

pub use capture::Graph;
pub(crate) use error::Doing;
pub use error::{CudaError, Result};
pub use event::Event;
pub use exec::CudaExec;
pub(crate) use fault::Indexed;
pub use info::{DeviceInfo, shared_per_block};
pub use memory::CudaMem;
pub use options::{CudaOptions, Progress};
pub(crate) use pinned::Pinned;
pub use staging::RING_BYTES;
