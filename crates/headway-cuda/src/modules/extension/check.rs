//! Whether a file is what was pinned, and imports nothing that nobody has: before it is opened.

use super::{
    ExtensionEntry, ExtensionError, VLLM,
    module::Extension,
    torch::{self, Torch},
};
use crate::modules::{ModuleFolder, elf, folder::sha256};
use std::{fs, io, path::Path};

/// What the functions of torch's ABI begin with.
const PREFIXES: [&str; 2] = ["aoti_torch_", "torch_"];

/// Refuses machines that the wheel's files are not for.
///
/// # Errors
/// [`ExtensionError::Machine`].
pub(super) fn machine() -> Result<(), ExtensionError> {
    match cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        true => Ok(()),
        false => {
            Err(ExtensionError::Machine(format!("{} on {}", std::env::consts::OS, std::env::consts::ARCH)))
        }
    }
}

/// Holds an entry's file against what was pinned, and its imports against the shim.
///
/// # Errors
/// [`ExtensionError`], by what is wrong.
pub fn check(folder: &ModuleFolder, entry: &ExtensionEntry) -> Result<(), ExtensionError> {
    machine()?;
    let path = folder.path().join(&entry.file);
    if entry.vllm != VLLM {
        return Err(ExtensionError::Version { path, found: entry.vllm.clone() });
    }
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(ExtensionError::Missing { path }),
        Err(e) => return Err(ExtensionError::File { path, why: e.to_string() }),
    };
    let pin = entry.extension.pin();
    if bytes.len() as u64 != pin.bytes {
        return Err(ExtensionError::Length { path, found: bytes.len() as u64, expected: pin.bytes });
    }
    let found = sha256(&bytes);
    if found != pin.sha256 {
        return Err(ExtensionError::Hash { path, found, expected: pin.sha256.into() });
    }
    imports(&path, &bytes, torch::torch()?)
}

/// Holds a library's imports of torch's functions against those of the shim.
///
/// # Errors
/// No library; functions that the shim lacks, by name.
pub(super) fn imports(path: &Path, bytes: &[u8], shim: &Torch) -> Result<(), ExtensionError> {
    let not_elf = |why| ExtensionError::NotElf { path: path.to_owned(), why };
    elf::check(bytes).map_err(not_elf)?;
    let of_torch = |s: &&str| PREFIXES.iter().any(|p| s.starts_with(p));
    let missing = |s: &&str| !shim.has(s);
    let imported = elf::undefined(bytes).map_err(not_elf)?;
    let symbols: Vec<String> =
        imported.into_iter().filter(of_torch).filter(missing).map(Into::into).collect();
    match symbols.is_empty() {
        true => Ok(()),
        false => Err(ExtensionError::Symbols { path: path.to_owned(), symbols }),
    }
}

/// Whether an entry's module can be opened and has its functions.
///
/// # Errors
/// As [`check`]; what the dynamic linker says.
pub fn try_extension(folder: &ModuleFolder, entry: &ExtensionEntry) -> Result<(), ExtensionError> {
    Extension::open(folder, entry).map(drop)
}
