//! Kernels on the device: loading, launching, and one safe wrapper file a family that checks shapes, dtypes, devices
//! and alignment before a launch.

pub mod attention;
pub mod cache;
pub(crate) mod elements;
mod kernel;
mod params;

pub use kernel::{Kernel, Loaded};
pub(crate) use params::kernel_params;
