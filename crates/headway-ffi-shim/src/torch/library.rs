//! What modules register when they are opened: schemas, and kernels by name.

use super::{
    abi::{OK, Status},
    call::{fail, give, put, take},
};
use std::{
    ffi::{CStr, c_char, c_void},
    ptr::null,
    sync::{Mutex, PoisonError},
};

/// A namespace that a module registers in.
#[derive(Debug)]
pub struct Library {
    namespace: String,
}

/// A schema or a kernel.
struct Registered {
    namespace: String,
    name: String,
    schema: Option<&'static CStr>,
    kernel: usize,
}

static REGISTERED: Mutex<Vec<Registered>> = Mutex::new(vec![]);

/// # Safety
/// Null, or a text.
unsafe fn text(x: *const c_char) -> Result<String, String> {
    match x.is_null() {
        true => Err("a text that is null".into()),
        // SAFETY: the caller's word.
        false => Ok(unsafe { CStr::from_ptr(x) }.to_string_lossy().into_owned()),
    }
}

/// Does something with an entry, which is made where there is none.
fn with_entry(namespace: &str, name: &str, f: impl FnOnce(&mut Registered)) {
    let mut all = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    let found = all.iter().position(|r| r.namespace == namespace && r.name == name);
    let i = found.unwrap_or_else(|| {
        all.push(Registered { namespace: namespace.into(), name: name.into(), schema: None, kernel: 0 });
        all.len() - 1
    });
    f(&mut all[i]);
}

/// # Safety
/// As [`aoti_torch_library_init_def`].
unsafe fn open(namespace: *const c_char, to: *mut *mut Library) -> Status {
    // SAFETY: the caller's word.
    unsafe { put(to, text(namespace).map(|namespace| give(Library { namespace }))) }
}

/// Opens a namespace for schemas.
///
/// # Safety
/// The namespace is null or a text, the place null or one for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aoti_torch_library_init_def(
    namespace: *const c_char,
    _: *const c_char,
    _: u32,
    to: *mut *mut Library,
) -> Status {
    // SAFETY: the caller's word.
    unsafe { open(namespace, to) }
}

/// Opens a namespace for kernels of a device; all that modules register are CUDA's.
///
/// # Safety
/// As [`aoti_torch_library_init_def`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aoti_torch_library_init_impl(
    namespace: *const c_char,
    _: *const c_char,
    _: *const c_char,
    _: u32,
    to: *mut *mut Library,
) -> Status {
    // SAFETY: the caller's word.
    unsafe { open(namespace, to) }
}

/// Keeps a schema, by what stands before its parenthesis.
///
/// # Safety
/// The handle is null or alive, the schema null or a text that stays.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aoti_torch_library_def(library: *mut Library, schema: *const c_char) -> Status {
    // SAFETY: the caller's word.
    match unsafe { (library.as_ref(), text(schema)) } {
        (Some(library), Ok(words)) => {
            let name = words.split('(').next().unwrap_or_default().trim();
            // SAFETY: it is a text, and a module's texts stay as long as the process.
            with_entry(&library.namespace, name, |r| r.schema = Some(unsafe { CStr::from_ptr(schema) }));
            OK
        }
        _ => fail("a schema without a library or without words"),
    }
}

/// Keeps a kernel by its name.
///
/// # Safety
/// The handle is null or alive, the name null or a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn torch_library_impl(
    library: *mut Library,
    name: *const c_char,
    kernel: *mut c_void,
    _: u64,
) -> Status {
    // SAFETY: the caller's word.
    match unsafe { (library.as_ref(), text(name)) } {
        (Some(library), Ok(name)) => {
            let name = name.rsplit("::").next().unwrap_or_default();
            with_entry(&library.namespace, name, |r| r.kernel = kernel as usize);
            OK
        }
        _ => fail("a kernel without a library or without a name"),
    }
}

/// Closes a namespace; what was registered stays.
///
/// # Safety
/// Null, or alive, and not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aoti_torch_delete_library_object(library: *mut Library) -> Status {
    // SAFETY: the caller's word.
    drop(unsafe { take(library) });
    OK
}

/// # Safety
/// Both are null or texts.
unsafe fn find<R>(
    namespace: *const c_char,
    name: *const c_char,
    f: impl FnOnce(&Registered) -> R,
) -> Option<R> {
    // SAFETY: the caller's word.
    let (namespace, name) = unsafe { (text(namespace).ok()?, text(name).ok()?) };
    let all = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter().find(|r| r.namespace == namespace && r.name == name).map(f)
}

/// The kernel of this name; null where none was registered.
///
/// # Safety
/// Both are null or texts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn headway_torch_kernel(namespace: *const c_char, name: *const c_char) -> *mut c_void {
    // SAFETY: the caller's word.
    unsafe { find(namespace, name, |r| r.kernel as *mut c_void) }.unwrap_or(std::ptr::null_mut())
}

/// The schema of this name; null where none was registered.
///
/// # Safety
/// Both are null or texts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn headway_torch_schema(
    namespace: *const c_char,
    name: *const c_char,
) -> *const c_char {
    // SAFETY: the caller's word.
    unsafe { find(namespace, name, |r| r.schema.map_or(null(), CStr::as_ptr)) }.unwrap_or(null())
}
