//! Tensors as the library gets them.

use crate::{
    CudaExec,
    device::{CudaError, Result},
};
use headway_ffi_shim::torch::{Tensor as Described, dtype};
use headway_tensor::{Exec, Tensor, View};
use std::ffi::c_void;

pub(super) fn ordinal(cx: &CudaExec) -> u32 {
    cx.device().index
}

pub(super) fn stream(cx: &CudaExec) -> *mut c_void {
    cx.stream().cu_stream().cast()
}

pub(super) fn described(cx: &CudaExec, addr: u64, kind: i32, sizes: &[usize]) -> Result<Described> {
    let mut of = [0; 4];
    of.iter_mut().zip(sizes).for_each(|(to, &n)| *to = n as i64);
    Described::contiguous(addr, kind, ordinal(cx) as i32, &of[..sizes.len().min(4)])
        .ok_or_else(|| CudaError::Argument(format!("FlashAttention-3: a tensor of {sizes:?}")))
}

pub(super) fn ints(cx: &CudaExec, x: &View<i32>, sizes: &[usize]) -> Result<Described> {
    described(cx, x.addr(), dtype::I32, sizes)
}

/// With other strides, in elements.
pub(super) fn strided(mut x: Described, strides: &[usize]) -> Described {
    x.strides.iter_mut().zip(strides).for_each(|(to, &s)| *to = s as i64);
    x
}

pub(super) fn bytes_of(x: &Tensor) -> Result<(u64, u64)> {
    let addr = x.view().device_addr().ok_or_else(|| CudaError::Argument("a workspace on the host".into()))?;
    Ok((addr, x.bytes() as u64))
}
