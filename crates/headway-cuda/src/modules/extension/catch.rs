//! A call of a kernel that may throw. A C++ exception must not leave a kernel into Rust's frames: the call goes through a
//! frame of assembly, whose personality routine ends every exception's way there, as a `catch (...)` would.
//! Frames between the throw and this one are unwound by their own routines, so that nothing leaks.
//!
//! The interface is the Itanium C++ ABI's, level 1 (`_Unwind_*`), which is libgcc's and is in every Rust program; what was
//! thrown is asked of libstdc++, which the module brings.

use super::frame;
use crate::modules::library::Library;
use headway_ffi_shim::torch::Value;
use std::ffi::{CStr, c_char, c_void};

/// A kernel: its values are replaced by its results.
pub(super) type Kernel = unsafe extern "C" fn(*mut Value, u64, u64);

/// C++'s exceptions, as libstdc++ marks them.
const GNU_CPP: u64 = 0x474e_5543_432b_2b00;
/// Bytes of the unwinder's header, behind which the thrown object lies.
const HEADER: usize = 32;

/// What libstdc++ has for whoever caught something.
#[derive(Clone, Copy, Debug)]
pub(super) struct Catch {
    begin: unsafe extern "C" fn(*mut c_void) -> *mut c_void,
    end: unsafe extern "C" fn(),
    current_type: unsafe extern "C" fn() -> *const TypeInfo,
}

/// `std::type_info`: its functions, and the mangled name.
#[repr(C)]
struct TypeInfo {
    functions: *const c_void,
    name: *const c_char,
}

impl Catch {
    /// Of the libraries that a module brings; `None` where it brings no libstdc++, and on systems without the frame.
    pub fn of(library: &Library) -> Option<Self> {
        if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
            return None;
        }
        let [begin, end, current_type] =
            ["__cxa_begin_catch", "__cxa_end_catch", "__cxa_current_exception_type"]
                .map(|s| library.symbol(s));
        // SAFETY: the Itanium C++ ABI's functions, whose signatures these are.
        unsafe {
            use std::mem::transmute as function;
            Some(Self {
                begin: function::<*mut c_void, unsafe extern "C" fn(*mut c_void) -> *mut c_void>(begin?),
                end: function::<*mut c_void, unsafe extern "C" fn()>(end?),
                current_type: function::<*mut c_void, unsafe extern "C" fn() -> *const TypeInfo>(
                    current_type?,
                ),
            })
        }
    }

    /// Calls a kernel.
    ///
    /// # Errors
    /// What it threw, in its words where it has any.
    ///
    /// # Safety
    /// The stack has the kernel's arguments, and room for its results.
    pub unsafe fn call(
        &self,
        kernel: Kernel,
        stack: &mut [Value],
        inputs: u64,
        outputs: u64,
    ) -> Result<(), String> {
        // SAFETY: the caller's word; exceptions end in the frame.
        match unsafe { frame::call(kernel, stack, inputs, outputs) } {
            None => Ok(()),
            // SAFETY: just caught.
            Some(thrown) => Err(unsafe { self.words(thrown) }),
        }
    }

    /// The words of an exception, which is ended.
    ///
    /// # Safety
    /// Caught, and not ended.
    unsafe fn words(&self, exception: *mut c_void) -> String {
        // SAFETY: an exception begins with its class; ended in the way of its language.
        unsafe {
            if *exception.cast::<u64>() != GNU_CPP {
                frame::delete(exception);
                return "an exception of another language than C++".into();
            }
            (self.begin)(exception);
            let name = match (self.current_type)().as_ref() {
                Some(t) => CStr::from_ptr(t.name).to_string_lossy().into_owned(),
                None => String::new(),
            };
            let object = exception.cast::<u8>().add(HEADER).cast::<*const What>();
            let words = match is_standard(&name) {
                true => {
                    CStr::from_ptr(((**object).what)(object.cast())).to_string_lossy().trim_end().to_owned()
                }
                false => format!("an exception of type {name}"),
            };
            (self.end)();
            words
        }
    }
}

/// The functions of `std::exception`: two destructors, then `what`.
#[repr(C)]
struct What {
    destructors: [*const c_void; 2],
    what: unsafe extern "C" fn(*const c_void) -> *const c_char,
}

/// Whether a mangled name is one of the standard exceptions, which have `what` and begin with their functions.
fn is_standard(name: &str) -> bool {
    ["St9exception", "St9bad_alloc", "St8bad_cast", "St20bad_array_new_length"].contains(&name)
        || [
            "St11logic_error",
            "St12domain_error",
            "St12length_error",
            "St12out_of_range",
            "St16invalid_argument",
        ]
        .contains(&name)
        || ["St13runtime_error", "St11range_error", "St14overflow_error", "St15underflow_error"]
            .contains(&name)
}

#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::modules::library::Linking;
    use std::{path::Path, process::Command};

    /// A C++ library whose kernels throw.
    fn thrower() -> (tempfile::TempDir, Library) {
        let dir = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/modules/throws.cpp");
        let path = dir.path().join("throws.so");
        let cc = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let status = Command::new(cc).args(["-shared", "-fPIC", "-O1", "-o"]).arg(&path).arg(source).status();
        assert!(status.expect("a C++ compiler").success());
        (dir, Library::open(&path, Linking::LOCAL).unwrap())
    }

    #[test]
    fn what_a_kernel_throws_is_an_error_in_its_words() {
        let (_dir, library) = thrower();
        let catch = Catch::of(&library).unwrap();
        // SAFETY: the library's own function, of this type.
        let kernel = unsafe { std::mem::transmute::<*mut c_void, Kernel>(library.symbol("kernel").unwrap()) };
        let mut stack = [0, 0];
        // Often enough that one that is not ended would be missed.
        for round in 0..100 {
            let mut call = |what: Value| {
                stack[0] = what;
                // SAFETY: the kernel takes two values.
                let outcome = unsafe { catch.call(kernel, &mut stack, 2, 1) };
                (outcome, stack)
            };
            assert_eq!(call(7), (Ok(()), [14, round]));
            assert_eq!(call(0).0, Err("no such head size: 7".into()));
            assert_eq!(call(1).0, Err("an exception of type i".into()));
            assert_eq!(call(2).0, Err("vector".into()));
            // Objects between the throw and the call were ended.
            assert_eq!(call(3).1[1], round);
            stack[1] = round + 1;
        }
    }
}
