//! Values that cross the interface.

use super::Object;
use std::ffi::{c_char, c_int, c_void};

/// Kinds of [`Any`].
pub mod type_index {
    /// Nothing, or an optional argument that is left out.
    pub const NONE: i32 = 0;
    /// A signed integer of 64 bits.
    pub const INT: i32 = 1;
    /// False or true: 0 or 1.
    pub const BOOL: i32 = 2;
    /// A float of 64 bits.
    pub const FLOAT: i32 = 3;
    /// A borrowed [`DLTensor`](super::DLTensor).
    pub const TENSOR_VIEW: i32 = 7;
    /// Up to 7 bytes of text in the value itself.
    pub const SMALL_STRING: i32 = 11;
    /// From here on the payload is an object with a reference count.
    pub const FIRST_OBJECT: i32 = 64;
    /// An error.
    pub const ERROR: i32 = 67;
    /// An array or a tuple.
    pub const ARRAY: i32 = 71;
}

/// A value of any kind.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Any {
    /// Of [`type_index`].
    pub type_index: i32,
    /// Length of a small string, else 0.
    pub small_len: u32,
    /// The integer, the float's bits, or a pointer.
    pub payload: u64,
}

/// Bytes that someone else owns.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ByteArray {
    /// The first.
    pub data: *const c_char,
    /// How many.
    pub size: usize,
}

/// Where a tensor lies.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDevice {
    /// 1: the host, 2: CUDA.
    pub device_type: i32,
    /// Its number.
    pub device_id: i32,
}

/// An element type.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDataType {
    /// 0: int, 1: unsigned int, 2: float, 4: bfloat.
    pub code: u8,
    /// Its bits.
    pub bits: u8,
    /// Elements in one.
    pub lanes: u16,
}

/// A tensor that someone else owns.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLTensor {
    /// Its first element, before `byte_offset`.
    pub data: *mut c_void,
    /// Where it lies.
    pub device: DLDevice,
    /// Dimensions.
    pub ndim: i32,
    /// Element type.
    pub dtype: DLDataType,
    /// `ndim` sizes.
    pub shape: *const i64,
    /// `ndim` strides, in elements; never null here.
    pub strides: *const i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

/// A function of a module: 0, or −1 after it raised an error. `result` must be none on entry.
pub type SafeCall =
    unsafe extern "C" fn(handle: *mut c_void, args: *const Any, num_args: i32, result: *mut Any) -> c_int;

impl Any {
    /// Nothing.
    pub const NONE: Self = Self { type_index: type_index::NONE, small_len: 0, payload: 0 };

    const fn of(type_index: i32, payload: u64) -> Self {
        Self { type_index, small_len: 0, payload }
    }

    /// An integer.
    pub const fn int(x: i64) -> Self {
        Self::of(type_index::INT, x as u64)
    }

    /// A truth value.
    pub const fn bool(x: bool) -> Self {
        Self::of(type_index::BOOL, x as u64)
    }

    /// A float.
    pub const fn float(x: f64) -> Self {
        Self::of(type_index::FLOAT, x.to_bits())
    }

    /// A tensor, which must outlive the call.
    pub fn tensor(x: &DLTensor) -> Self {
        Self::of(type_index::TENSOR_VIEW, std::ptr::from_ref(x) as u64)
    }

    /// An object, which must outlive the call.
    pub fn object(kind: i32, x: *mut Object) -> Self {
        Self::of(kind, x as u64)
    }

    /// A text of up to 7 bytes; of a longer one its first 7.
    pub fn small_string(text: &str) -> Self {
        let mut bytes = [0; 8];
        let len = text.len().min(7);
        bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
        Self {
            type_index: type_index::SMALL_STRING,
            small_len: len as u32,
            payload: u64::from_ne_bytes(bytes),
        }
    }

    /// Whether the payload is an object with a reference count.
    pub const fn is_object(&self) -> bool {
        self.type_index >= type_index::FIRST_OBJECT
    }
}
