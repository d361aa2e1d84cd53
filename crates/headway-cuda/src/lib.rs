//! headway on NVIDIA GPUs: the device, kernels compiled for it at run time, the operations of models, attention
//! backends.
//!
//! Nothing of the CUDA toolkit is needed to build. The driver, NVRTC and cuBLASLt are loaded at run time; a machine
//! without them gets an error that says what is missing.
//!
//! Arrow: depends on `headway-attention` and `headway-tensor`. `csrc/` holds the kernels, `kernels/` the `unsafe` code
//! that launches them, `backends/` one folder of safe code per attention backend.

pub mod backends;
pub mod compile;
#[expect(unsafe_code, reason = "the driver is a C library")]
pub mod device;
#[expect(unsafe_code, reason = "a launch hands device addresses over")]
pub mod kernels;
pub mod modules;
pub mod ops;
mod versions;

pub use backends::register;
pub use compile::{Arch, KernelSpec};
pub use device::{CudaError, CudaExec, CudaMem, CudaOptions, DeviceInfo, Event, Graph};
pub use kernels::Kernel;
pub use modules::load_shim;
pub use ops::CudaLinear;
pub use versions::versions;
