//! Elsewhere than on Linux and x86-64 there is no extension module to call: the wheel's are refused before they are opened.

use super::catch::Kernel;
use headway_ffi_shim::torch::Value;
use std::ffi::c_void;

/// Calls nothing: [`super::catch::Catch::of`] has refused the module.
///
/// # Safety
/// None is needed.
pub(super) unsafe fn call(_: Kernel, _: &mut [Value], _: u64, _: u64) -> Option<*mut c_void> {
    None
}

/// Ends nothing.
///
/// # Safety
/// None is needed.
pub(super) unsafe fn delete(_: *mut c_void) {}
