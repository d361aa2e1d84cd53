//! `headway kernels build triton`, with a package made here that stands for Triton: it answers as the compiler does, with
//! files that hold a function and nothing else.

use super::support::{Run, finish, headway};
use std::{fs, os::unix::fs::PermissionsExt, path::Path};
use tempfile::TempDir;

const TRITON: &str = r#"
import inspect, types, struct
__version__ = "VERSION"
def jit(f):
    f.arg_names = list(inspect.signature(f).parameters)
    return f
def cubin(name):
    names = b"\0" + name.encode() + b"\0"
    symbols = bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0, 0, 0, 0)
    at = 64 + len(symbols)
    head = b"\x7fELF\x02\x01" + bytes(10) + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, at + len(names), 0, 64, 0, 0, 64, 3, 0)
    def section(kind, at, size, link):
        return struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, at, size, link, 0, 0, 0)
    return head + symbols + names + section(0, 0, 0, 0) + section(2, 64, 48, 2) + section(3, at, len(names), 0)
def compile(src, target, options):
    assert target.arch == 80, target
    if src.constexprs.get("HEAD") == 256:
        raise RuntimeError("no registers are left")
    m = types.SimpleNamespace(name=src.fn.__name__, shared=options["num_stages"] * 60000, num_ctas=1,
        num_warps=options["num_warps"], global_scratch_size=0, profile_scratch_size=0)
    return types.SimpleNamespace(metadata=m, asm={"cubin": cubin(src.fn.__name__)})
"#;
const COMPILER: &str = "
class ASTSource:
    def __init__(self, fn, signature, constexprs, attrs):
        self.fn, self.signature, self.constexprs, self.attrs = fn, signature, constexprs, attrs
";
const LANGUAGE: &str = "
class constexpr:
    def __init__(self, value):
        self.value = value
";
const TARGET: &str = "
import collections
GPUTarget = collections.namedtuple('GPUTarget', 'backend arch warp_size')
";

/// A folder of packages with such a Triton.
fn packages(version: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    fs::create_dir_all(dir.path().join("triton/backends")).unwrap();
    for (name, text) in [
        ("__init__.py", &*TRITON.replace("VERSION", version)),
        ("compiler.py", COMPILER),
        ("language.py", LANGUAGE),
        ("backends/__init__.py", ""),
        ("backends/compiler.py", TARGET),
    ] {
        fs::write(dir.path().join("triton").join(name), text).unwrap();
    }
    dir
}

fn kernels(folder: &Path, args: &[&str]) -> Run {
    finish(headway().env("HEADWAY_KERNELS_DIR", folder).arg("kernels").args(args))
}

fn build(folder: &Path, packages: &TempDir, more: &[&str]) -> Run {
    let given = ["--packages", packages.path().to_str().unwrap(), "--arch", "sm_80"];
    kernels(folder, &[&["build", "triton"], &given[..], more].concat())
}

/// The last line of what was said, of a build that failed under way.
fn last(r: &Run, parts: &[&str]) {
    let line = r.err.lines().last().unwrap_or_default();
    assert!(r.code == Some(1) && parts.iter().all(|p| line.contains(p)), "{}", r.err);
}

