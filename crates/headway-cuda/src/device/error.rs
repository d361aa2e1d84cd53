//! What can go wrong on a CUDA device: what was asked, the driver's or compiler's own words, and what to do.

use crate::modules::{ModuleError, extension::ExtensionError};
use cudarc::driver::{DriverError, sys::CUresult};
use headway_attention::AttentionError;
use headway_tensor::{Device, TensorError};

/// Result of a call of this crate.
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

/// A failure of the driver, the compiler or a library of the toolkit, or an argument that they can't take.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library is not there.
    #[error(
        "no NVIDIA driver: the library libcuda could not be loaded; install the driver (release {release} or later), or use --device cpu",
        release = super::driver::RELEASE
    )]
    NoDriver,
    /// The driver is of an earlier CUDA version.
    #[error(
        "the NVIDIA driver is too old: it offers CUDA {found}, and CUDA {needed} is needed; install release {release} or later",
        release = super::driver::RELEASE
    )]
    DriverTooOld {
        /// What it offers.
        found: String,
        /// What is needed.
        needed: String,
    },
    /// No such device.
    #[error("no device cuda:{ordinal}: {}", devices(*count, says))]
    NoDevice {
        /// What was asked for.
        ordinal: u32,
        /// Devices that the driver shows.
        count: u32,
        /// The driver's words, where it shows none.
        says: String,
    },
    /// A library of the toolkit is not there.
    #[error(
        "{library} could not be loaded, and {needed_for} needs it; install it (pip install {package} will do) and put its folder into LD_LIBRARY_PATH"
    )]
    NoLibrary {
        /// Its name.
        library: &'static str,
        /// What it is for.
        needed_for: &'static str,
        /// The package that has it.
        package: &'static str,
    },
    /// The driver refused a call, or work before it failed.
    #[error("{doing}: the driver says {name} ({words})")]
    Driver {
        /// What was asked.
        doing: String,
        /// The error's name.
        name: String,
        /// The driver's words for it.
        words: String,
    },
    /// Device memory is used up.
    #[error("out of memory on {device}: {bytes} bytes asked for, {free} of {total} are free")]
    OutOfMemory {
        /// The device.
        device: Device,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes free.
        free: u64,
        /// Bytes there are.
        total: u64,
    },
    /// A kernel does not compile.
    #[error("{file} does not compile for {arch} with {options}:\n{log}")]
    Compile {
        /// Its source.
        file: String,
        /// The architecture.
        arch: String,
        /// Compiler options.
        options: String,
        /// The compiler's words.
        log: String,
    },
    /// NVRTC failed otherwise.
    #[error("{doing}: NVRTC says {words}")]
    Nvrtc {
        /// What was asked.
        doing: String,
        /// Its name for the error.
        words: String,
    },
    /// cuBLASLt refused a call.
    #[error("{doing}: cuBLASLt says {words}")]
    Blas {
        /// What was asked.
        doing: String,
        /// Its name for the error.
        words: String,
    },
    /// A module of other kernels.
    #[error(transparent)]
    Module(#[from] ModuleError),
    /// An extension module.
    #[error(transparent)]
    Extension(#[from] ExtensionError),
    /// An argument that can't be.
    #[error("{0}")]
    Argument(String),
    /// Tensors that don't fit the operation.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

fn devices(count: u32, says: &str) -> String {
    match count {
        0 => format!("the driver shows no device ({says}); CUDA_VISIBLE_DEVICES may hide them"),
        1 => "the driver shows one, cuda:0".into(),
        n => format!("the driver shows cuda:0 to cuda:{}", n - 1),
    }
}

impl CudaError {
    /// A driver's error, with what was asked of it.
    pub fn driver(doing: impl Into<String>, e: DriverError) -> Self {
        let text = |words: std::result::Result<&std::ffi::CStr, DriverError>| match words {
            Ok(words) => words.to_string_lossy().into_owned(),
            Err(_) => "without words".into(),
        };
        let name = match e.error_name() {
            Ok(name) => name.to_string_lossy().into_owned(),
            Err(_) => format!("error {}", e.0 as u32),
        };
        Self::Driver { doing: doing.into(), name, words: text(e.error_string()) }
    }
}

/// Says what was asked when the driver refuses.
pub(crate) trait Doing<T> {
    fn doing(self, what: &str) -> Result<T>;
}

impl<T> Doing<T> for std::result::Result<T, DriverError> {
    fn doing(self, what: &str) -> Result<T> {
        self.map_err(|e| CudaError::driver(what, e))
    }
}

/// Whether the driver says that memory is used up.
pub(crate) fn is_out_of_memory(e: &DriverError) -> bool {
    e.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY
}

impl CudaError {
    /// Whether memory was used up, in whoever's words: the driver loads code at a kernel's first launch, cuBLASLt and other projects'
    /// modules allocate by themselves.
    fn is_about_memory(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } => true,
            Self::Driver { name, .. } => name == "CUDA_ERROR_OUT_OF_MEMORY",
            Self::Blas { words, .. } => words == "CUBLAS_STATUS_ALLOC_FAILED",
            Self::Module(ModuleError::Raised { message: words, .. })
            | Self::Extension(ExtensionError::Failed { why: words, .. }) => {
                let says = ["out of memory", "CUDA_ERROR_OUT_OF_MEMORY", "cudaErrorMemoryAllocation"];
                says.iter().any(|w| words.contains(w))
            }
            _ => false,
        }
    }
}

