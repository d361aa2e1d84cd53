//! Folders of compiled Triton kernels that are not what they should be. Needs neither a device nor Triton; where
//! `HEADWAY_TEST_TRITON` names a folder of Python packages with Triton, kernels are compiled for three generations.

use headway_cuda::modules::triton::{
    FormKind, TRITON, TRITON_MANIFEST, TritonBuild, TritonEntry, TritonError, TritonFolder, TritonManifest,
    TritonWant, WantOf, build_triton, recipe,
};
use std::{fs, path::Path};

const WANT: TritonWant<'_> = TritonWant { dtype: "bfloat16", of: paged(64, false), arch: None };

const fn paged(head_size: usize, soft_cap: bool) -> WantOf {
    WantOf::Paged { head_size, soft_cap }
}

/// A file as a compiler leaves it, as far as it is checked: a header, a table of symbols, their names.
fn cubin(machine: u16, function: &str) -> Vec<u8> {
    let mut names = b"\0".to_vec();
    names.extend(function.as_bytes());
    names.push(0);
    // No symbol, and the function.
    let mut symbols = vec![0; 48];
    symbols[24] = 1;
    symbols[28] = 0x12;
    let (symbols_at, names_at) = (64u64, 64 + 48);
    let table = names_at + names.len() as u64;
    let mut file = vec![0; 64];
    file[..6].copy_from_slice(b"\x7fELF\x02\x01");
    file[16..20].copy_from_slice(&[2, 0, machine as u8, (machine >> 8) as u8]);
    file[40..48].copy_from_slice(&table.to_le_bytes());
    file[58..62].copy_from_slice(&[64, 0, 3, 0]);
    file.extend(symbols);
    file.extend(&names);
    let mut section = |kind: u32, at: u64, len: u64, link: u32| {
        let mut header = [0; 64];
        header[4..8].copy_from_slice(&kind.to_le_bytes());
        header[24..32].copy_from_slice(&at.to_le_bytes());
        header[32..40].copy_from_slice(&len.to_le_bytes());
        header[40..44].copy_from_slice(&link.to_le_bytes());
        file.extend(header);
    };
    section(0, 0, 0, 0);
    section(2, symbols_at, 48, 2);
    section(3, names_at, names.len() as u64, 0);
    file
}

