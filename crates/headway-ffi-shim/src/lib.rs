//! The C functions that compiled kernel modules of other projects import from the program that loads them.
//!
//! The shared library of this crate is opened with `RTLD_GLOBAL` before any module, so that the dynamic linker finds
//! the functions in it: a library crate can't export functions from the program that it is linked into. One folder for
//! each foreign interface:
//!
//! | folder | modules | functions |
//! |---|---|---|
//! | [`tvm`] | FlashInfer's | TVM-FFI's C ABI |
//! | [`torch`] | vLLM's FlashAttention-3 and FlashMLA | PyTorch's stable C ABI (`docs/torch-abi.md`) |
//!
//! Linked as a Rust library it gives the ABIs' types to whoever calls such modules; the functions then are in the
//! program twice and its own copies are never used.
//!
//! No function here unwinds; none allocates on a device.

#[expect(unsafe_code, reason = "functions of a C interface take pointers")]
pub mod torch;
#[expect(unsafe_code, reason = "functions of a C interface take pointers")]
pub mod tvm;

/// The file name of this crate's shared library.
pub const FILE: &str = "libheadway_ffi_shim.so";
