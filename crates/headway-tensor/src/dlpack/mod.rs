//! DLPack: tensors in and out of headway without a copy, as other libraries (PyTorch, NumPy, JAX)
//! hand them over. Version 0 (`dltensor`) and version 1 (`dltensor_versioned`) of the protocol.
//!
//! [`DlTensor`] takes another library's tensor over and gives it back when dropped; [`to_dlpack`] and
//! [`to_dlpack_versioned`] hand a headway [`crate::Tensor`] out. Host memory is read in place; of device memory the address is
//! passed on. Not for files, and not for streams: whoever hands device memory over waits for its work.

mod export;
mod ffi;
mod import;

pub use export::{DlExport, to_dlpack, to_dlpack_versioned};
pub use ffi::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor, FLAG_READ_ONLY,
};
pub use import::DlTensor;

/// Why a tensor of another library can't be taken over.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DlPackError {
    /// A null pointer where a tensor, its data or its shape should be.
    #[error("DLPack: {0} is null")]
    Null(&'static str),
    /// A version of the protocol whose structs may lie differently.
    #[error("DLPack: version {0}.{1} is not supported; supported: 1.x, and the unversioned protocol")]
    Version(u32, u32),
    /// Memory that headway has no name for.
    #[error("DLPack: device type {0} is not supported; supported: 1 (CPU), 2 (CUDA), 3 (CUDA host memory)")]
    Device(i32),
    /// An element type that headway has no name for.
    #[error(
        "DLPack: dtype (code {code}, {bits} bits, {lanes} lanes) is not supported; supported: float32, float16, \
         bfloat16, float8_e4m3fn, float8_e5m2, int8, int32, int64, uint8"
    )]
    DType {
        /// Kind of number.
        code: u8,
        /// Bits of an element.
        bits: u8,
        /// Elements side by side.
        lanes: u16,
    },
    /// More dimensions than headway has, or a negative number of them.
    #[error("DLPack: {0} dimensions; at most 4 are supported")]
    Rank(i32),
    /// A shape that doesn't fit in memory, or has a negative dimension.
    #[error("DLPack: shape {0:?} is not one that memory can hold")]
    Shape(Vec<i64>),
    /// Strides that headway's views don't have.
    #[error(
        "DLPack: strides {strides:?} of shape {shape:?} are not supported; the innermost dimension must be \
         contiguous and no stride negative or 0: make a contiguous copy"
    )]
    Strides {
        /// The shape.
        shape: Vec<i64>,
        /// The strides, in elements.
        strides: Vec<i64>,
    },
    /// Data that doesn't begin at a multiple of the element's size.
    #[error("DLPack: data at {addr:#x} is not aligned to its elements of {size} bytes")]
    Alignment {
        /// Address of the first element.
        addr: u64,
        /// Bytes of an element.
        size: usize,
    },
    /// Writing to what was handed over for reading.
    #[error("DLPack: the tensor is read-only")]
    ReadOnly,
}
