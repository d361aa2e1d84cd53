//! What a call of a kernel runs on. Per thread: a module asks on the thread that called it.

use super::abi::{CUDA, FAILED, OK, Status, dtype};
use super::tensor::Tensor;
use std::{
    cell::{Cell, RefCell},
    ffi::c_void,
    ptr::null_mut,
    sync::atomic::{AtomicUsize, Ordering},
};

/// Places of new tensors begin at multiples of so many bytes.
const ALIGNED: u64 = 256;

/// A call: where it runs and the memory that it may use.
#[derive(Debug)]
#[repr(C)]
pub struct Call {
    /// The device's number.
    pub device: i32,
    /// The stream to launch on.
    pub stream: *mut c_void,
    /// Where the first new tensor goes; 0: into the scratch memory, as the others do.
    pub first: u64,
    /// Bytes there.
    pub first_bytes: u64,
    /// Where new tensors go, one behind another.
    pub scratch: u64,
    /// Bytes there.
    pub scratch_bytes: u64,
    /// Of which so many are taken: 0 at first.
    pub used: u64,
    /// Zeros so many bytes at an address on the stream. 0: done.
    pub zero: unsafe extern "C" fn(stream: *mut c_void, addr: u64, bytes: u64) -> Status,
}

thread_local! {
    static CALL: Cell<*mut Call> = const { Cell::new(null_mut()) };
    static WORDS: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Handles that were given out and not freed.
static ALIVE: AtomicUsize = AtomicUsize::new(0);

/// Keeps the words of a failure.
pub(super) fn fail(words: impl Into<String>) -> Status {
    WORDS.set(words.into());
    FAILED
}

/// A handle of a value.
pub(super) fn give<T>(x: T) -> *mut T {
    ALIVE.fetch_add(1, Ordering::Relaxed);
    Box::into_raw(Box::new(x))
}

/// Takes a handle back; null is nothing.
///
/// # Safety
/// From [`give`], and not taken back before.
pub(super) unsafe fn take<T>(handle: *mut T) -> Option<T> {
    if handle.is_null() {
        return None;
    }
    ALIVE.fetch_sub(1, Ordering::Relaxed);
    // SAFETY: the caller's word.
    Some(*unsafe { Box::from_raw(handle) })
}

/// Handles of tensors, lists and libraries that are alive.
#[unsafe(no_mangle)]
pub extern "C" fn headway_torch_alive() -> usize {
    ALIVE.load(Ordering::Relaxed)
}

/// Sets this thread's call, or null; the one before.
///
/// # Safety
/// A call stays where it is, and nobody else writes to it, until another is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn headway_torch_enter(call: *mut Call) -> *mut Call {
    WORDS.with_borrow_mut(String::clear);
    CALL.replace(call)
}

/// Copies the words of this thread's last failure, as many bytes as there is room for; how many there are.
///
/// # Safety
/// There is so much room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn headway_torch_error(to: *mut u8, room: usize) -> usize {
    WORDS.with_borrow(|words| {
        if !to.is_null() {
            // SAFETY: the caller's word for the room; the words are elsewhere.
            unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), to, words.len().min(room)) };
        }
        words.len()
    })
}

/// Does something with this thread's call.
fn with_call<R>(f: impl FnOnce(&mut Call) -> Result<R, String>) -> Result<R, String> {
    // SAFETY: whoever set it keeps it, for this thread alone; the functions here don't call each other.
    match unsafe { CALL.get().as_mut() } {
        Some(call) => f(call),
        None => Err("no call is under way on this thread".into()),
    }
}

/// A tensor without gaps in the call's memory.
pub(super) fn allocate(kind: i32, sizes: &[i64]) -> Result<Tensor, String> {
    with_call(|call| {
        let tensor = Tensor::contiguous(0, kind, call.device, sizes);
        let bytes = tensor.and_then(|t| u64::try_from(t.bytes()?).ok());
        let (Some(mut tensor), Some(bytes)) = (tensor, bytes) else {
            return Err(format!("a new tensor of type {kind} with sizes {sizes:?}"));
        };
        if call.first != 0 {
            if bytes > call.first_bytes {
                return Err(format!(
                    "{bytes} bytes for the first new tensor, and {} are there",
                    call.first_bytes
                ));
            }
            tensor.data = std::mem::take(&mut call.first);
            return Ok(tensor);
        }
        let at = call.used.next_multiple_of(ALIGNED);
        let end = at.checked_add(bytes).filter(|&end| end <= call.scratch_bytes);
        let Some(end) = end else {
            return Err(format!(
                "{bytes} bytes for a new tensor of sizes {sizes:?}, and {} of {} are left",
                call.scratch_bytes.saturating_sub(at),
                call.scratch_bytes
            ));
        };
        call.used = end;
        tensor.data = call.scratch + at;
        Ok(tensor)
    })
}

/// Zeros a tensor on the call's stream.
pub(super) fn zero(x: &Tensor) -> Result<(), String> {
    let bytes = x.bytes().and_then(|b| u64::try_from(b).ok()).filter(|_| x.is_contiguous());
    let Some(bytes) = bytes else {
        return Err(format!("zeros in a tensor with sizes {:?} and strides {:?}", x.sizes(), x.strides()));
    };
    with_call(|call| {
        // SAFETY: the caller's function; the tensor is one of the call's.
        match bytes == 0 || unsafe { (call.zero)(call.stream, x.data, bytes) } == OK {
            true => Ok(()),
            false => Err(format!("{bytes} bytes at {:#x} could not be zeroed", x.data)),
        }
    })
}

fn on_device(index: i32) -> Result<*mut c_void, String> {
    with_call(|call| match index == call.device || index == -1 {
        true => Ok(call.stream),
        false => Err(format!("device {index}, and the call runs on device {}", call.device)),
    })
}

/// Writes a result.
///
/// # Safety
/// `to` is null or a place for it.
pub(super) unsafe fn put<T>(to: *mut T, found: Result<T, String>) -> Status {
    // SAFETY: the caller's word.
    match (found, unsafe { to.as_mut() }) {
        (Ok(x), Some(to)) => {
            *to = x;
            OK
        }
        (Ok(_), None) => fail("no place for the result"),
        (Err(words), _) => fail(words),
    }
}

/// The stream of the call.
///
/// # Safety
/// `to` is null or a place for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aoti_torch_get_current_cuda_stream(device: i32, to: *mut *mut c_void) -> Status {
    // SAFETY: the caller's word.
    unsafe { put(to, on_device(device)) }
}

/// The device of the call.
///
/// # Safety
/// `to` is null or a place for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aoti_torch_get_current_device_index(to: *mut i32) -> Status {
    // SAFETY: the caller's word.
    unsafe { put(to, with_call(|call| Ok(call.device))) }
}

/// A guard of the device of the call, which its thread has bound already; another device is refused.
///
/// # Safety
/// `to` is null or a place for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aoti_torch_create_device_guard(device: i32, to: *mut *mut c_void) -> Status {
    // SAFETY: the caller's word. There is nothing to undo: any address will do.
    unsafe { put(to, on_device(device).map(|_| CALL.get().cast())) }
}

/// Ends a guard: nothing is left to do.
#[unsafe(no_mangle)]
pub extern "C" fn aoti_torch_delete_device_guard(_: *mut c_void) -> Status {
    OK
}

/// Whether a tensor lies on a CUDA device and has a known type.
pub(super) fn known(x: &Tensor) -> bool {
    x.device_type == CUDA && dtype::size(x.dtype).is_some()
}
