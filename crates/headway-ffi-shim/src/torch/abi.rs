//! Values, statuses, and the numbers of types and devices.

/// 0: done; else the call failed.
pub type Status = i32;
/// Done.
pub const OK: Status = 0;
/// Failed; [`headway_torch_error`](super::headway_torch_error) has the words.
pub const FAILED: Status = 1;

/// A value of a kernel's stack: a number's bits, a tensor's or list's handle, null or a `malloc`ed cell for an optional.
pub type Value = u64;

/// The version that modules are told: 2.14.0, a byte each from the top.
pub const ABI_VERSION: u64 = 2 << 56 | 14 << 48;

/// The number of CUDA as a device type.
pub const CUDA: i32 = 1;

/// Numbers of element types, PyTorch's own.
pub mod dtype {
    /// uint8.
    pub const U8: i32 = 0;
    /// int32.
    pub const I32: i32 = 3;
    /// float16.
    pub const F16: i32 = 5;
    /// float32.
    pub const F32: i32 = 6;
    /// bfloat16.
    pub const BF16: i32 = 15;
    /// float8 e4m3, no infinities.
    pub const F8E4M3: i32 = 24;

    /// Bytes of an element; `None` for a number that is no type's.
    pub const fn size(dtype: i32) -> Option<i64> {
        Some(match dtype {
            0 | 1 | 11 | 23..=26 | 44 | 45 => 1,
            2 | 5 | 15 | 27 => 2,
            3 | 6 | 8 | 28 => 4,
            4 | 7 | 9 | 29 => 8,
            10 => 16,
            _ => return None,
        })
    }
}
