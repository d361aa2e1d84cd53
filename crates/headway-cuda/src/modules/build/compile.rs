//! Compilers at once, and the linker.

use super::{BuildError, Toolchain, sources::STAND_IN};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Instant,
};

/// A file to compile.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    /// The module that it is of.
    pub module: String,
    pub source: PathBuf,
    pub object: PathBuf,
    pub flags: Vec<String>,
}

/// The compiler's flags for an architecture: FlashInfer's own.
pub(super) fn flags(arch: &str) -> Vec<String> {
    let number = arch.trim_start_matches("sm_");
    let mut flags: Vec<String> = [
        "-std=c++17",
        "-O3",
        "-DNDEBUG",
        "-use_fast_math",
        "-Xfatbin=-compress-all",
        "--compress-mode=size",
        "-DFLASHINFER_ENABLE_F16",
        "-DFLASHINFER_ENABLE_BF16",
        "-DFLASHINFER_ENABLE_FP8_E4M3",
        "-DFLASHINFER_ENABLE_FP8_E5M2",
        "-DFLASHINFER_ENABLE_FP8_E8M0",
        "-DFLASHINFER_ENABLE_FP4_E2M1",
        "--compiler-options=-fPIC",
        "--expt-relaxed-constexpr",
        "-static-global-template-stub=false",
    ]
    .map(Into::into)
    .into();
    if number == "90a" {
        flags.push("-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED".into());
    }
    flags.push(format!("-gencode=arch=compute_{number},code=sm_{number}"));
    flags
}

