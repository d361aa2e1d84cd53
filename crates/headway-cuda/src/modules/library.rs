//! Shared libraries by the dynamic linker. They stay open to the end of the process: addresses in them are in graphs,
//! thread-local values and objects.

use std::{
    ffi::{CStr, CString, c_int, c_void},
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

/// An open library.
#[derive(Clone, Copy, Debug)]
pub struct Library(*mut c_void);

// SAFETY: the handle is the linker's, which may be asked from any thread; nothing is written through it.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

/// How a library is linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linking {
    /// Every library that is opened later finds its symbols, not only who asks for them.
    pub global: bool,
    /// Functions that it imports are looked for when they are first called, not at once.
    pub lazy: bool,
}

impl Linking {
    /// Its symbols are for who asks, and every import must be there.
    pub const LOCAL: Self = Self { global: false, lazy: false };
    /// Its symbols are for every library that is opened later.
    pub const GLOBAL: Self = Self { global: true, lazy: false };
}

impl Library {
    /// Opens a library.
    ///
    /// # Errors
    /// The linker's words.
    pub fn open(path: &Path, linking: Linking) -> Result<Self, String> {
        let name = CString::new(path.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
        let scope = if linking.global { libc::RTLD_GLOBAL } else { libc::RTLD_LOCAL };
        let flags: c_int = scope | if linking.lazy { libc::RTLD_LAZY } else { libc::RTLD_NOW };
        // SAFETY: the name ends in a zero. Whoever gave the path answers for the library's initialisers; they are
        // those of the C++ and CUDA runtimes in modules that were built or pinned, and registrations in extensions.
        let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
        if handle.is_null() { Err(last_error()) } else { Ok(Self(handle)) }
    }

    /// Whether a library by this name is loaded.
    pub fn is_loaded(name: &Path) -> bool {
        let Ok(name) = CString::new(name.as_os_str().as_bytes()) else { return false };
        // SAFETY: the name ends in a zero; nothing is loaded, and a handle that comes back is given up.
        unsafe {
            let handle = libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
            !handle.is_null() && libc::dlclose(handle) == 0
        }
    }

    /// Where a library that is opened from now on finds a symbol before it looks among those that it names itself: in the
    /// program, its libraries, and those that were opened for all, in the order in which they came.
    pub fn symbol_for_all(name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).ok()?;
        // SAFETY: the name ends in a zero.
        let at = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        (!at.is_null()).then_some(at)
    }

    /// The file that an address lies in.
    pub fn file_of(at: *mut c_void) -> Option<PathBuf> {
        // SAFETY: four numbers; what the linker writes there are addresses and texts that stay while the library does.
        let name = unsafe {
            let mut info: libc::Dl_info = std::mem::zeroed();
            let found = libc::dladdr(at, &raw mut info) != 0 && !info.dli_fname.is_null();
            found.then(|| CStr::from_ptr(info.dli_fname).to_bytes().to_vec())
        };
        name.map(|n| PathBuf::from(std::ffi::OsString::from_vec(n)))
    }

    /// The address of a symbol, of the library or of one that it needs.
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
