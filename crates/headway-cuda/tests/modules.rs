//! Folders of modules that are not what they should be, with modules made here by the C compiler. Needs no device.

use headway_cuda::modules::{
    Entry, FLASHINFER, Kind, MANIFEST, Manifest, Mask, ModuleError, ModuleFolder, RECIPE, Want,
};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Compiles the fake module with these macros.
fn compile(folder: &Path, name: &str, macros: &[String]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/modules/fake.c");
    let to = folder.join(name);
    let mut cc = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".into()));
    cc.args(["-shared", "-fPIC", "-O1", "-o"])
        .arg(&to)
        .arg(source)
        .args(macros.iter().map(|m| format!("-D{m}")));
    let out = cc.output().expect("the C compiler that Rust links with");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    to
}

fn entry(kind: Kind, path: &Path) -> Entry {
    use sha2::{Digest, Sha256};
    let bytes = fs::read(path).unwrap();
    Entry {
        file: path.file_name().unwrap().to_str().unwrap().into(),
        kind,
        dtype: "bfloat16".into(),
        head_size: if kind.is_mla() { 512 } else { 128 },
        sliding_window: false,
        soft_cap: false,
        masks: vec![Mask::None, Mask::Causal],
        arch: "sm_90a".into(),
        flashinfer: FLASHINFER.into(),
        recipe: RECIPE,
        nvcc: "13.0.88".into(),
        bytes: bytes.len() as u64,
        sha256: Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect(),
        functions: kind.functions().iter().map(|&(n, a)| (n.to_owned(), a)).collect(),
    }
}

/// The file of a kind's module, as it is asked for.
fn name(kind: Kind) -> String {
    let head_size = if kind.is_mla() { 512 } else { 128 };
    let (dtype, arch) = ("bfloat16", Some("sm_90a"));
    Want { kind, dtype, head_size, sliding_window: false, soft_cap: false, arch }.file()
}

/// What a kind's fake is compiled with; `None`: the numbers that it should have.
fn macros(kind: Kind, plan: Option<i32>, run: Option<i32>) -> [String; 3] {
    let [(_, plan_args), (name, run_args)] = kind.functions() else { panic!("{kind} has two functions") };
    let of = |given: Option<i32>, right: &usize| given.unwrap_or(*right as i32);
    [
        format!("PLAN={}", of(plan, plan_args)),
        format!("RUN={}", of(run, run_args)),
        format!("RUN_NAME=__tvm_ffi_{name}"),
    ]
}

fn right(kind: Kind) -> [String; 3] {
    macros(kind, None, None)
}

/// A folder with one module and its manifest, after `change`.
fn folder(
    kind: Kind,
    macros: &[String],
    change: impl FnOnce(&Path, &mut Entry),
) -> (tempfile::TempDir, ModuleFolder, Entry) {
    let dir = tempfile::tempdir().unwrap();
    let path = compile(dir.path(), &name(kind), macros);
    let mut one = entry(kind, &path);
    change(&path, &mut one);
    let manifest = Manifest { modules: vec![one.clone()], ..Manifest::default() };
    fs::write(dir.path().join(MANIFEST), manifest.write()).unwrap();
    let folder = ModuleFolder::open(dir.path()).unwrap();
    (dir, folder, one)
}

fn refused(
    kind: Kind,
    macros: &[String],
    change: impl FnOnce(&Path, &mut Entry),
    arch: Option<&str>,
) -> ModuleError {
    let (dir, folder, entry) = folder(kind, macros, change);
    let e = folder.try_module(&entry, arch).unwrap_err();
    let text = e.to_string();
    // Every error names the file, by its whole path.
    assert!(text.contains(&dir.path().join(name(kind)).display().to_string()), "{text}");
    e
}

fn says(e: &ModuleError, parts: &[&str]) {
    let text = e.to_string();
    assert!(parts.iter().all(|p| text.contains(p)), "{text}");
}

#[test]
fn a_module_that_is_what_its_entry_says_opens() {
    for kind in Kind::ALL {
        let (_dir, folder, entry) = folder(kind, &right(kind), |_, _| {});
        folder.try_module(&entry, Some("sm_90a")).unwrap();
        folder.try_module(&entry, None).unwrap();
    }
}

