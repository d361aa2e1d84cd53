//! The protocol's C structs, as in `dlpack.h` 1.0, and the names of dtypes and devices.

use super::DlPackError;
use crate::{DType, Device};
use std::ffi::c_void;

/// The consumer must not write the data.
pub const FLAG_READ_ONLY: u64 = 1;

/// Version of the protocol that a tensor follows.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLPackVersion {
    /// Structs of another major version may lie differently.
    pub major: u32,
    /// Grows with additions.
    pub minor: u32,
}

/// Where data lies.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDevice {
    /// 1: CPU, 2: CUDA, 3: pinned host memory of CUDA, …
    pub device_type: i32,
    /// Which one.
    pub device_id: i32,
}

/// Type of an element.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDataType {
    /// 0: signed, 1: unsigned, 2: float, 4: bfloat, 10: float8_e4m3fn, 12: float8_e5m2, …
    pub code: u8,
    /// Bits of an element.
    pub bits: u8,
    /// Elements side by side; 1 but for vector types.
    pub lanes: u16,
}

/// A tensor that someone else owns.
#[repr(C)]
#[derive(Debug)]
pub struct DLTensor {
    /// Memory; the first element lies `byte_offset` after it.
    pub data: *mut c_void,
    /// Where it is.
    pub device: DLDevice,
    /// Number of dimensions.
    pub ndim: i32,
    /// Type of an element.
    pub dtype: DLDataType,
    /// `[ndim]`.
    pub shape: *mut i64,
    /// `[ndim]`, in elements; null: row-major without gaps.
    pub strides: *mut i64,
    /// Bytes before the first element.
    pub byte_offset: u64,
}

/// A tensor with the function that gives it back; the unversioned protocol.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// The producer's own.
    pub manager_ctx: *mut c_void,
    /// Called once, by the consumer, with this struct.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// A tensor with the function that gives it back; version 1.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    /// Version that the rest follows.
    pub version: DLPackVersion,
    /// The producer's own.
    pub manager_ctx: *mut c_void,
    /// Called once, by the consumer, with this struct.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    /// [`FLAG_READ_ONLY`], …
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

const DTYPES: [(DType, u8, u8); 9] = [
    (DType::F32, 2, 32),
    (DType::F16, 2, 16),
    (DType::BF16, 4, 16),
    (DType::F8E4M3, 10, 8),
    (DType::F8E5M2, 12, 8),
    (DType::I8, 0, 8),
    (DType::I32, 0, 32),
    (DType::I64, 0, 64),
    (DType::U8, 1, 8),
];

pub(super) fn dtype_in(d: DLDataType) -> Result<DType, DlPackError> {
    let known = DTYPES.iter().find(|(_, code, bits)| (*code, *bits, 1) == (d.code, d.bits, d.lanes));
    known.map(|k| k.0).ok_or(DlPackError::DType { code: d.code, bits: d.bits, lanes: d.lanes })
}

/// `None` for a dtype that the protocol has no code for.
pub(super) fn dtype_out(d: DType) -> Option<DLDataType> {
    DTYPES.iter().find(|k| k.0 == d).map(|&(_, code, bits)| DLDataType { code, bits, lanes: 1 })
}

pub(super) fn device_in(d: DLDevice) -> Result<Device, DlPackError> {
    match (d.device_type, u32::try_from(d.device_id)) {
        (1 | 3, _) => Ok(Device::CPU),
        (2, Ok(index)) => Ok(Device { kind: "cuda", index }),
        (other, _) => Err(DlPackError::Device(other)),
    }
}

/// `None` for a device that the protocol has no number for.
pub(super) fn device_out(d: Device) -> Option<DLDevice> {
    let device_type = match d.kind {
        "cpu" => 1,
        "cuda" => 2,
        _ => return None,
    };
    Some(DLDevice { device_type, device_id: i32::try_from(d.index).ok()? })
}
