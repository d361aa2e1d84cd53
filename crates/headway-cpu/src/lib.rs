//! CPU kernels and CPU attention backends of headway.
//!
//! Arrow: depends on `headway-attention` and `headway-tensor`. `kernels/` holds the `unsafe` code,
//! `backends/` one folder of safe code per attention backend.

pub mod kernels;

pub use kernels::isa::{Isa, IsaError};
