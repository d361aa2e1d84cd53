//! Another library in the process that has the functions which modules import: a process of its own, since what is opened for
//! all stays.

#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "a library is opened for all, as foreign code may")]

use headway_cuda::{load_shim, modules::ModuleError};
use std::{ffi::CString, os::unix::ffi::OsStrExt, path::Path, process::Command};

/// A library with functions of both interfaces, and one that only its name has in common.
const SOURCE: &str = "int aoti_torch_get_dim(void* x, long* n) { return 7; }
    void torch_delete_list(void* x) {}
    int TVMFFIEnvSetStream(int a, int b, void* c, void** d) { return 7; }
    int torchlike(void) { return 7; }";

fn compile(folder: &Path, name: &str) -> std::path::PathBuf {
    let (source, to) = (folder.join("other.c"), folder.join(name));
    std::fs::write(&source, SOURCE).unwrap();
    let mut cc = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".into()));
    let out = cc.args(["-shared", "-fPIC", "-o"]).arg(&to).arg(&source).output();
    let out = out.expect("the C compiler that Rust links with");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    to
}

fn open_for_all(path: &Path) {
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: a library without initialisers.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    assert!(!handle.is_null());
}

/// Where cargo leaves the shim of this build.
fn shim() -> std::path::PathBuf {
    let beside = std::env::current_exe().unwrap().with_file_name(headway_ffi_shim::FILE);
    if beside.is_file() { beside } else { beside.with_file_name("..").join(headway_ffi_shim::FILE) }
}

#[test]
fn a_library_that_came_first_is_named_and_one_that_came_after_does_no_harm() {
    let home = tempfile::tempdir().unwrap();
    let own = home.path().join("shim.so");
    std::fs::copy(shim(), &own).expect("cargo makes the shim before this test");
    // Only who asks sees a library that was opened for itself.
    let hidden = compile(home.path(), "hidden.so");
    let name = CString::new(hidden.as_os_str().as_bytes()).unwrap();
    // SAFETY: as above.
    assert!(!unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) }.is_null());
    // A child of this test has the other one first; it stays what it is for the rest of its life.
    if std::env::var_os("HEADWAY_TEST_SHADOWED").is_some() {
        let first = compile(home.path(), "first.so");
        open_for_all(&first);
        let e = load_shim(&own).unwrap_err();
        let ModuleError::Shadowed { others, by, symbol, .. } = &e else { panic!("{e}") };
        assert_eq!((*others, by.file_name()), (2, first.file_name()), "{e}");
        assert!(["aoti_torch_get_dim", "torch_delete_list", "TVMFFIEnvSetStream"].contains(&symbol.as_str()));
        assert!(e.to_string().contains("and 2 more of") && e.to_string().contains("first.so instead"), "{e}");
        // Nor does a second attempt find it alone.
        assert_eq!(load_shim(&own), Err(e));
        return;
    }
    assert_eq!(load_shim(&own), Ok(()));
    open_for_all(&compile(home.path(), "after.so"));
    assert_eq!(load_shim(shim()), Ok(()));
    let child =
        Command::new(std::env::current_exe().unwrap()).env("HEADWAY_TEST_SHADOWED", "1").output().unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
}
