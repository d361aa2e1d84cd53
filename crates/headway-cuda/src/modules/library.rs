//! Shared libraries by the dynamic linker. They stay open to the end of the process: addresses in them are in graphs,
//! thread-local values and objects.

use std::{
    ffi::{CStr, CString, c_int, c_void},
    os::unix::ffi::OsStrExt,
    path::Path,
};

/// An open library.
#[derive(Clone, Copy, Debug)]
pub struct Library(*mut c_void);

// SAFETY: the handle is the linker's, which may be asked from any thread; nothing is written through it.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// Who finds the library's symbols.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visible {
    /// Whoever asks this library.
    Locally,
    /// Every library that is opened later.
    Globally,
}

impl Library {
    /// Opens a library; every symbol that it imports must be there.
    ///
    /// # Errors
    /// The linker's words.
    pub fn open(path: &Path, visible: Visible) -> Result<Self, String> {
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
        let scope = match visible {
            Visible::Locally => libc::RTLD_LOCAL,
            Visible::Globally => libc::RTLD_GLOBAL,
        };
        let flags: c_int = libc::RTLD_NOW | scope;
        // SAFETY: the name ends in a zero. Whoever gave the path answers for the library's initialisers; they are
        // those of the C++ and CUDA runtimes in modules of ours.
        let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
        if handle.is_null() { Err(last_error()) } else { Ok(Self(handle)) }
    }

    /// The address of a symbol.
    pub fn symbol(&self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).ok()?;
        // SAFETY: the handle is open for good, the name ends in a zero.
        let at = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!at.is_null()).then_some(at)
    }
}

fn last_error() -> String {
    // SAFETY: null, or a text that is this thread's until its next call of the linker.
    let text = unsafe {
        let text = libc::dlerror();
        (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
    };
    text.unwrap_or_else(|| "the dynamic linker says nothing".into())
}
