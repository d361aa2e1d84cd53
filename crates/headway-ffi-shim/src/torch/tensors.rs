//! Handles of tensors, and operations that have functions of their own.

use super::{
    abi::Status,
    call::{fail, give, put, take, zero},
    tensor::Tensor,
};
use std::ffi::c_char;

fn null() -> String {
    "a tensor's handle that is null".into()
}

/// A handle of a tensor that the caller describes; null for a description that is null or no tensor.
///
/// # Safety
/// Null, or alive during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn headway_torch_tensor(described: *const Tensor) -> *mut Tensor {
    // SAFETY: the caller's word.
    let tensor = unsafe { described.as_ref() }.copied();
    let whole = |t: &Tensor| super::call::known(t) && t.sizes().len() as i32 == t.rank && t.bytes().is_some();
    tensor.filter(whole).map_or(std::ptr::null_mut(), give)
}

/// Another handle of the same tensor.
///
/// # Safety
/// The handle is null or alive, the place null or one for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aoti_torch_new_tensor_handle(x: *mut Tensor, to: *mut *mut Tensor) -> Status {
    // SAFETY: the caller's word.
    unsafe { put(to, x.as_ref().copied().map(give).ok_or_else(null)) }
}

/// A handle of no tensor.
///
/// # Safety
/// The place is null or one for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aoti_torch_new_uninitialized_tensor(to: *mut *mut Tensor) -> Status {
    // SAFETY: the caller's word.
    unsafe { put(to, Ok(give(Tensor::UNDEFINED))) }
}

/// Frees a handle; the elements stay.
///
/// # Safety
/// Null, or alive, and not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aoti_torch_delete_tensor_object(x: *mut Tensor) -> Status {
    // SAFETY: the caller's word.
    let _: Option<Tensor> = unsafe { take(x) };
    super::abi::OK
}

/// Part of a dimension.
///
/// # Safety
/// The handle is null or alive, the place null or one for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aoti_torch_aten_narrow(
    x: *mut Tensor,
    d: i64,
    start: i64,
    len: i64,
    to: *mut *mut Tensor,
) -> Status {
    // SAFETY: the caller's word.
    let part = unsafe { x.as_ref() }.ok_or_else(null).and_then(|x| {
        let wrong = || format!("narrow: {len} from {start} on of dimension {d} with sizes {:?}", x.sizes());
        x.narrow(d, start, len).ok_or_else(wrong)
    });
    // SAFETY: the caller's word.
    unsafe { put(to, part.map(give)) }
}

/// Zeros in every element; another number is refused, because no kernel that headway calls asks for one.
///
/// # Safety
/// The handle is null or alive.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aoti_torch_aten_fill__Scalar(x: *mut Tensor, value: f64) -> Status {
    // SAFETY: the caller's word.
    match unsafe { x.as_ref() } {
        None => fail(null()),
        Some(_) if value != 0.0 => fail(format!("fill_ with {value}: headway fills with zeros alone")),
        Some(x) => zero(x).map_or_else(fail, |()| super::abi::OK),
    }
}

/// Refused: backward passes alone pad.
#[unsafe(no_mangle)]
pub extern "C" fn aoti_torch_aten_pad(
    _: *mut Tensor,
    _: *const i64,
    _: i64,
    _: *const c_char,
    _: *mut f64,
    _: *mut *mut Tensor,
) -> Status {
    fail("pad: headway does not offer it, and no forward pass calls it")
}