#[test]
fn files_that_are_not_what_the_manifest_says() {
    let cut = |path: &Path| {
        let bytes = fs::read(path).unwrap();
        fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    };
    let flip = |path: &Path| {
        let mut bytes = fs::read(path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(path, bytes).unwrap();
    };
    for kind in [Kind::Fa2, Kind::MlaFa2, Kind::MlaFa3] {
        let right = right(kind);
        let e = refused(kind, &right, |path, _| fs::remove_file(path).unwrap(), None);
        assert!(matches!(e, ModuleError::Missing { .. }), "{e}");
        let e = refused(kind, &right, |path, _| cut(path), None);
        assert!(matches!(e, ModuleError::Length { .. }), "{e}");
        says(&e, &["cut off", "headway kernels build flashinfer"]);
        let e = refused(kind, &right, |path, _| fs::write(path, "#!/bin/sh").unwrap(), None);
        assert!(matches!(e, ModuleError::NotElf { .. }), "{e}");
        let e = refused(kind, &right, |path, _| flip(path), None);
        assert!(matches!(e, ModuleError::Hash { .. }), "{e}");
        // Cut off before the manifest was written: the dynamic linker would not survive it.
        let e = refused(
            kind,
            &right,
            |path, one| {
                cut(path);
                *one = entry(kind, path);
            },
            None,
        );
        assert!(matches!(e, ModuleError::NotElf { .. }), "{e}");
        says(&e, &["it is cut off"]);
    }
}

#[test]
fn functions_that_are_missing_or_take_other_arguments() {
    for kind in Kind::ALL {
        let [(_, plan), (run, _)] = kind.functions() else { panic!("{kind} has two functions") };
        let e = refused(kind, &macros(kind, None, Some(-1)), |_, _| {}, None);
        let symbol_of = format!("__tvm_ffi_{run}");
        assert!(matches!(&e, ModuleError::NoSymbol { symbol, .. } if *symbol == symbol_of), "{e}");
        let e = refused(kind, &macros(kind, Some(7), None), |_, _| {}, None);
        assert!(matches!(&e, ModuleError::Arguments { listed: false, .. }), "{e}");
        says(&e, &[&format!("plan takes 7 arguments, and headway calls it with {plan}"), "0.7.4"]);
        let fewer = |_: &Path, one: &mut Entry| {
            one.functions.insert((*run).into(), 3);
        };
        let e = refused(kind, &right(kind), fewer, None);
        assert!(matches!(&e, ModuleError::Arguments { listed: true, .. }), "{e}");
        says(&e, &[&format!("{run} takes 3 arguments by the manifest")]);
        let mut importing = right(kind).to_vec();
        importing.push("IMPORTS=headway_has_no_such_function".into());
        let e = refused(kind, &importing, |_, _| {}, None);
        says(&e, &["can't be opened", "headway_has_no_such_function"]);
    }
    // A module of latent attention is none of softmax attention.
    let e = refused(Kind::Fa2, &right(Kind::MlaFa2), |_, _| {}, None);
    assert!(matches!(&e, ModuleError::Arguments { listed: false, .. }), "{e}");
}

/// A file with the right sum, described as another module: its kernels would be called with sizes that they weren't compiled for.
#[test]
fn entries_of_other_modules() {
    type Change = fn(&mut Entry);
    let changes: [(&str, Change); 6] = [
        ("d64", |e| e.head_size = 64),
        ("float16", |e| e.dtype = "float16".into()),
        ("-window", |e| e.sliding_window = true),
        ("-softcap", |e| e.soft_cap = true),
        ("sm_80", |e| e.arch = "sm_80".into()),
        ("mla_fa2", |e| e.kind = Kind::MlaFa2),
    ];
    for (part, change) in changes {
        for kind in [Kind::Fa3, Kind::MlaFa3] {
            let e = refused(kind, &right(kind), |_, one| change(one), None);
            assert!(matches!(e, ModuleError::Name { .. }), "{e}");
            says(&e, &["the manifest describes it as", part]);
        }
    }
}

#[test]
fn modules_for_others() {
    for kind in [Kind::Fa2, Kind::MlaFa3] {
        let e = refused(kind, &right(kind), |_, _| {}, Some("sm_80"));
        assert!(matches!(e, ModuleError::Arch { .. }), "{e}");
        says(&e, &["compiled for sm_90a", "--arch sm_80"]);
        let e = refused(kind, &right(kind), |_, one| one.flashinfer = "0.6.2".into(), None);
        assert!(matches!(e, ModuleError::Version { .. }), "{e}");
        says(&e, &["built from FlashInfer 0.6.2", "flashinfer-python==0.7.4"]);
    }
}

#[test]
fn manifests_that_are_none() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(ModuleFolder::open(dir.path()).unwrap().modules(), []);
    let file = dir.path().join(MANIFEST);
    let entry = r#""kind": "fa2", "dtype": "bfloat16", "head_size": 64, "sliding_window": false, "soft_cap": false,
        "masks": [], "arch": "sm_90a", "flashinfer": "0.7.4", "recipe": 1, "nvcc": "13.0", "bytes": 1, "sha256": "", "functions": {}"#;
    for (text, part) in [
        ("", "not JSON"),
        ("\0\u{1}", "not JSON"),
        ("[]", "no number \"format\""),
        (r#"{"format": 2, "modules": []}"#, "of form 2"),
        (r#"{"format": 1, "modules": 7}"#, "invalid type"),
        (r#"{"format": 1, "modules": [{}]}"#, "missing field"),
        (r#"{"format": 1, "modules": [], "more": 1}"#, "unknown field"),
        (&format!(r#"{{"format": 1, "modules": [{{"file": "../x.so", {entry}}}]}}"#), "no file name"),
        (&format!(r#"{{"format": 1, "modules": [{{"file": "/x.so", {entry}}}]}}"#), "no file name"),
    ] {
        fs::write(&file, text).unwrap();
        let e = ModuleFolder::open(dir.path()).unwrap_err();
        assert!(matches!(&e, ModuleError::Manifest { path, .. } if *path == file), "{e}");
        says(&e, &[part, "headway kernels build flashinfer"]);
    }
}