/// Compiles what has no object yet.
///
/// # Errors
/// The first that a compiler refuses; the others end what they have begun.
pub(super) fn compile_all(
    units: &[Unit],
    tools: &Toolchain,
    jobs: usize,
    say: &mut (dyn FnMut(String) + Send),
) -> Result<(), BuildError> {
    let todo: Vec<&Unit> = units.iter().filter(|u| !u.object.is_file()).collect();
    if todo.len() < units.len() {
        say(format!("{} of {} files are compiled already", units.len() - todo.len(), units.len()));
    }
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let (say, failure) = (Mutex::new(say), Mutex::new(None));
    let done = AtomicUsize::new(0);
    let work = || {
        while !stop.load(Ordering::Relaxed) {
            let Some(unit) = todo.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
            let start = Instant::now();
            match compile(unit, tools) {
                Ok(()) => {
                    let n = done.fetch_add(1, Ordering::Relaxed) + 1;
                    let name = unit.source.file_name().unwrap_or_default().to_string_lossy();
                    let seconds = start.elapsed().as_secs();
                    let line = format!("[{n}/{}] {}: {name}, {seconds} s", todo.len(), unit.module);
                    say.lock().unwrap_or_else(PoisonError::into_inner)(line);
                }
                Err(e) => {
                    stop.store(true, Ordering::Relaxed);
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                }
            }
        }
    };
    std::thread::scope(|s| {
        for _ in 0..jobs.clamp(1, todo.len().max(1)) {
            s.spawn(work);
        }
    });
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

fn compile(unit: &Unit, tools: &Toolchain) -> Result<(), BuildError> {
    let folder = unit.source.parent().unwrap_or(Path::new("."));
    let (first, rest) = tools.includes();
    let part = unit.object.with_extension("part.o");
    let mut command = Command::new(&tools.nvcc);
    command.args(&unit.flags).arg("-I").arg(folder);
    for (flag, folders) in [("-I", &first), ("-isystem", &rest)] {
        command.args(folders.iter().flat_map(|f| [flag.as_ref(), f.as_os_str()]));
    }
    command.arg("-isystem").arg(folder.join(STAND_IN)).arg("-c").arg(&unit.source).arg("-o").arg(&part);
    run(command, "nvcc", &unit.source)?;
    fs::rename(&part, &unit.object).map_err(|e| BuildError::file(&unit.object, e))
}

/// Links objects. What FlashInfer's host code names and no object has are kernels that were left out (masks, ragged
/// batches): they become a function that says "not supported".
///
/// # Errors
/// A tool's.
pub(super) fn link(objects: &[&Path], to: &Path, tools: &Toolchain) -> Result<(), BuildError> {
    let folder = to.parent().unwrap_or(Path::new("."));
    // cudaErrorNotSupported, whatever the arguments are.
    let stub = folder.join("left_out.c");
    fs::write(&stub, "int headway_left_out(void) { return 801; }\n")
        .map_err(|e| BuildError::file(&stub, e))?;
    // Nothing else is seen from outside: two modules' copies of the C++ library would else become one, half of each.
    let exports = folder.join("exports.map");
    fs::write(&exports, "{ global: __tvm_ffi_*; local: *; };\n")
        .map_err(|e| BuildError::file(&exports, e))?;
    let mut command = Command::new(&tools.cxx);
    command.arg(format!("-Wl,--version-script={}", exports.display()));
    command.args(["-shared", "-s", "-x", "c"]).arg(&stub).args(["-x", "none"]).args(objects);
    for symbol in left_out(objects)? {
        command.arg(format!("-Wl,--defsym={symbol}=headway_left_out"));
    }
    // A module runs on systems with older C++ libraries than this one's.
    command.arg("-fPIC").arg("-L").arg(&tools.cudart);
    command.args([
        "-lcudart_static",
        "-lrt",
        "-ldl",
        "-lpthread",
        "-static-libstdc++",
        "-static-libgcc",
        "-o",
    ]);
    command.arg(to);
    run(command, &tools.cxx, to)
}

/// FlashInfer's symbols that are asked for and not there.
fn left_out(objects: &[&Path]) -> Result<BTreeSet<String>, BuildError> {
    let mut command = Command::new("nm");
    command.arg("-P").args(objects);
    let text = run_for_output(command, "nm", objects.first().unwrap_or(&Path::new("")))?;
    Ok(missing(&text))
}

/// Of `nm -P`: names with their kind.
fn missing(text: &str) -> BTreeSet<String> {
    let (mut asked, mut there) = (BTreeSet::new(), BTreeSet::new());
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (Some(name), Some(kind)) = (words.next(), words.next()) else { continue };
        if !name.starts_with("_ZN10flashinfer") {
            continue;
        }
        let set = if kind == "U" { &mut asked } else { &mut there };
        set.insert(name.to_owned());
    }
    asked.difference(&there).cloned().collect()
}

fn run(command: Command, tool: &str, file: &Path) -> Result<(), BuildError> {
    run_for_output(command, tool, file).map(drop)
}

fn run_for_output(mut command: Command, tool: &str, file: &Path) -> Result<String, BuildError> {
    let failed = |words: String| BuildError::Tool { tool: tool.into(), file: file.to_owned(), words };
    let output = command.output().map_err(|e| failed(e.to_string()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let text =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    let errors: Vec<&str> = text.lines().filter(|l| l.contains("error")).take(5).collect();
    let words = if errors.is_empty() { text.lines().rev().take(5).collect() } else { errors };
    Err(failed(format!("{}; {}", output.status, words.join("; "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_architectures_letter_is_the_compilers_too() {
        let last = |arch| flags(arch).pop().unwrap();
        assert_eq!(last("sm_90a"), "-gencode=arch=compute_90a,code=sm_90a");
        assert_eq!(last("sm_80"), "-gencode=arch=compute_80,code=sm_80");
    }

    #[test]
    fn what_no_object_has_is_left_out() {
        let text = "a.o:\n_ZN10flashinfer3oneEv U\n_ZN10flashinfer3twoEv U\n_ZN3std1xEv U\nb.o:\n_ZN10flashinfer3oneEv T 0 10\n";
        assert_eq!(missing(text).into_iter().collect::<Vec<_>>(), ["_ZN10flashinfer3twoEv"]);
    }
}
