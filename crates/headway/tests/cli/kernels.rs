//! `headway kernels`, with packages and a compiler made here: the C compiler that Rust links with stands for nvcc.

use super::support::{finish, headway};
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};
use tempfile::TempDir;

/// A folder of packages like FlashInfer's, and an nvcc that compiles the fake module of `headway-cuda`'s tests from
/// the file with the functions, nothing from the others, and counts its calls in `calls`.
fn packages(version: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    let file = |name: &str, text: &str| -> PathBuf {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    };
    file("flashinfer/_build_meta.py", &format!("__version__ = \"{version}\"\n"));
    for name in ["batch_prefill.cu", "batch_prefill_jit_binding.cu", "batch_prefill_paged.cuh"] {
        file(&format!("flashinfer/data/csrc/{name}"), name);
    }
    for name in ["batch_prefill_customize_config.jinja", "batch_prefill_paged_kernel_inst.jinja"] {
        file(&format!("flashinfer/data/csrc/{name}"), "{{ head_dim_qk }} {{ mask_mode }}");
    }
    file("tvm_ffi/include/tvm/ffi/c_api.h", "");
    file("nvidia/cu13/lib/libcudart_static.a", "!<arch>\n");
    let fake = Path::new(env!("CARGO_MANIFEST_DIR")).join("../headway-cuda/tests/modules/fake.c");
    let nvcc = format!(
        "#!/bin/sh\n\
         if [ \"$1\" = --version ]; then echo 'release 13.0, V13.0.88'; exit; fi\n\
         echo call >> '{calls}'\n\
         for a in \"$@\"; do [ \"$last\" = -o ] && out=$a; [ \"$last\" = -c ] && in=$a; last=$a; done\n\
         case $in in\n\
         *jit_binding*) exec cc -c -fPIC -DPLAN=21 -DRUN=29 '{fake}' -o \"$out\";;\n\
         *) echo 'int headway_test;' | cc -c -fPIC -x c -fcommon - -o \"$out\";;\n\
         esac\n",
        calls = dir.path().join("calls").display(),
        fake = fake.display(),
    );
    let tool = file("nvidia/cu13/bin/nvcc", &nvcc);
    fs::set_permissions(tool, fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

fn kernels(folder: &Path, args: &[&str]) -> super::support::Run {
    finish(headway().env("HEADWAY_KERNELS_DIR", folder).env("CXX", "cc").arg("kernels").args(args))
}

const BUILD: [&str; 8] =
    ["build", "flashinfer", "--head-size", "128", "--dtype", "bfloat16", "--arch", "sm_80"];

#[test]
fn modules_are_built_listed_and_left_alone() {
    let (packages, home) = (packages("0.7.4"), TempDir::new().unwrap());
    let folder = home.path().join("made when needed");
    let build = |more: &[&str]| {
        let given = ["--packages", packages.path().to_str().unwrap(), "--json"];
        kernels(&folder, &[&BUILD[..], &given, more].concat()).fine()
    };
    let calls = || fs::read_to_string(packages.path().join("calls")).unwrap().lines().count();
    let r = build(&["--jobs", "2"]);
    let file = folder.join("flashinfer-fa2-bfloat16-d128-sm_80.so");
    assert_eq!(r.object()["built"][0].as_str(), file.to_str());
    assert!(r.err.contains("[4/4] flashinfer-fa2-bfloat16-d128-sm_80.so: "), "{}", r.err);
    assert_eq!(calls(), 4);
    let again = build(&[]);
    assert_eq!((again.object()["present"][0].as_str(), calls()), (file.to_str(), 4));
    // What is in the folder.
    let listed = kernels(&folder, &["list", "--json", "--check"]).fine().object();
    let one = &listed["modules"][0];
    assert_eq!((&one["arch"], &one["nvcc"], &one["fault"]), (&"sm_80".into(), &"13.0.88".into(), &().into()));
    assert_eq!(one["functions"], serde_json::json!({"paged_run": 29, "plan": 21}));
    let table = kernels(&folder, &["list"]).fine().out;
    assert!(table.contains("KIND") && table.contains("fa2") && !folder.join(".build/x").exists(), "{table}");
    // A file that was changed is named, and built again.
    fs::write(&file, "not a module").unwrap();
    let bad = kernels(&folder, &["list", "--check"]);
    assert_eq!(bad.code, Some(1));
    assert!(bad.out.contains("not a shared library") && bad.out.contains("sm_80.so"), "{}", bad.out);
    assert!(!build(&[]).object()["built"].as_array().unwrap().is_empty());
    assert_eq!(calls(), 8);
}

/// Builds that are begun at once in one folder: one does the work, the others wait and find it done.
#[test]
fn builds_of_one_folder_take_turns() {
    let (packages, home) = (packages("0.7.4"), TempDir::new().unwrap());
    let given = ["--packages", packages.path().to_str().unwrap(), "--json"];
    let runs: Vec<_> = std::thread::scope(|s| {
        let begun: Vec<_> =
            (0..3).map(|_| s.spawn(|| kernels(home.path(), &[&BUILD[..], &given].concat()).fine())).collect();
        begun.into_iter().map(|r| r.join().unwrap().object()).collect()
    });
    let built = runs.iter().filter(|r| !r["built"].as_array().unwrap().is_empty()).count();
    let calls = fs::read_to_string(packages.path().join("calls")).unwrap().lines().count();
    assert_eq!((built, calls), (1, 4), "{runs:?}");
    let listed = kernels(home.path(), &["list", "--json", "--check"]).fine().object();
    assert_eq!(listed["modules"].as_array().unwrap().len(), 1);
}

#[test]
fn an_empty_folder_says_how_to_fill_it_and_a_manifest_that_is_none_is_named() {
    let home = TempDir::new().unwrap();
    let out = kernels(home.path(), &["list"]).fine().out;
    assert!(out.contains("no modules in") && out.contains("headway kernels build --help"), "{out}");
    assert!(out.contains("headway kernels fetch --help"), "{out}");
    assert!(
        kernels(home.path(), &["list", "--json"]).fine().object()["modules"].as_array().unwrap().is_empty()
    );
    fs::write(home.path().join("manifest.json"), "{").unwrap();
    kernels(home.path(), &["list"]).refused(&["manifest.json: not JSON"]);
}

#[test]
fn what_is_missing_is_named_with_how_to_get_it() {
    let home = TempDir::new().unwrap();
    let old = packages("0.6.11");
    let given = |packages: &str, more: &[&str]| {
        kernels(home.path(), &[&BUILD[..], &["--packages", packages], more].concat())
    };
    given(old.path().to_str().unwrap(), &[]).refused(&["FlashInfer 0.6.11", "flashinfer-python==0.7.4"]);
    given("/nowhere", &[])
        .refused(&["flashinfer was not found", "pip install --no-deps flashinfer-python==0.7.4"]);
    let new = packages("0.7.4");
    let nvcc = ["--nvcc", "/nowhere/nvcc"];
    given(new.path().to_str().unwrap(), &nvcc)
        .refused(&["nvcc was not found", "pip install nvidia-cuda-nvcc"]);
    for (args, part) in [
        (&["--head-size", "96", "--arch", "sm_90a"][..], "head size 96"),
        (&["--head-size", "64", "--arch", "sm90"], "write it as sm_90a"),
        (&["--arch", "sm_90a"], "give --head-size"),
        (&["--head-size", "64"], "--arch"),
    ] {
        kernels(home.path(), &[&["build", "flashinfer"], args].concat()).refused(&[part]);
    }
    kernels(home.path(), &["build", "cutlass"]).refused(&["flashinfer", "triton"]);
}

#[test]
fn a_compiler_that_fails_is_quoted_and_the_rest_is_kept() {
    let (packages, home) = (packages("0.7.4"), TempDir::new().unwrap());
    let nvcc = packages.path().join("nvidia/cu13/bin/nvcc");
    let works = fs::read_to_string(&nvcc).unwrap();
    let fails =
        works.replace("*jit_binding*) exec cc", "*jit_binding*) echo 'x.cu(7): error: no' >&2; exit 1; cc");
    fs::write(&nvcc, fails).unwrap();
    let args = [&BUILD[..], &["--packages", packages.path().to_str().unwrap(), "--jobs", "1"]].concat();
    let r = kernels(home.path(), &args);
    let last = r.err.lines().last().unwrap_or_default();
    assert!(last.contains("nvcc failed on") && last.contains("x.cu(7): error: no"), "{}", r.err);
    assert!(
        kernels(home.path(), &["list", "--json"]).fine().object()["modules"].as_array().unwrap().is_empty()
    );
    // The first file was compiled: it is not again.
    fs::write(&nvcc, works).unwrap();
    let r = kernels(home.path(), &args).fine();
    assert!(r.err.contains("1 of 4 files are compiled already"), "{}", r.err);
}

#[test]
fn fetched_files_are_listed_and_wheels_of_other_versions_refused() {
    let home = TempDir::new().unwrap();
    let fetch = |wheel: &str| kernels(home.path(), &["fetch", "flash-attn", "--wheel", wheel]);
    fetch("vllm-0.9.0-cp38-abi3-manylinux1_x86_64.whl")
        .refused(&["of vLLM 0.9.0", "this headway calls 0.33.0"]);
    fetch("x.zip").refused(&["x.zip: not a wheel of vLLM 0.33.0"]);
    kernels(home.path(), &["fetch", "flash-attn", "--python", "/nowhere/python3"])
        .refused(&["pip download --no-deps vllm==0.33.0 failed", "--wheel FILE"]);
    let entry = r#"{"file": "_flashmla_C.abi3.so", "extension": "flash_mla", "vllm": "0.33.0", "bytes": 4, "sha256": "00"}"#;
    let manifest = format!(r#"{{"format": 1, "modules": [], "extensions": [{entry}]}}"#);
    fs::write(home.path().join("manifest.json"), manifest).unwrap();
    let table = kernels(home.path(), &["list"]).fine().out;
    assert!(
        table.contains("EXTENSION") && table.contains("flash_mla") && !table.contains("HEAD SIZE"),
        "{table}"
    );
    let bad = kernels(home.path(), &["list", "--check", "--json"]);
    assert_eq!(bad.code, Some(1));
    let fault = &bad.object()["extensions"][0]["fault"];
    assert!(fault.as_str().unwrap().contains("the manifest lists it, but it is not there"), "{fault}");
}
