//! CPU kernels and CPU attention backends of headway.
//!
//! Arrow: depends on `headway-attention` and `headway-tensor`. `kernels/` holds the `unsafe` code,
//! `backends/` one folder of safe code per attention backend.

pub mod backends;
mod exec;
pub mod kernels;
mod ops;
#[expect(unsafe_code, reason = "a region's closure is borrowed by threads that outlive it")]
pub mod pool;
pub mod processor;

pub use backends::{CpuAttn, CpuMla, Mamba2Attn, register};
pub use exec::{CpuExec, CpuOptions};
pub use kernels::isa::{Isa, IsaError};
pub use pool::Pool;
