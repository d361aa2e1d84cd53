//! Lists of values. A list does not own what its values name.

use super::{
    abi::{OK, Status, Value},
    call::{fail, give, put, take},
};

/// A list.
#[derive(Debug, Default)]
pub struct List(pub(super) Vec<Value>);

/// A new list with room for so many values, within reason.
///
/// # Safety
/// The place is null or one for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn torch_new_list_reserve_size(size: usize, to: *mut *mut List) -> Status {
    // SAFETY: the caller's word.
    unsafe { put(to, Ok(give(List(Vec::with_capacity(size.min(64)))))) }
}

/// Puts a value at the end.
///
/// # Safety
/// The handle is null or alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn torch_list_push_back(list: *mut List, value: Value) -> Status {
    // SAFETY: the caller's word.
    match unsafe { list.as_mut() } {
        Some(list) => {
            list.0.push(value);
            OK
        }
        None => fail("a list's handle that is null"),
    }
}

/// Frees a list; what its values name stays.
///
/// # Safety
/// Null, or alive, and not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn torch_delete_list(list: *mut List) -> Status {
    // SAFETY: the caller's word.
    drop(unsafe { take(list) });
    OK
}

/// Copies a list's values, as many as there is room for; how many there are.
///
/// # Safety
/// The handle is null or alive, and there is so much room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn headway_torch_list_values(list: *const List, to: *mut Value, room: usize) -> usize {
    // SAFETY: the caller's word; a list lies elsewhere than the room.
    unsafe {
        let Some(list) = list.as_ref() else { return 0 };
        std::ptr::copy_nonoverlapping(list.0.as_ptr(), to, list.0.len().min(room));
        list.0.len()
    }
}
