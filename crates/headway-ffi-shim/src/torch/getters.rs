//! What modules ask of a tensor.

use super::{abi::Status, call::put, tensor::Tensor};
use std::ffi::c_void;

/// Asks a tensor, and writes the answer.
///
/// # Safety
/// The handle is null or alive, the place null or one for the answer.
unsafe fn ask<T>(
    handle: *mut Tensor,
    to: *mut T,
    f: impl FnOnce(&mut Tensor) -> Result<T, String>,
) -> Status {
    // SAFETY: the caller's word.
    let found = match unsafe { handle.as_mut() } {
        Some(tensor) => f(tensor),
        None => Err("a tensor's handle that is null".into()),
    };
    // SAFETY: the caller's word.
    unsafe { put(to, found) }
}

fn no_dimension(x: &Tensor, d: i64) -> String {
    format!("dimension {d} of a tensor that has {}", x.rank)
}

macro_rules! getters {
    ($($(#[$doc:meta])* $name:ident($tensor:ident $(, $d:ident: $dt:ty)?) -> $answer:ty { $body:expr })*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// The handle is null or alive, the place null or one for the answer.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(handle: *mut Tensor $(, $d: $dt)?, to: *mut $answer) -> Status {
            // SAFETY: the caller's word.
            unsafe { ask(handle, to, |$tensor| $body) }
        }
    )*};
}

getters! {
    /// Address of the first element.
    aoti_torch_get_data_ptr(x) -> *mut c_void { Ok(x.data as *mut c_void) }
    /// Address of the first element, to write.
    torch_get_mutable_data_ptr(x) -> *mut c_void { Ok(x.data as *mut c_void) }
    /// Address of the first element, to read.
    torch_get_const_data_ptr(x) -> *const c_void { Ok(x.data as *const c_void) }
    /// Dimensions.
    aoti_torch_get_dim(x) -> i64 { Ok(i64::from(x.rank.max(0))) }
    /// The sizes, which are the tensor's own.
    aoti_torch_get_sizes(x) -> *mut i64 { Ok(x.sizes.as_mut_ptr()) }
    /// Elements along a dimension; below 0 it counts from the end.
    aoti_torch_get_size(x, d: i64) -> i64 {
        x.dimension(d).map(|i| x.sizes[i]).ok_or_else(|| no_dimension(x, d))
    }
    /// Elements from one to the next along a dimension; below 0 it counts from the end.
    aoti_torch_get_stride(x, d: i64) -> i64 {
        x.dimension(d).map(|i| x.strides[i]).ok_or_else(|| no_dimension(x, d))
    }
    /// The element type's number.
    aoti_torch_get_dtype(x) -> i32 { Ok(x.dtype) }
    /// The device type's number.
    aoti_torch_get_device_type(x) -> i32 { Ok(x.device_type) }
    /// The device's number.
    aoti_torch_get_device_index(x) -> i32 { Ok(x.device_index) }
    /// Whether there are no gaps.
    aoti_torch_is_contiguous(x) -> bool { Ok(x.is_contiguous()) }
    /// Whether it is there.
    aoti_torch_is_defined(x) -> bool { Ok(x.rank >= 0) }
}
