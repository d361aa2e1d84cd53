//! The frame of assembly between a kernel and Rust, for the one system that extension modules are built for.

use super::catch::Kernel;
use headway_ffi_shim::torch::Value;
use std::ffi::c_void;

unsafe extern "C" {
    fn _Unwind_SetGR(context: *mut c_void, register: i32, value: u64);
    fn _Unwind_SetIP(context: *mut c_void, at: u64);
    fn _Unwind_DeleteException(exception: *mut c_void);
    /// Calls a kernel: 0, or 1 with what was thrown.
    fn headway_catch_call(
        kernel: Kernel,
        stack: *mut Value,
        inputs: u64,
        outputs: u64,
        thrown: *mut *mut c_void,
    ) -> i32;
    /// Where the call goes on when something was thrown; no function.
    fn headway_catch_landing();
}

/// Bits of `actions`: looking for a handler, and that this frame is it.
const SEARCH: i32 = 1;
const HANDLER: i32 = 4;
/// Answers: go on; this frame has a handler; go there.
const CONTINUE: i32 = 8;
const FOUND: i32 = 6;
const INSTALL: i32 = 7;

/// The routine of the frame: it catches everything that is thrown, and nothing that ends the thread.
unsafe extern "C" fn personality(
    _version: i32,
    actions: i32,
    _class: u64,
    exception: *mut c_void,
    context: *mut c_void,
) -> i32 {
    if actions & SEARCH != 0 {
        return FOUND;
    }
    if actions & HANDLER == 0 {
        return CONTINUE;
    }
    // SAFETY: the unwinder's context; register 0 is rax, which it lets routines set.
    unsafe {
        _Unwind_SetGR(context, 0, exception as u64);
        _Unwind_SetIP(context, headway_catch_landing as *const () as u64);
    }
    INSTALL
}

// rbx keeps where the exception goes; at the landing the unwinder has restored it with the frame.
std::arch::global_asm!(
    ".pushsection .text.headway_catch_call,\"ax\",@progbits",
    ".p2align 4",
    ".globl headway_catch_call",
    ".hidden headway_catch_call",
    ".type headway_catch_call,@function",
    "headway_catch_call:",
    ".cfi_startproc",
    ".cfi_personality 0x1b, {personality}",
    "push rbp",
    ".cfi_def_cfa_offset 16",
    ".cfi_offset rbp, -16",
    "mov rbp, rsp",
    ".cfi_def_cfa_register rbp",
    "push rbx",
    ".cfi_offset rbx, -24",
    "sub rsp, 8",
    "mov rbx, r8",
    "mov rax, rdi",
    "mov rdi, rsi",
    "mov rsi, rdx",
    "mov rdx, rcx",
    "call rax",
    "xor eax, eax",
    "2:",
    "mov rbx, qword ptr [rbp - 8]",
    "leave",
    ".cfi_def_cfa rsp, 8",
    "ret",
    ".cfi_def_cfa rbp, 16",
    ".globl headway_catch_landing",
    ".hidden headway_catch_landing",
    "headway_catch_landing:",
    "mov qword ptr [rbx], rax",
    "mov eax, 1",
    "jmp 2b",
    ".cfi_endproc",
    ".size headway_catch_call, . - headway_catch_call",
    ".popsection",
    personality = sym personality,
);

/// Calls a kernel: what it threw, if it did.
///
/// # Safety
/// The stack has the kernel's arguments, and room for its results.
pub(super) unsafe fn call(
    kernel: Kernel,
    stack: &mut [Value],
    inputs: u64,
    outputs: u64,
) -> Option<*mut c_void> {
    let mut thrown = std::ptr::null_mut();
    // SAFETY: the caller's word; exceptions end in the frame.
    let threw = unsafe { headway_catch_call(kernel, stack.as_mut_ptr(), inputs, outputs, &mut thrown) };
    (threw != 0).then_some(thrown)
}

/// Ends an exception of another language than C++.
///
/// # Safety
/// Caught, and not ended.
pub(super) unsafe fn delete(exception: *mut c_void) {
    // SAFETY: the caller's word.
    unsafe { _Unwind_DeleteException(exception) }
}
