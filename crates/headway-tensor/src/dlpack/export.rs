//! headway's tensors, handed to another library.

use super::ffi::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor, FLAG_READ_ONLY,
    device_out, dtype_out,
};
use crate::{Result, Tensor, TensorError, tensor::MemMut};
use std::{ffi::c_void, ptr::NonNull};

/// What a handed-out struct keeps alive: the tensor, and the arrays that the struct points to.
struct Kept {
    tensor: Tensor,
    shape: [i64; 4],
    strides: [i64; 4],
}

/// A struct that is ready to be handed out. Dropping it gives the tensor back; [`DlExport::into_raw`]
/// hands it over, and then the consumer calls the deleter.
#[derive(Debug)]
pub struct DlExport<M: Managed>(NonNull<M>);

/// One of the two structs.
pub trait Managed: sealed::Sealed {}
impl Managed for DLManagedTensor {}
impl Managed for DLManagedTensorVersioned {}

mod sealed {
    use super::*;

    pub trait Sealed {
        /// Frees the struct and what it keeps.
        ///
        /// # Safety
        /// `this` came out of `Box::into_raw`, and is not used again.
        unsafe fn free(this: *mut Self);
    }

    impl Sealed for DLManagedTensor {
        unsafe fn free(this: *mut Self) {
            // SAFETY: both boxes were leaked by `to_dlpack`; the caller uses neither again.
            unsafe {
                drop(Box::from_raw((*this).manager_ctx.cast::<Kept>()));
                drop(Box::from_raw(this));
            }
        }
    }

    impl Sealed for DLManagedTensorVersioned {
        unsafe fn free(this: *mut Self) {
            // SAFETY: as above, leaked by `to_dlpack_versioned`.
            unsafe {
                drop(Box::from_raw((*this).manager_ctx.cast::<Kept>()));
                drop(Box::from_raw(this));
            }
        }
    }
}

impl<M: Managed> DlExport<M> {
    /// The struct, for the consumer to give back by its deleter.
    pub fn into_raw(self) -> *mut M {
        let raw = self.0.as_ptr();
        std::mem::forget(self);
        raw
    }

    /// The struct, still owned by this.
    pub fn as_ptr(&self) -> *mut M {
        self.0.as_ptr()
    }
}

impl<M: Managed> Drop for DlExport<M> {
    fn drop(&mut self) {
        // SAFETY: the struct was leaked when this was made and not handed over, or `into_raw` would
        // have forgotten this.
        unsafe { M::free(self.0.as_ptr()) }
    }
}

unsafe extern "C" fn deleter<M: Managed>(this: *mut M) {
    if !this.is_null() {
        // SAFETY: the protocol's: a consumer passes the struct that it got, once.
        unsafe { M::free(this) }
    }
}

/// Leaks what the struct keeps and describes the tensor in it.
fn describe(tensor: Tensor) -> Result<(DLTensor, *mut c_void)> {
    let unknown = |what: String| TensorError::Unsupported(format!("DLPack has no name for {what}"));
    let dtype: DLDataType = dtype_out(tensor.dtype()).ok_or_else(|| unknown(tensor.dtype().to_string()))?;
    let device = tensor.view().device();
    let device: DLDevice = device_out(device).ok_or_else(|| unknown(device.to_string()))?;
    let ndim = tensor.shape().len() as i32;
    let mut kept = Kept { shape: [1; 4], strides: [1; 4], tensor };
    let view = kept.tensor.view();
    for (k, n) in kept.shape.iter_mut().zip(view.shape()) {
        *k = *n as i64;
    }
    for (k, n) in kept.strides.iter_mut().zip(view.strides()) {
        *k = *n as i64;
    }
    let kept = Box::into_raw(Box::new(kept));
    // SAFETY: just leaked, and nobody else has the pointer yet.
    let k = unsafe { &mut *kept };
    let data = match k.tensor.view_mut().into_mem() {
        MemMut::Host(bytes) => bytes.as_mut_ptr().cast(),
        MemMut::Dev(d, offset) => (d.addr() as usize + offset) as *mut c_void,
    };
    let (shape, strides) = (k.shape.as_mut_ptr(), k.strides.as_mut_ptr());
    Ok((DLTensor { data, device, ndim, dtype, shape, strides, byte_offset: 0 }, kept.cast()))
}

/// Hands a tensor out by the unversioned protocol, which lets the consumer write.
///
/// # Errors
/// A dtype or device that the protocol has no name for.
pub fn to_dlpack(tensor: Tensor) -> Result<DlExport<DLManagedTensor>> {
    let (dl_tensor, manager_ctx) = describe(tensor)?;
    let deleter: unsafe extern "C" fn(*mut DLManagedTensor) = deleter;
    let managed = Box::new(DLManagedTensor { dl_tensor, manager_ctx, deleter: Some(deleter) });
    Ok(DlExport(NonNull::from(Box::leak(managed))))
}

/// Hands a tensor out by version 1; `read_only` forbids the consumer to write.
///
/// # Errors
/// As [`to_dlpack`].
pub fn to_dlpack_versioned(tensor: Tensor, read_only: bool) -> Result<DlExport<DLManagedTensorVersioned>> {
    let (dl_tensor, manager_ctx) = describe(tensor)?;
    let deleter: unsafe extern "C" fn(*mut DLManagedTensorVersioned) = deleter;
    let managed = Box::new(DLManagedTensorVersioned {
        version: DLPackVersion { major: 1, minor: 0 },
        manager_ctx,
        deleter: Some(deleter),
        flags: if read_only { FLAG_READ_ONLY } else { 0 },
        dl_tensor,
    });
    Ok(DlExport(NonNull::from(Box::leak(managed))))
}
