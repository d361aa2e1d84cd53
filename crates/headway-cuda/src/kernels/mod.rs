//! Kernels on the device: loading, launching, and one safe wrapper file a family that checks shapes, dtypes, devices
//! and alignment before a launch.

pub mod attention;
pub mod cache;
pub(crate) mod elements;
pub(crate) mod flash_attn;
pub mod flash_mla;
pub(crate) mod flashinfer;
mod kernel;
pub mod memory;
pub mod mla;
pub mod ops;
mod params;
mod specs;
pub mod state_space;
pub mod triton;

#[cfg(test)]
pub(crate) use kernel::MOST_WORDS;
pub use kernel::{Kernel, Loaded};
pub(crate) use params::kernel_params;
pub use specs::specs;