fn sum(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// A kernel's file in a folder, and its entry.
fn kernel(folder: &Path, kind: FormKind, code: &[u8]) -> TritonEntry {
    let form = WANT.form(kind);
    let file = form.name("sm_90a") + ".cubin";
    fs::write(folder.join(&file), code).unwrap();
    TritonEntry {
        file,
        function: kind.function().into(),
        kind,
        dtype: "bfloat16".into(),
        head_size: 64,
        soft_cap: false,
        arch: "sm_90a".into(),
        rows: form.rows(),
        keys: form.keys(),
        num_warps: form.warps(),
        num_stages: 1,
        shared: 4096,
        arguments: form.arguments(),
        triton: TRITON.into(),
        recipe: recipe().into(),
        bytes: code.len() as u64,
        sha256: sum(code),
        sum: String::new(),
    }
    .sealed()
}

/// What opening a kernel says after `change`, in a manifest that was written so.
fn refused(code: &[u8], change: impl FnOnce(&Path, &mut TritonEntry), arch: Option<&str>) -> TritonError {
    let sealed = |path: &Path, entry: &mut TritonEntry| {
        change(path, entry);
        *entry = entry.clone().sealed();
    };
    refused_as_is(code, sealed, arch)
}

/// [`refused`] in a manifest that was changed later.
fn refused_as_is(
    code: &[u8],
    change: impl FnOnce(&Path, &mut TritonEntry),
    arch: Option<&str>,
) -> TritonError {
    let dir = tempfile::tempdir().unwrap();
    let mut entry = kernel(dir.path(), FormKind::FewRows, code);
    change(&dir.path().join(entry.file.clone()), &mut entry);
    let manifest = TritonManifest { kernels: vec![entry.clone()], ..TritonManifest::default() };
    fs::write(dir.path().join(TRITON_MANIFEST), manifest.write()).unwrap();
    let folder = TritonFolder::open(dir.path()).unwrap();
    let e = folder.code(&entry, arch).unwrap_err();
    // Every error names the file, by its whole path.
    assert!(e.to_string().contains(&dir.path().join(&entry.file).display().to_string()), "{e}");
    e
}

fn says(e: &TritonError, parts: &[&str]) {
    let text = e.to_string();
    assert!(parts.iter().all(|p| text.contains(p)), "{text}");
}

#[test]
fn a_kernel_that_is_what_its_entry_says_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let kernels = WANT.kinds().iter().map(|&kind| kernel(dir.path(), kind, &cubin(190, kind.function())));
    let manifest = TritonManifest { kernels: kernels.collect(), ..TritonManifest::default() };
    fs::write(dir.path().join(TRITON_MANIFEST), manifest.write()).unwrap();
    let folder = TritonFolder::open(dir.path()).unwrap();
    assert!(folder.has(&TritonWant { arch: Some("sm_90a"), ..WANT }));
    for other in [
        TritonWant { arch: Some("sm_80"), ..WANT },
        TritonWant { of: paged(128, false), ..WANT },
        TritonWant { of: WantOf::Latent, ..WANT },
        TritonWant { dtype: "float16", ..WANT },
        TritonWant { of: paged(64, true), ..WANT },
    ] {
        assert!(!folder.has(&other), "{other:?}");
    }
    for entry in folder.kernels() {
        assert_eq!(folder.code(entry, Some("sm_90a")).unwrap(), cubin(190, entry.kind.function()));
    }
}

