//! From the wheel to a folder: pip brings the wheel of the one version, two files are taken out of it, held against their
//! hashes and put into the manifest; the wheel is thrown away.

use super::{ExtensionEntry, ExtensionError, Extensions, VLLM, check, check::machine};
use crate::modules::ModuleFolder;
use sha2::{Digest, Sha256};
use std::{
    fs,
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The platform of the wheel, as pip writes it: whatever Python runs pip.
const PLATFORM: [&str; 8] = [
    "--platform",
    "manylinux_2_28_x86_64",
    "--python-version",
    "3.12",
    "--implementation",
    "cp",
    "--abi",
    "abi3",
];

/// What to fetch, and from where.
#[derive(Clone, Debug)]
pub struct FetchOptions {
    /// The folder of modules; made where it is not there.
    pub folder: PathBuf,
    /// A wheel that is there; `None`: pip brings it.
    pub wheel: Option<PathBuf>,
    /// The Python whose pip brings it.
    pub python: PathBuf,
}

/// What a fetch did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FetchReport {
    /// Files that were taken out of the wheel.
    pub fetched: Vec<PathBuf>,
    /// Files that were there.
    pub present: Vec<PathBuf>,
}

/// Fetches what is not there. `say` gets a line for each thing done.
///
/// # Errors
/// Another machine; a wheel that can't be had or is of another version; files that are others than those of that
/// version, or import what the shim lacks; the file system's.
pub fn fetch(options: &FetchOptions, say: &mut dyn FnMut(String)) -> Result<FetchReport, ExtensionError> {
    machine()?;
    let file = |path: &Path, e: io::Error| ExtensionError::File { path: path.to_owned(), why: e.to_string() };
    fs::create_dir_all(&options.folder).map_err(|e| file(&options.folder, e))?;
    let of = |e: crate::modules::ModuleError| ExtensionError::Folder(e.to_string());
    let mut folder = ModuleFolder::open(&options.folder).map_err(of)?;
    let mut report = FetchReport::default();
    let mut wanted = vec![];
    for extension in Extensions::ALL {
        match folder
            .extension(extension)
            .map(|entry| (folder.path().join(&entry.file), check(&folder, entry)))
        {
            Some((path, Ok(()))) => report.present.push(path),
            Some((_, Err(why))) => {
                say(format!("{why}"));
                wanted.push(extension);
            }
            None => wanted.push(extension),
        }
    }
    if wanted.is_empty() {
        return Ok(report);
    }
    // Dropped with the wheel in it.
    let place = tempfile::Builder::new().prefix(".fetch-").tempdir_in(&options.folder);
    let place = place.map_err(|e| file(&options.folder, e))?;
    let wheel = match &options.wheel {
        Some(wheel) => wheel.clone(),
        None => download(&options.python, place.path(), say)?,
    };
    version(&wheel)?;
    for extension in wanted {
        let to = take(&wheel, extension, place.path())?;
        let entry = ExtensionEntry::of(extension);
        let at = folder.path().join(&entry.file);
        fs::rename(&to, &at).map_err(|e| file(&at, e))?;
        check(&folder, &entry)?;
        folder.put_extension(entry).map_err(of)?;
        say(format!("{} out of {}", at.display(), wheel.file_name().unwrap_or_default().display()));
        report.fetched.push(at);
    }
    Ok(report)
}

/// Has pip bring the wheel, and nothing that it depends on.
fn download(python: &Path, to: &Path, say: &mut dyn FnMut(String)) -> Result<PathBuf, ExtensionError> {
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet"]);
    pip.args(PLATFORM).arg("--dest").arg(to).arg(format!("vllm=={VLLM}"));
    let command = format!("{} -m pip download --no-deps vllm=={VLLM}", python.display());
    let failed = |why: String| ExtensionError::Pip { command: command.clone(), why };
    let child = pip.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    let child = child.map_err(|e| failed(e.to_string()))?;
    say(format!("{command} (340 MB)"));
    let out = child.wait_with_output().map_err(|e| failed(e.to_string()))?;
    if !out.status.success() {
        let words = String::from_utf8_lossy(&out.stderr);
        let last: Vec<_> = words.lines().filter(|l| !l.trim().is_empty()).rev().take(3).collect();
        return Err(failed(last.into_iter().rev().collect::<Vec<_>>().join("; ")));
    }
    let wheel = fs::read_dir(to).ok().and_then(|mut all| {
        all.find_map(|f| f.ok().map(|f| f.path()).filter(|p| p.extension().is_some_and(|e| e == "whl")))
    });
    wheel.ok_or_else(|| failed("it left no wheel".into()))
}

/// Refuses a wheel of another version, by its name.
fn version(wheel: &Path) -> Result<(), ExtensionError> {
    let name = wheel.file_name().unwrap_or_default().to_string_lossy().into_owned();
    match name.strip_prefix("vllm-").and_then(|rest| rest.split('-').next()) {
        Some(VLLM) => Ok(()),
        Some(found) => Err(ExtensionError::Version { path: wheel.to_owned(), found: found.into() }),
        None => Err(ExtensionError::Wheel {
            path: wheel.to_owned(),
            why: "its name does not begin with vllm-".into(),
        }),
    }
}

/// Takes a file out of the wheel, held against its length and hash on the way.
fn take(wheel: &Path, extension: Extensions, to: &Path) -> Result<PathBuf, ExtensionError> {
    let pin = extension.pin();
    let wrong = |why: String| ExtensionError::Wheel { path: wheel.to_owned(), why };
    let open = fs::File::open(wheel)
        .map_err(|e| ExtensionError::File { path: wheel.to_owned(), why: e.to_string() })?;
    let mut archive = zip::ZipArchive::new(open).map_err(|e| wrong(e.to_string()))?;
    let mut member = archive.by_name(pin.member).map_err(|e| wrong(format!("{}: {e}", pin.member)))?;
    let path = to.join(pin.file);
    let failed = |e: io::Error| ExtensionError::File { path: path.clone(), why: e.to_string() };
    let mut file = fs::File::create(&path).map_err(failed)?;
    let (mut sum, mut len, mut part) = (Sha256::new(), 0, vec![0; 1 << 16]);
    loop {
        let n = member.read(&mut part).map_err(|e| wrong(format!("{}: {e}", pin.member)))?;
        if n == 0 {
            break;
        }
        len += n as u64;
        if len > pin.bytes {
            break;
        }
        sum.update(&part[..n]);
        file.write_all(&part[..n]).map_err(failed)?;
    }
    if len != pin.bytes {
        return Err(ExtensionError::Length { path: pin.member.into(), found: len, expected: pin.bytes });
    }
    let found: String = sum.finalize().iter().map(|b| format!("{b:02x}")).collect();
    match found == pin.sha256 {
        true => Ok(path),
        false => Err(ExtensionError::Hash { path: pin.member.into(), found, expected: pin.sha256.into() }),
    }
}