impl From<CudaError> for TensorError {
    fn from(e: CudaError) -> Self {
        match e {
            CudaError::Tensor(e) => e,
            CudaError::Argument(why) => Self::Unsupported(why),
            CudaError::OutOfMemory { device, bytes, free, total } => {
                Self::OutOfMemory { what: format!("{device} ({free} of {total} bytes are free)"), bytes }
            }
            e if e.is_about_memory() => Self::OutOfMemory { what: e.to_string(), bytes: 0 },
            e => Self::Device { kind: "cuda", failure: e.to_string() },
        }
    }
}

impl From<CudaError> for AttentionError {
    fn from(e: CudaError) -> Self {
        TensorError::from(e).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_there_is() {
        let none = CudaError::NoDevice { ordinal: 0, count: 0, says: "CUDA_ERROR_NO_DEVICE".into() };
        assert!(none.to_string().contains("shows no device (CUDA_ERROR_NO_DEVICE)"), "{none}");
        let few = CudaError::NoDevice { ordinal: 4, count: 2, says: String::new() };
        assert_eq!(few.to_string(), "no device cuda:4: the driver shows cuda:0 to cuda:1");
        let one = CudaError::NoDevice { ordinal: 7, count: 1, says: String::new() };
        assert_eq!(one.to_string(), "no device cuda:7: the driver shows one, cuda:0");
    }

    #[test]
    fn memory_and_arguments_keep_their_kind_outside_the_crate() {
        let device = Device { kind: "cuda", index: 1 };
        let oom = CudaError::OutOfMemory { device, bytes: 100, free: 7, total: 50 };
        let e = TensorError::from(oom);
        assert!(matches!(e, TensorError::OutOfMemory { bytes: 100, .. }));
        assert!(e.to_string().contains("cuda:1 (7 of 50 bytes are free)"), "{e}");
        // Whoever's words they are; a step's request is given up for them, and not all of them.
        let raised = |message: &str| {
            let (path, function, kind) = ("fa2.so".into(), "paged_run".into(), "RuntimeError".into());
            CudaError::Module(ModuleError::Raised { path, function, kind, message: message.into() })
        };
        let blas = |words: &str| CudaError::Blas { doing: "a product".into(), words: words.into() };
        for e in [
            CudaError::Driver {
                doing: "launching attend".into(),
                name: "CUDA_ERROR_OUT_OF_MEMORY".into(),
                words: "out of memory".into(),
            },
            raised("CUDA Error: out of memory (2) in cudaFuncSetAttribute"),
            raised("cudaErrorMemoryAllocation"),
            CudaError::Extension(ExtensionError::Failed {
                path: "fa3.so".into(),
                function: "fwd",
                why: "a tensor: CUDA_ERROR_OUT_OF_MEMORY".into(),
            }),
            blas("CUBLAS_STATUS_ALLOC_FAILED"),
        ] {
            let says = e.to_string();
            let e = TensorError::from(e);
            assert!(e.is_out_of_memory() && e.to_string() == format!("out of memory: {says}"), "{e}");
        }
        let launch = CudaError::Driver {
            doing: "launching attend".into(),
            name: "CUDA_ERROR_ILLEGAL_ADDRESS".into(),
            words: "an illegal memory access was encountered".into(),
        };
        for e in [launch, raised("Buffer overflow"), blas("CUBLAS_STATUS_EXECUTION_FAILED")] {
            assert!(!TensorError::from(e).is_out_of_memory());
        }
        let e = TensorError::from(CudaError::Argument("no".into()));
        assert_eq!(e, TensorError::Unsupported("no".into()));
        assert!(TensorError::from(CudaError::NoDriver).to_string().starts_with("cuda: no NVIDIA driver"));
    }
}
