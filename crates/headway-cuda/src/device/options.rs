//! How a device is opened.

use std::{fmt, path::PathBuf};

/// Hears, in words, what takes long: a kernel that is compiled for the first time.
pub type Progress = Box<dyn Fn(&str)>;

/// How a [`CudaExec`](super::CudaExec) is made; the default is `cuda:0`, silent, with kernels kept in the user's
/// cache folder.
#[derive(Default)]
pub struct CudaOptions {
    /// Which device, as the driver counts them (`CUDA_VISIBLE_DEVICES` applies).
    pub ordinal: u32,
    /// Whether a row's result must not depend on what else is in the batch.
    pub batch_invariant: bool,
    /// Where compiled kernels are kept; `None`: as [`default_folder`](crate::compile::default_folder) says.
    pub kernel_cache: Option<PathBuf>,
    /// Bytes that may be allocated, all together: the rest is for others. `None`: what the device has.
    pub memory_limit: Option<u64>,
    /// Bytes of shared memory that a block may ask for, at most: how a device that has less would be used, tried on one
    /// that has more. `None`: what the device has.
    pub shared_limit: Option<u32>,
    /// Hears what is compiled.
    pub progress: Option<Progress>,
}

impl fmt::Debug for CudaOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaOptions")
            .field("ordinal", &self.ordinal)
            .field("batch_invariant", &self.batch_invariant)
            .field("kernel_cache", &self.kernel_cache)
            .field("memory_limit", &self.memory_limit)
            .field("shared_limit", &self.shared_limit)
            .field("progress", &self.progress.is_some())
            .finish()
    }
}
