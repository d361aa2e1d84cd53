//! Objects with a reference count, which modules make and their holders release.

use super::{Any, ByteArray};
use std::{
    ffi::c_int,
    sync::atomic::{AtomicU64, Ordering, fence},
};

/// What every object begins with.
#[repr(C)]
#[derive(Debug)]
pub struct Object {
    /// References in the low 32 bits, weak ones in the high 32.
    pub counts: AtomicU64,
    /// What it is.
    pub type_index: i32,
    /// Unused.
    pub padding: u32,
    /// Ends it: with 1 its value, with 2 its memory, with 3 both.
    pub deleter: Option<unsafe extern "C" fn(*mut Object, c_int)>,
}

/// An array or a tuple.
#[repr(C)]
#[derive(Debug)]
pub struct Sequence {
    /// What every object begins with.
    pub object: Object,
    /// The elements.
    pub data: *const Any,
    /// How many.
    pub size: i64,
    /// How many there is room for.
    pub capacity: i64,
    /// Ends elements that lie elsewhere.
    pub data_deleter: Option<unsafe extern "C" fn(*mut std::ffi::c_void)>,
}

/// An error; there is more behind what is used here.
#[repr(C)]
#[derive(Debug)]
pub struct ErrorObject {
    /// What every object begins with.
    pub object: Object,
    /// Its kind, as `TypeError`.
    pub kind: ByteArray,
    /// Its words.
    pub message: ByteArray,
}

const ONE_STRONG: u64 = 1;
const ONE_WEAK: u64 = 1 << 32;
const BOTH: c_int = 3;

/// One more reference.
///
/// # Safety
/// `object` is null or alive.
pub unsafe fn retain(object: *mut Object) {
    // SAFETY: the caller's word.
    if let Some(object) = unsafe { object.as_ref() } {
        object.counts.fetch_add(ONE_STRONG, Ordering::Relaxed);
    }
}

/// One reference less; the last one ends the object.
///
/// # Safety
/// `object` is null, or the caller gives up a reference of its own.
pub unsafe fn release(object: *mut Object) {
    // SAFETY: the caller's word. The fields are read before the object can end.
    let Some((counts, deleter)) = (unsafe { object.as_ref() }).map(|o| (&o.counts, o.deleter)) else {
        return;
    };
    let end = |what| {
        if let Some(deleter) = deleter {
            fence(Ordering::Acquire);
            // SAFETY: there is no reference of that kind left, and the object's own function ends it.
            unsafe { deleter(object, what) }
        }
    };
    match counts.fetch_sub(ONE_STRONG, Ordering::Release) {
        before if before == ONE_STRONG | ONE_WEAK => end(BOTH),
        before if before & u64::from(u32::MAX) == ONE_STRONG => {
            end(1);
            // All strong references hold one weak one together, so the counts are still there.
            if counts.fetch_sub(ONE_WEAK, Ordering::Release) == ONE_WEAK {
                end(2);
            }
        }
        _ => {}
    }
}
