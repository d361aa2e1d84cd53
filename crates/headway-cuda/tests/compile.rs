//! Every kernel compiles for every generation that is promised, and folders of compiled kernels survive what happens to
//! them. Needs NVRTC (`LD_LIBRARY_PATH` names its folder), no device and no driver. Without it the tests say so and
//! pass; with `HEADWAY_TEST_NVRTC=required` they fail.

use headway_cuda::{
    Arch, KernelSpec,
    compile::{Compiler, DiskCache, Nvrtc, Sources},
    kernels,
};
use std::{cell::RefCell, collections::BTreeSet, fs, rc::Rc, thread, time::Instant};

/// Ampere, Hopper, Blackwell.
const ARCHS: [Arch; 3] = [Arch::of((8, 0)), Arch::of((9, 0)), Arch::of((10, 0))];

fn nvrtc(test: &str) -> Option<Nvrtc> {
    match Nvrtc::load() {
        Ok(nvrtc) => Some(nvrtc),
        Err(e) => {
            let required = std::env::var_os("HEADWAY_TEST_NVRTC").is_some_and(|v| v == "required");
            assert!(!required, "{test}: {e}");
            println!("{test}: not run: {e}");
            None
        }
    }
}

#[test]
fn every_kernel_compiles() {
    let Some(nvrtc) = nvrtc("every_kernel_compiles") else { return };
    let specs = kernels::specs().unwrap();
    let files: BTreeSet<_> = specs.iter().map(|s| s.file).collect();
    let all: BTreeSet<_> = Sources::embedded().kernels().collect();
    assert_eq!(files, all, "each file is compiled in some form");
    let start = Instant::now();
    let jobs: Vec<(Arch, &KernelSpec)> =
        ARCHS.into_iter().flat_map(|arch| specs.iter().map(move |s| (arch, s))).collect();
    let threads = thread::available_parallelism().map_or(1, |n| n.get());
    let share = jobs.len().div_ceil(threads);
    let failed: Vec<String> = thread::scope(|s| {
        let workers: Vec<_> = jobs
            .chunks(share)
            .map(|jobs| {
                let nvrtc = nvrtc.clone();
                s.spawn(move || jobs.iter().filter_map(|(arch, spec)| failure(&nvrtc, *arch, spec)).collect())
            })
            .collect();
        workers.into_iter().flat_map(|w| -> Vec<String> { w.join().unwrap() }).collect()
    });
    println!("{} forms compiled in {:.1?}, {} failed", jobs.len(), start.elapsed(), failed.len());
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// What is wrong with one form, if anything.
fn failure(nvrtc: &Nvrtc, arch: Arch, spec: &KernelSpec) -> Option<String> {
    let compiler = Compiler::with(Sources::embedded(), nvrtc.clone(), arch, None, None);
    match compiler.cubin(spec.file, &spec.defines) {
        Err(e) => Some(e.to_string()),
        Ok(code) if !code.starts_with(b"\x7fELF") => Some(format!("{}: no machine code", spec.file)),
        // Names of kernels stand in the file's table of names.
        Ok(code) => {
            let found = code.windows(spec.entry.len()).any(|w| w == spec.entry.as_bytes());
            (!found).then(|| format!("{} has no kernel {}", spec.file, spec.entry))
        }
    }
}

const KERNEL: &str = "#include \"lib/one.cuh\"\nextern \"C\" __global__ void k(int* p) { *p = ONE + X; }\n";

fn sources(header: &'static str) -> Sources {
    Sources::of(vec![("k.cu", KERNEL), ("lib/one.cuh", header)])
}

/// A compiler that notes what it says.
fn compiler(
    nvrtc: &Nvrtc,
    sources: Sources,
    cache: &DiskCache,
    arch: Arch,
) -> (Compiler, Rc<RefCell<Vec<String>>>) {
    let said = Rc::new(RefCell::new(vec![]));
    let hears = Rc::clone(&said);
    let progress = Box::new(move |what: &str| hears.borrow_mut().push(what.to_owned()));
    (Compiler::with(sources, nvrtc.clone(), arch, Some(cache.clone()), Some(progress)), said)
}

fn x(value: &str) -> Vec<(&'static str, String)> {
    vec![("X", value.to_owned())]
}

#[test]
fn what_the_code_depends_on_is_in_its_key() {
    let Some(nvrtc) = nvrtc("what_the_code_depends_on_is_in_its_key") else { return };
    let folder = tempfile::tempdir().unwrap();
    let cache = DiskCache::new(folder.path().to_owned());
    let entries = || fs::read_dir(folder.path()).unwrap().count();
    let one = || sources("#define ONE 1\n");
    let (compiler_one, said) = compiler(&nvrtc, one(), &cache, ARCHS[0]);
    let first = compiler_one.cubin("k.cu", &x("1")).unwrap();
    assert_eq!(compiler_one.cubin("k.cu", &x("1")).unwrap(), first);
    assert_eq!((entries(), said.borrow().len()), (1, 1));
    assert_eq!(said.borrow()[0], "compiling k.cu for sm_80 (X=1)");
    compiler_one.cubin("k.cu", &x("2")).unwrap();
    assert_eq!(entries(), 2);
    // Another header, another architecture; then another process, which finds all.
    compiler(&nvrtc, sources("#define ONE 5\n"), &cache, ARCHS[0]).0.cubin("k.cu", &x("1")).unwrap();
    assert_eq!(entries(), 3);
    compiler(&nvrtc, one(), &cache, ARCHS[1]).0.cubin("k.cu", &x("1")).unwrap();
    assert_eq!(entries(), 4);
    let (again, said) = compiler(&nvrtc, one(), &cache, ARCHS[0]);
    assert_eq!(again.cubin("k.cu", &x("1")).unwrap(), first);
    assert_eq!((entries(), said.borrow().len()), (4, 0));
}

#[test]
fn a_damaged_entry_is_compiled_again() {
    let Some(nvrtc) = nvrtc("a_damaged_entry_is_compiled_again") else { return };
    let folder = tempfile::tempdir().unwrap();
    let cache = DiskCache::new(folder.path().to_owned());
    let (compiler, said) = compiler(&nvrtc, sources("#define ONE 1\n"), &cache, ARCHS[1]);
    let first = compiler.cubin("k.cu", &x("1")).unwrap();
    let path = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let whole = fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 0x10;
    for damaged in [&whole[..whole.len() - 1], &whole[..20], b"", &flipped] {
        fs::write(&path, damaged).unwrap();
        assert_eq!(compiler.cubin("k.cu", &x("1")).unwrap(), first);
        assert_eq!(fs::read(&path).unwrap(), whole);
    }
    assert_eq!(said.borrow().len(), 5);
}

#[test]
fn several_may_compile_one_kernel_at_once() {
    let Some(nvrtc) = nvrtc("several_may_compile_one_kernel_at_once") else { return };
    let folder = tempfile::tempdir().unwrap();
    let cache = DiskCache::new(folder.path().to_owned());
    let codes: Vec<Vec<u8>> = thread::scope(|s| {
        let workers: Vec<_> = (0..4)
            .map(|_| {
                let (nvrtc, cache) = (nvrtc.clone(), cache.clone());
                s.spawn(move || {
                    let compiler =
                        Compiler::with(sources("#define ONE 1\n"), nvrtc, ARCHS[1], Some(cache), None);
                    compiler.cubin("k.cu", &x("1")).unwrap()
                })
            })
            .collect();
        workers.into_iter().map(|w| w.join().unwrap()).collect()
    });
    assert!(codes.iter().all(|c| *c == codes[0]));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn what_does_not_compile_is_told_in_the_compilers_words() {
    let Some(nvrtc) = nvrtc("what_does_not_compile_is_told_in_the_compilers_words") else { return };
    let folder = tempfile::tempdir().unwrap();
    let cache = DiskCache::new(folder.path().to_owned());
    let (compiler, _) = compiler(&nvrtc, sources("#define ONE no_such_thing\n"), &cache, ARCHS[1]);
    let e = compiler.cubin("k.cu", &x("1")).unwrap_err().to_string();
    assert!(e.starts_with("k.cu does not compile for sm_90a with"), "{e}");
    assert!(e.contains("no_such_thing") && e.contains("-DX=1"), "{e}");
    let e = compiler.cubin("missing.cu", &[]).unwrap_err().to_string();
    assert_eq!(e, "no kernel source is named missing.cu");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_folder_that_can_not_be_written_is_no_failure() {
    let Some(nvrtc) = nvrtc("a_folder_that_can_not_be_written_is_no_failure") else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let (compiler, said) = compiler(&nvrtc, sources("#define ONE 1\n"), &DiskCache::new(file), ARCHS[1]);
    assert!(!compiler.cubin("k.cu", &x("1")).unwrap().is_empty());
    assert!(said.borrow()[1].starts_with("the compiled kernel is not kept:"), "{said:?}");
}
