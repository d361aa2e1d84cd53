//! Wheels and extension modules that are not what they should be. Needs no device, no pip and no wheel: what stands for
//! them is made here.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use headway_cuda::modules::{
    MANIFEST, ModuleFolder,
    extension::{ExtensionEntry, ExtensionError, Extensions, FetchOptions, FetchReport, VLLM, check, fetch},
};
use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

/// A wheel with these members.
fn wheel(folder: &Path, name: &str, members: &[(&str, &[u8])]) -> PathBuf {
    let path = folder.join(name);
    let mut to = zip::ZipWriter::new(fs::File::create(&path).unwrap());
    for (name, bytes) in members {
        to.start_file(*name, zip::write::SimpleFileOptions::default()).unwrap();
        to.write_all(bytes).unwrap();
    }
    to.finish().unwrap();
    path
}

fn fetched(folder: &Path, wheel: Option<PathBuf>, python: &str) -> Result<FetchReport, ExtensionError> {
    fetch(&FetchOptions { folder: folder.into(), wheel, python: python.into() }, &mut |_| {})
}

const NAME: &str = "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl";

#[test]
fn wheels_that_are_others_are_refused_by_name_and_leave_nothing() {
    let home = TempDir::new().unwrap();
    let to = home.path().join("modules");
    let fa3 = Extensions::FlashAttention3.pin();
    let refused = |wheel: PathBuf| fetched(&to, Some(wheel), "python3").unwrap_err();
    let e = refused(wheel(home.path(), "vllm-0.32.1-cp38-abi3-manylinux_2_28_x86_64.whl", &[]));
    assert!(matches!(&e, ExtensionError::Version { found, .. } if found == "0.32.1"), "{e}");
    assert!(e.to_string().contains("of vLLM 0.32.1, and this headway calls 0.33.0"), "{e}");
    let e = refused(wheel(home.path(), "torch-2.14.0.whl", &[]));
    assert!(matches!(e, ExtensionError::Wheel { .. }), "{e}");
    let e = refused(wheel(home.path(), NAME, &[("vllm/__init__.py", b"")]));
    assert!(
        e.to_string().contains("not a wheel of vLLM 0.33.0") && e.to_string().contains(fa3.member),
        "{e}"
    );
    let e = refused(wheel(home.path(), NAME, &[(fa3.member, b"\x7fELF")]));
    assert_eq!(e, ExtensionError::Length { path: fa3.member.into(), found: 4, expected: fa3.bytes });
    // As long as it should be, and others' bytes.
    let zeros = vec![0; fa3.bytes as usize];
    let e = refused(wheel(home.path(), NAME, &[(fa3.member, &zeros)]));
    assert!(matches!(&e, ExtensionError::Hash { expected, .. } if expected == fa3.sha256), "{e}");
    fs::write(home.path().join(NAME), "no archive").unwrap();
    let e = refused(home.path().join(NAME));
    assert!(matches!(e, ExtensionError::Wheel { .. }), "{e}");
    let e = refused(home.path().join("vllm-0.33.0-not-there.whl"));
    assert!(matches!(e, ExtensionError::File { .. }), "{e}");
    assert_eq!(fs::read_dir(&to).unwrap().count(), 0);
}

#[test]
fn a_python_without_pip_is_named_with_another_way() {
    let home = TempDir::new().unwrap();
    let e = fetched(home.path(), None, "/nowhere/python3").unwrap_err();
    let words = e.to_string();
    assert!(words.starts_with("/nowhere/python3 -m pip download --no-deps vllm==0.33.0 failed: "), "{words}");
    assert!(words.ends_with("or give a wheel that is there with --wheel FILE"), "{words}");
    let e = fetched(home.path(), None, "false").unwrap_err();
    assert!(matches!(e, ExtensionError::Pip { .. }), "{e}");
}

#[test]
fn files_that_are_not_what_was_pinned_are_refused_before_they_are_opened() {
    let home = TempDir::new().unwrap();
    let mut folder = ModuleFolder::open(home.path()).unwrap();
    for extension in Extensions::ALL {
        folder.put_extension(ExtensionEntry::of(extension)).unwrap();
    }
    let folder = ModuleFolder::open(home.path()).unwrap();
    assert_eq!(folder.extensions().len(), 2);
    let entry = folder.extension(Extensions::FlashMla).unwrap();
    let refused = |entry: &ExtensionEntry| check(&folder, entry).unwrap_err();
    assert!(matches!(refused(entry), ExtensionError::Missing { .. }));
    let file = home.path().join(&entry.file);
    fs::write(&file, b"\x7fELF").unwrap();
    assert!(matches!(refused(entry), ExtensionError::Length { found: 4, .. }));
    fs::write(&file, vec![0; entry.bytes as usize]).unwrap();
    assert!(matches!(refused(entry), ExtensionError::Hash { .. }));
    // A manifest that says so does not make it right.
    let lies = ExtensionEntry { sha256: "0".repeat(64), ..entry.clone() };
    assert!(matches!(refused(&lies), ExtensionError::Hash { .. }));
    let old = ExtensionEntry { vllm: "0.31.0".into(), ..entry.clone() };
    let words = refused(&old).to_string();
    assert!(words.contains("of vLLM 0.31.0, and this headway calls 0.33.0"), "{words}");
    assert_eq!(VLLM, "0.33.0");
    let text = fs::read_to_string(home.path().join(MANIFEST)).unwrap();
    fs::write(home.path().join(MANIFEST), text.replace("_flashmla_C", "../_flashmla_C")).unwrap();
    assert!(ModuleFolder::open(home.path()).unwrap_err().to_string().contains("is no file name"));
    fs::write(home.path().join(MANIFEST), text.replace("0.33.0", "0.33\\u001b[2J")).unwrap();
    let words = ModuleFolder::open(home.path()).unwrap_err().to_string();
    assert!(words.contains("has control characters") && !words.contains('\u{1b}'), "{words}");
}