#[test]
fn files_that_are_not_what_the_manifest_says() {
    let right = cubin(190, "paged_attention");
    let e = refused(&right, |path, _| fs::remove_file(path).unwrap(), None);
    assert!(matches!(e, TritonError::Missing { .. }), "{e}");
    let e = refused(&right, |path, _| fs::write(path, &right[..100]).unwrap(), None);
    assert!(matches!(e, TritonError::Length { .. }), "{e}");
    says(&e, &["cut off", "headway kernels build triton"]);
    let flip = |path: &Path, _: &mut TritonEntry| {
        let mut bytes = right.clone();
        bytes[63] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let e = refused(&right, flip, None);
    assert!(matches!(e, TritonError::Hash { .. }), "{e}");
    // Cut off before the manifest was written, anywhere.
    for len in 0..right.len() {
        let e = refused(&right[..len], |_, _| {}, None);
        assert!(matches!(e, TritonError::NotCubin { .. }), "{len}: {e}");
    }
    let e = refused(&cubin(190, "another_function"), |_, _| {}, None);
    says(&e, &["it has no function paged_attention", "build it again"]);
    says(&refused(&cubin(62, "paged_attention"), |_, _| {}, None), &["not for NVIDIA's devices"]);
    says(&refused(b"#!/bin/sh", |_, _| {}, None), &["no ELF header"]);
    // Offsets that no file could hold.
    let mut wild = right.clone();
    wild[40..48].fill(0xff);
    says(&refused(&wild, |_, _| {}, None), &["cut off"]);
    let mut wild = right.clone();
    let at = right.len() - 128 + 32;
    wild[at..at + 8].fill(0xff);
    says(&refused(&wild, |_, _| {}, None), &["cut off"]);
}

#[test]
fn launches_are_what_was_built() {
    let right = cubin(190, "paged_attention");
    for change in [
        (|e| e.shared = 0) as fn(&mut TritonEntry),
        |e| e.num_stages = 4,
        |e| e.keys = 16,
        |e| e.sha256.clear(),
        // As before there were sums.
        |e| e.sum.clear(),
    ] {
        let e = refused_as_is(&right, |_, entry| change(entry), None);
        assert!(matches!(e, TritonError::Changed { .. }), "{e}");
        says(&e, &["its entry in triton.json was changed", "headway kernels build triton"]);
    }
}

#[test]
fn what_is_no_plain_file_is_never_opened() {
    let right = cubin(190, "paged_attention");
    let e = refused(
        &right,
        |path, _| {
            fs::remove_file(path).unwrap();
            fs::create_dir(path).unwrap();
        },
        None,
    );
    assert!(matches!(e, TritonError::NotFile { .. }), "{e}");
    // Reading a pipe that nobody writes to has no end.
    let pipe = |path: &Path, _: &mut TritonEntry| {
        fs::remove_file(path).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    let e = refused(&right, pipe, None);
    assert!(matches!(e, TritonError::NotFile { .. }), "{e}");
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join(TRITON_MANIFEST)).unwrap();
    assert!(matches!(TritonFolder::open(dir.path()), Err(TritonError::NotFile { .. })));
}

#[test]
fn files_are_looked_for_without_being_read() {
    let dir = tempfile::tempdir().unwrap();
    let kernels = WANT.kinds().iter().map(|&kind| kernel(dir.path(), kind, &cubin(190, kind.function())));
    let kernels: Vec<_> = kernels.collect();
    let manifest = TritonManifest { kernels: kernels.clone(), ..TritonManifest::default() };
    fs::write(dir.path().join(TRITON_MANIFEST), manifest.write()).unwrap();
    let folder = TritonFolder::open(dir.path()).unwrap();
    assert_eq!(folder.lies(&WANT), Ok(()));
    let last = dir.path().join(&kernels[3].file);
    // What it holds is for when it is loaded.
    fs::write(&last, vec![0; kernels[3].bytes as usize]).unwrap();
    assert_eq!(folder.lies(&WANT), Ok(()));
    fs::write(&last, "cut").unwrap();
    assert!(matches!(folder.lies(&WANT), Err(TritonError::Length { found: 3, .. })));
    fs::remove_file(&last).unwrap();
    assert_eq!(folder.lies(&WANT), Err(TritonError::Missing { path: last }));
}

#[test]
fn kernels_for_others() {
    let right = cubin(190, "paged_attention");
    let e = refused(&right, |_, _| {}, Some("sm_80"));
    assert!(matches!(e, TritonError::Arch { .. }), "{e}");
    says(&e, &["compiled for sm_90a", "--arch sm_80"]);
    // An entry that is changed names another file.
    for change in [
        (|e| e.head_size = 128) as fn(&mut TritonEntry),
        |e| e.dtype = "float16".into(),
        |e| e.soft_cap = true,
        |e| e.kind = FormKind::ManyRows,
        |e| e.arch = "sm_100a".into(),
    ] {
        let e = refused(&right, |_, entry| change(entry), None);
        assert!(matches!(e, TritonError::Name { .. }), "{e}");
        says(&e, &["the manifest's entry is of triton-", "headway kernels build triton"]);
    }
    let e = refused(&right, |_, entry| entry.triton = "3.4.0".into(), None);
    assert!(matches!(e, TritonError::Version { .. }), "{e}");
    says(&e, &["Triton 3.4.0", "triton==3.6.0"]);
    // Without the scratch areas of later versions; another function.
    let e = refused(&right, |_, entry| drop(entry.arguments.pop()), None);
    assert!(matches!(e, TritonError::Arguments { .. }), "{e}");
    let e = refused(&right, |_, entry| entry.function = "merge_parts".into(), None);
    assert!(matches!(e, TritonError::Arguments { .. }), "{e}");
    // What selection takes for not built is named with why.
    for (change, what) in [
        ((|e| e.recipe = "0123".into()) as fn(&mut TritonEntry), "recipe 0123"),
        (|e| e.rows = 32, "tiles of 32 rows, here of 16"),
        (|e| e.keys = 256, "256 keys a step, here 128"),
        (|e| e.num_warps = 8, "8 warps a block, here 4"),
        (|e| e.num_stages = 6, "6 stages, here up to 5"),
    ] {
        let e = refused(&right, |_, entry| change(entry), None);
        assert!(matches!(e, TritonError::Sources { .. }), "{e}");
        says(&e, &["built of other sources", what, "build it again"]);
    }
}

#[test]
fn manifests_that_are_none() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(TritonFolder::open(dir.path()).unwrap().kernels(), []);
    let entry = kernel(dir.path(), FormKind::Merge, b"");
    let with = |change: &dyn Fn(&mut TritonEntry)| {
        let mut changed = entry.clone();
        change(&mut changed);
        TritonManifest { kernels: vec![changed], ..TritonManifest::default() }.write()
    };
    for (text, part) in [
        (String::new(), "not JSON"),
        ("[]".into(), "no number \"format\""),
        (r#"{"format": 2, "kernels": []}"#.into(), "of form 2"),
        (r#"{"format": 1, "kernels": [{}]}"#.into(), "missing field"),
        (r#"{"format": 1, "kernels": [], "more": 1}"#.into(), "unknown field"),
        (with(&|e| e.file = "../x.cubin".into()), "no file name"),
        (with(&|e| e.file = "/x.cubin".into()), "no file name"),
        (with(&|e| e.num_warps = 64), "64 warps"),
        (with(&|e| e.shared = u32::MAX), "bytes of shared memory"),
        (with(&|e| e.num_stages = 0), "in 0 stages"),
        (with(&|e| e.dtype = "\u{1b}[2J".into()), "control characters in \"\\u{1b}[2J\""),
        (with(&|e| e.arguments = vec!["\r".into()]), "control characters"),
        (r#"{"format": 1, "kernels": [], "\u001b[2J": 1}"#.into(), "unknown field `\\u{1b}[2J`"),
        (
            TritonManifest { kernels: vec![entry.clone(), entry.clone()], ..TritonManifest::default() }
                .write(),
            "it lists triton-merge-bfloat16-d64-sm_90a.cubin twice",
        ),
    ] {
        let file = dir.path().join(TRITON_MANIFEST);
        fs::write(&file, text).unwrap();
        let e = TritonFolder::open(dir.path()).unwrap_err();
        assert!(matches!(&e, TritonError::Manifest { path, .. } if *path == file), "{e}");
        says(&e, &[part, "headway kernels build triton"]);
    }
}

#[test]
fn triton_compiles_the_kernels_for_every_generation() {
    let Some(packages) = std::env::var_os("HEADWAY_TEST_TRITON") else {
        println!("not run: HEADWAY_TEST_TRITON names no folder of packages with Triton {TRITON}");
        return;
    };
    for (arch, head_size, dtype, soft_cap) in [
        ("sm_80", 40, "float16", true),
        // 99 KiB of shared memory a block.
        ("sm_89", 256, "bfloat16", false),
        ("sm_90a", 128, "bfloat16", false),
        ("sm_100a", 256, "bfloat16", true),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let options = TritonBuild {
            folder: dir.path().join("made when needed"),
            head_sizes: vec![head_size],
            dtypes: vec![dtype.into()],
            arch: arch.into(),
            soft_cap,
            mla: true,
            packages: Some(packages.clone().into()),
        };
        let report = build_triton(&options, &mut |line| println!("{line}")).unwrap();
        assert_eq!((report.built.len(), report.present.len()), (7, 0));
        let folder = TritonFolder::open(&options.folder).unwrap();
        for of in [paged(head_size, soft_cap), WantOf::Latent] {
            assert!(folder.has(&TritonWant { dtype, of, arch: Some(arch) }));
        }
        folder.kernels().iter().for_each(|k| drop(folder.code(k, Some(arch)).unwrap()));
        // What is there is left.
        let again = build_triton(&options, &mut |_| {}).unwrap();
        assert_eq!((again.built.len(), again.present.len()), (0, 7));
    }
}
