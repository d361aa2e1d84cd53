//! The functions as a module calls them, with objects of this test's own.

#![expect(unsafe_code, reason = "the functions are C's")]

use headway_ffi_shim::tvm::*;
use std::{
    ffi::{c_int, c_void},
    ptr::{null, null_mut},
    sync::atomic::{AtomicI32, AtomicU64, Ordering},
};

/// An object that counts how it was ended.
#[repr(C)]
struct Counted {
    error: ErrorObject,
    ended: AtomicI32,
}

unsafe extern "C" fn end(object: *mut Object, what: c_int) {
    // SAFETY: only objects of `counted` have this deleter, and the test keeps their memory.
    unsafe { (*object.cast::<Counted>()).ended.fetch_add(what, Ordering::Relaxed) };
}

fn counted(counts: u64) -> Box<Counted> {
    let text = |t: &'static str| ByteArray { data: t.as_ptr().cast(), size: t.len() };
    let object = Object {
        counts: AtomicU64::new(counts),
        type_index: type_index::ERROR,
        padding: 0,
        deleter: Some(end),
    };
    Box::new(Counted {
        error: ErrorObject { object, kind: text("TypeError"), message: text("no") },
        ended: AtomicI32::new(0),
    })
}

const ONE: u64 = 1 | 1 << 32;

fn state(x: &Counted) -> (u64, i32) {
    (x.error.object.counts.load(Ordering::Relaxed), x.ended.load(Ordering::Relaxed))
}

fn taken() -> *mut Object {
    let mut object = null_mut();
    // SAFETY: a place on the stack.
    unsafe { TVMFFIErrorMoveFromRaised(&mut object) };
    object
}

#[test]
fn a_raised_error_is_handed_over_once_with_its_reference() {
    let (mut first, mut second) = (counted(ONE), counted(ONE));
    let [a, b] = [&mut first, &mut second].map(|x| std::ptr::from_mut(&mut **x).cast::<Object>());
    assert!(taken().is_null());
    // SAFETY: both live to the end of the test.
    unsafe { TVMFFIErrorSetRaised(a) };
    assert_eq!(state(&first), (ONE + 1, 0));
    // The second takes the first's place, whose reference goes.
    // SAFETY: as above.
    unsafe { TVMFFIErrorSetRaised(b) };
    assert_eq!((state(&first), state(&second)), ((ONE, 0), (ONE + 1, 0)));
    // Another thread's error is another one.
    std::thread::spawn(|| assert!(taken().is_null())).join().unwrap();
    assert_eq!(taken(), b);
    assert!(taken().is_null());
    // SAFETY: as above; nowhere to put it, nothing to keep.
    unsafe {
        TVMFFIErrorMoveFromRaised(null_mut());
        TVMFFIErrorSetRaised(null_mut());
    }
}

#[test]
fn the_last_reference_ends_an_object() {
    let ends = |counts: u64| {
        let mut x = counted(counts);
        // SAFETY: the test gives up one reference; the memory is the box's.
        unsafe { release(std::ptr::from_mut(&mut *x).cast()) };
        state(&x)
    };
    assert_eq!(ends(ONE + 1), (ONE, 0));
    // Value and memory at once.
    assert_eq!(ends(ONE).1, 3);
    // A weak reference keeps the memory.
    assert_eq!(ends(ONE + (1 << 32)), (1 << 32, 1));
    // SAFETY: null is allowed.
    unsafe {
        release(null_mut());
        retain(null_mut());
    }
}

#[test]
fn streams_are_a_threads_and_a_devices() {
    let (stream, mut before) = (0x40usize as *mut c_void, std::ptr::dangling_mut::<c_void>());
    assert!(TVMFFIEnvGetStream(2, 3).is_null());
    // SAFETY: a place on the stack.
    assert_eq!(unsafe { TVMFFIEnvSetStream(2, 3, stream, &mut before) }, 0);
    assert!(before.is_null());
    assert_eq!((TVMFFIEnvGetStream(2, 3), TVMFFIEnvGetStream(2, 4)), (stream, null_mut()));
    std::thread::spawn(|| assert!(TVMFFIEnvGetStream(2, 3).is_null())).join().unwrap();
    // SAFETY: null is allowed, and these devices are refused.
    unsafe {
        assert_eq!(TVMFFIEnvSetStream(2, 3, null_mut(), null_mut()), 0);
        for (kind, id) in [(1, 0), (2, -1), (2, 64)] {
            assert_eq!(TVMFFIEnvSetStream(kind, id, stream, null_mut()), -1);
            assert!(TVMFFIEnvGetStream(kind, id).is_null());
        }
    }
}

fn text(x: ByteArray) -> String {
    // SAFETY: of this crate's constants.
    let bytes = unsafe { std::slice::from_raw_parts(x.data.cast::<u8>(), x.size) };
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn names_for_error_texts() {
    // SAFETY: the pointer is to a constant.
    let name = |i| text(unsafe { &*TVMFFIGetTypeInfo(i) }.type_key);
    assert_eq!([1, 7, 71, 70, 4242].map(name), ["int", "DLTensor*", "Array", "Tensor", "object"]);
    // SAFETY: as above.
    assert_eq!(text(unsafe { *TVMFFIBacktrace(null(), 0, null(), 0) }), "");
    let written = |code, bits, lanes| {
        let mut to = Any::NONE;
        // SAFETY: both are on the stack.
        assert_eq!(unsafe { TVMFFIDataTypeToString(&DLDataType { code, bits, lanes }, &mut to) }, 0);
        String::from_utf8(to.payload.to_ne_bytes()[..to.small_len as usize].to_vec()).unwrap()
    };
    assert_eq!(written(4, 16, 1), "bf16");
    assert_eq!([written(2, 32, 4), written(0, 8, 1), written(1, 64, 1)], ["f32x4", "i8", "u64"]);
    assert_eq!(written(9, 255, u16::MAX), "?255x65");
    // SAFETY: null is allowed.
    assert_eq!(unsafe { TVMFFIDataTypeToString(null(), null_mut()) }, -1);
}

#[test]
fn layouts_are_the_headers() {
    assert_eq!((size_of::<Any>(), size_of::<DLTensor>(), size_of::<Object>()), (16, 48, 24));
    assert_eq!((size_of::<Sequence>(), size_of::<TypeInfo>()), (56, 80));
    assert_eq!(std::mem::offset_of!(ErrorObject, message), 40);
    assert_eq!(std::mem::offset_of!(DLTensor, shape), 24);
}