#[test]
fn kernels_are_built_listed_and_left_alone() {
    let (packages, home) = (packages("3.6.0"), TempDir::new().unwrap());
    let folder = home.path().join("made when needed");
    let r = build(&folder, &packages, &["--head-size", "64", "--json"]).fine();
    let built = r.object()["built"].as_array().unwrap().clone();
    assert_eq!(built.len(), 4);
    let file = folder.join("triton-many_rows-bfloat16-d64-sm_80.cubin");
    assert!(built.iter().any(|f| f.as_str() == file.to_str()), "{built:?}");
    let again = build(&folder, &packages, &["--head-size", "64", "--json"]).fine().object();
    assert_eq!(
        (again["built"].as_array().unwrap().len(), again["present"].as_array().unwrap().len()),
        (0, 4)
    );
    // As many stages as fit into the shared memory of such a device.
    let listed = kernels(&folder, &["list", "--json", "--check"]).fine().object();
    let of =
        |kind: &str| listed["triton"].as_array().unwrap().iter().find(|k| k["kind"] == kind).unwrap().clone();
    let few = of("few_rows");
    assert_eq!((few["num_stages"].as_u64(), few["shared"].as_u64()), (Some(2), Some(120_000)));
    assert_eq!((&few["triton"], &few["fault"]), (&"3.6.0".into(), &().into()));
    assert_eq!(few["arguments"].as_array().unwrap().len(), 30);
    assert_eq!(of("merge")["arguments"].as_array().unwrap().len(), 10);
    let table = kernels(&folder, &["list"]).fine().out;
    assert!(table.contains("KERNEL") && table.contains("many_rows") && !table.contains("KIND"), "{table}");
    // A folder may serve several users: the manifest has the mode that any file gets.
    let mode = |file: &Path| fs::metadata(file).unwrap().permissions().mode() & 0o777;
    let plain = packages.path().join("plain");
    fs::write(&plain, "").unwrap();
    assert_eq!([mode(&folder.join("triton.json")), mode(&file)], [mode(&plain); 2]);
    // Nothing of the build is left but the kernels.
    let left = fs::read_dir(&folder).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap());
    assert!(left.into_iter().all(|f| f.ends_with(".cubin") || f == "triton.json" || f.ends_with(".lock")));
    // Latent attention has kernels of its own.
    let latent = build(&folder, &packages, &["--mla", "--json"]).fine().object();
    assert_eq!(latent["built"].as_array().unwrap().len(), 3);
    let listed = kernels(&folder, &["list", "--json", "--check"]).fine().object();
    let many = listed["triton"].as_array().unwrap().iter().find(|k| k["kind"] == "latent_many_rows").unwrap();
    assert_eq!((many["head_size"].as_u64(), many["arguments"].as_array().unwrap().len()), (Some(512), 21));
    // A file that was changed is named, and built again.
    fs::write(&file, "not a kernel").unwrap();
    let bad = kernels(&folder, &["list", "--check"]);
    assert_eq!(bad.code, Some(1));
    assert!(bad.out.contains("cut off or was replaced") && bad.out.contains("many_rows"), "{}", bad.out);
    let mended = build(&folder, &packages, &["--head-size", "64", "--json"]).fine().object();
    assert_eq!(mended["built"].as_array().unwrap().len(), 1);
    // One again: a launch that the kernel was not compiled for.
    let manifest = folder.join("triton.json");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replacen("\"shared\": 120000", "\"shared\": 0", 1)).unwrap();
    let bad = kernels(&folder, &["list", "--check"]);
    assert!(bad.code == Some(1) && bad.out.contains("its entry in triton.json was changed"), "{}", bad.out);
    let mended = build(&folder, &packages, &["--head-size", "64"]).fine();
    assert!(mended.err.contains("compiling 1 kernel for sm_80 with Triton 3.6.0"), "{}", mended.err);
    assert_eq!(fs::read_to_string(&manifest).unwrap(), text);
    kernels(&folder, &["list", "--check"]).fine();
    // And one of other sources.
    fs::write(&manifest, text.replacen("\"recipe\": \"", "\"recipe\": \"0", 1)).unwrap();
    let bad = kernels(&folder, &["list", "--check"]);
    assert!(bad.code == Some(1) && bad.out.contains("built of other sources (recipe 0"), "{}", bad.out);
}

#[test]
fn a_pipe_in_a_kernels_place_is_not_waited_for() {
    let (packages, home) = (packages("3.6.0"), TempDir::new().unwrap());
    build(home.path(), &packages, &["--head-size", "64"]).fine();
    let file = home.path().join("triton-merge-bfloat16-d64-sm_80.cubin");
    fs::remove_file(&file).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&file).status().unwrap().success());
    let bad = kernels(home.path(), &["list", "--check"]);
    assert!(bad.code == Some(1) && bad.out.contains("no plain file"), "{}", bad.out);
}

#[test]
fn what_can_not_be_built_is_refused_by_name() {
    let (packages, home) = (packages("3.6.0"), TempDir::new().unwrap());
    for (args, parts) in [
        (&["--head-size", "12"][..], &["head size 12", "multiples of 8"][..]),
        (&["--head-size", "64", "--dtype", "float32"], &["dtype float32"]),
        (&[], &["name what to build: --head-size or --mla"]),
        (&["--head-size", "64", "--sliding-window"], &["--sliding-window is not for triton", "leave it out"]),
        (&["--head-size", "64", "--jobs", "2"], &["--jobs is not for triton"]),
    ] {
        build(home.path(), &packages, args).refused(parts);
    }
    // Triton's own words, for the kernel that it failed on.
    let r = build(home.path(), &packages, &["--head-size", "256"]);
    last(&r, &["triton-few_rows-bfloat16-d256-sm_80", "no registers are left"]);
    let listed = kernels(home.path(), &["list", "--json"]).fine().object();
    assert!(listed["triton"].as_array().unwrap().is_empty());
}

#[test]
fn what_is_missing_is_named_with_how_to_get_it() {
    let home = TempDir::new().unwrap();
    let old = packages("3.4.0");
    let r = build(home.path(), &old, &["--head-size", "64"]);
    last(&r, &["Triton 3.4.0", "pip install triton==3.6.0"]);
    assert!(!r.err.contains("compiling"), "{}", r.err);
    let broken = packages("3.6.0");
    fs::write(
        broken.path().join("triton/__init__.py"),
        "raise ModuleNotFoundError(\"No module named 'triton'\")\n",
    )
    .unwrap();
    let r = build(home.path(), &broken, &["--head-size", "64"]);
    last(&r, &["the Python package triton was not found", "pip install triton==3.6.0", "--packages FOLDER"]);
    assert!(!r.err.contains("compiling"), "{}", r.err);
    // Its words can't move the cursor.
    fs::write(broken.path().join("triton/__init__.py"), "raise RuntimeError(\"\\x1b[2Jgone\")\n").unwrap();
    let r = build(home.path(), &broken, &["--head-size", "64"]);
    last(&r, &["RuntimeError: \\u{1b}[2Jgone"]);
}
