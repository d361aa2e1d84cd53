//! The functions. What a module is told of types and where an error came from serves its error texts alone.

use super::{Any, ByteArray, DLDataType, Object, release, retain};
use std::{
    cell::Cell,
    ffi::{c_char, c_int, c_void},
    ptr::null_mut,
};

/// The type of CUDA devices.
const CUDA: i32 = 2;
/// Devices that a thread can set a stream for.
const DEVICES: usize = 64;

thread_local! {
    static STREAMS: [Cell<*mut c_void>; DEVICES] = const { [const { Cell::new(null_mut()) }; DEVICES] };
    // Without a destructor: a thread that ends with an error in hand leaks it.
    static RAISED: Cell<*mut Object> = const { Cell::new(null_mut()) };
}

fn slot(device_type: i32, device_id: i32) -> Option<usize> {
    usize::try_from(device_id).ok().filter(|&i| device_type == CUDA && i < DEVICES)
}

/// The stream to launch on, of this thread: null, the device's default one, where none was set.
#[unsafe(no_mangle)]
pub extern "C" fn TVMFFIEnvGetStream(device_type: i32, device_id: i32) -> *mut c_void {
    slot(device_type, device_id).map_or(null_mut(), |i| STREAMS.with(|s| s[i].get()))
}

/// Sets this thread's stream; −1 for a device that is no CUDA device or too high a number.
///
/// # Safety
/// `before` is null or points to a place for the stream that was set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TVMFFIEnvSetStream(
    device_type: i32,
    device_id: i32,
    stream: *mut c_void,
    before: *mut *mut c_void,
) -> c_int {
    let Some(i) = slot(device_type, device_id) else { return -1 };
    let old = STREAMS.with(|s| s[i].replace(stream));
    // SAFETY: the caller's word.
    if let Some(before) = unsafe { before.as_mut() } {
        *before = old;
    }
    0
}

/// Keeps an error for whoever asks next on this thread, with a reference of its own.
///
/// # Safety
/// `error` is null or alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TVMFFIErrorSetRaised(error: *mut Object) {
    // SAFETY: the caller's word.
    unsafe { retain(error) };
    let before = RAISED.replace(error);
    // SAFETY: the reference that was taken when it was kept.
    unsafe { release(before) };
}

/// Hands the error over with its reference; null where there is none.
///
/// # Safety
/// `to` is null or points to a place for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TVMFFIErrorMoveFromRaised(to: *mut *mut Object) {
    // SAFETY: the caller's word.
    if let Some(to) = unsafe { to.as_mut() } {
        *to = RAISED.replace(null_mut());
    }
}

/// Where an error came from: nothing is known.
#[unsafe(no_mangle)]
pub extern "C" fn TVMFFIBacktrace(
    _: *const c_char,
    _: c_int,
    _: *const c_char,
    _: c_int,
) -> *const ByteArray {
    static NOTHING: Shared<ByteArray> = Shared(ByteArray { data: c"".as_ptr(), size: 0 });
    &NOTHING.0
}

/// What a type is called, as `TVMFFITypeInfo` begins; the rest is null.
#[repr(C)]
#[derive(Debug)]
pub struct TypeInfo {
    /// Its index.
    pub type_index: i32,
    /// Types above it.
    pub type_depth: i32,
    /// Its name.
    pub type_key: ByteArray,
    /// Ancestors, hash, counts, fields, methods and metadata.
    pub rest: [u64; 7],
}

/// Constants with pointers to other constants.
struct Shared<T>(T);
// SAFETY: nothing is ever written to it, nor to what it points to.
unsafe impl<T> Sync for Shared<T> {}

const fn type_info(type_index: i32, key: &'static str) -> TypeInfo {
    let type_key = ByteArray { data: key.as_ptr().cast(), size: key.len() };
    TypeInfo { type_index, type_depth: 0, type_key, rest: [0; 7] }
}

static TYPES: Shared<[TypeInfo; 14]> = Shared([
    // The first answers for all that are not listed.
    type_info(64, "object"),
    type_info(0, "None"),
    type_info(1, "int"),
    type_info(2, "bool"),
    type_info(3, "float"),
    type_info(4, "void*"),
    type_info(5, "DataType"),
    type_info(6, "Device"),
    type_info(7, "DLTensor*"),
    type_info(8, "const char*"),
    type_info(65, "str"),
    type_info(67, "Error"),
    type_info(70, "Tensor"),
    type_info(71, "Array"),
]);

/// The name of a type.
#[unsafe(no_mangle)]
pub extern "C" fn TVMFFIGetTypeInfo(type_index: i32) -> *const TypeInfo {
    TYPES.0.iter().find(|t| t.type_index == type_index).unwrap_or(&TYPES.0[0])
}

/// The name of an element type, in up to 7 letters: `bf16`, `f32x4`.
///
/// # Safety
/// Both pointers are to live values, and the one written to holds no object.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn TVMFFIDataTypeToString(dtype: *const DLDataType, to: *mut Any) -> c_int {
    // SAFETY: the caller's word.
    let (Some(dtype), Some(to)) = (unsafe { (dtype.as_ref(), to.as_mut()) }) else { return -1 };
    let mut text = Small::default();
    text.push(match dtype.code {
        0 => "i",
        1 => "u",
        2 => "f",
        4 => "bf",
        _ => "?",
    });
    text.number(dtype.bits.into());
    if dtype.lanes != 1 {
        text.push("x");
        text.number(dtype.lanes.into());
    }
    *to = Any::small_string(text.as_str());
    0
}

/// A text of up to 7 bytes, written without allocating.
#[derive(Default)]
struct Small {
    bytes: [u8; 7],
    len: usize,
}

impl Small {
    fn push(&mut self, text: &str) {
        for &b in text.as_bytes() {
            if let Some(to) = self.bytes.get_mut(self.len) {
                (*to, self.len) = (b, self.len + 1);
            }
        }
    }

    fn number(&mut self, n: u32) {
        let mut power = 10_000;
        while power > 1 && n < power {
            power /= 10;
        }
        while power > 0 {
            let digit = [b'0' + (n / power % 10) as u8];
            self.push(std::str::from_utf8(&digit).unwrap_or("?"));
            power /= 10;
        }
    }

    fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.len]).unwrap_or("?")
    }
}
