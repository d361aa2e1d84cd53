//! headway's own cache of GGUF files: finding, verifying and storing them.
//!
//! A file is checked by size at every start and by SHA-256 once; a stamp file beside it (`NAME.verified`: size,
//! modification time, digest) says for which bytes on disk that was done. Files get their final name by a rename from
//! the same folder, so a name always stands for a whole file. The hub's cache is another one: see `hub`.

use std::fs::{self, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use super::digest::sha256_file;
use super::error::CacheError;
use super::known::{Gguf, KnownModel};
use super::options::FetchOptions;
use super::progress::Progress;
use super::spec::HubId;
use super::{Resolved, ResolvedFile, Source, hub};

/// Looks for a known model: first the original checkpoint in the hub's cache, then the GGUF in headway's own.
pub(super) fn find(
    model: &'static KnownModel,
    id: &HubId,
    opts: &FetchOptions,
    progress: &dyn Progress,
) -> Result<Resolved, CacheError> {
    if let Some(found) = hub::cached(model.name, id, opts) {
        return Ok(found);
    }
    let path = opts.models_dir().join(model.gguf.file);
    match verify(&path, &model.gguf, progress)? {
        true => Ok(resolved(model, path, Source::Cache)),
        false => Err(CacheError::Absent { folders: vec![opts.hub_cache_dir.clone(), opts.models_dir()] }),
    }
}

/// A GGUF in the cache as an answer.
pub(super) fn resolved(model: &'static KnownModel, path: PathBuf, source: Source) -> Resolved {
    let file = ResolvedFile {
        path: path.clone(),
        bytes: model.gguf.bytes,
        sha256: Some(model.gguf.sha256.to_owned()),
    };
    Resolved { name: model.name.to_owned(), path, source, files: vec![file] }
}

/// Whether a whole, right file is there; `Ok(false)` if none is. A damaged one is deleted and reported.
pub(super) fn verify(path: &Path, gguf: &Gguf, progress: &dyn Progress) -> Result<bool, CacheError> {
    let meta = match fs::metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(source) => return Err(CacheError::Unreadable { path: path.to_path_buf(), source }),
    };
    if meta.len() != gguf.bytes {
        let because = format!("{} bytes instead of {}", meta.len(), gguf.bytes);
        return Err(discard(path, because));
    }
    let stamp = stamp_text(&meta, gguf.sha256);
    if fs::read_to_string(stamp_path(path)).is_ok_and(|found| found == stamp) {
        return Ok(true);
    }
    progress.message(&format!("checking {} once", path.display()));
    let sum =
        sha256_file(path).map_err(|source| CacheError::Unreadable { path: path.to_path_buf(), source })?;
    if sum != gguf.sha256 {
        return Err(discard(path, format!("sha256 {sum} instead of {}", gguf.sha256)));
    }
    write_stamp(path, &stamp);
    Ok(true)
}

/// Gives a verified file its final name and stamps it.
pub(super) fn store(verified: &Path, path: &Path, gguf: &Gguf) -> io::Result<()> {
    fs::rename(verified, path)?;
    write_stamp(path, &stamp_text(&fs::metadata(path)?, gguf.sha256));
    Ok(())
}

fn discard(path: &Path, because: String) -> CacheError {
    // Where deleting fails (a read-only cache), the rename after the next fetch fails too and says why.
    let _ = fs::remove_file(stamp_path(path));
    let _ = fs::remove_file(path);
    CacheError::Damaged { path: path.to_path_buf(), because }
}

fn stamp_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".verified");
    PathBuf::from(name)
}

fn stamp_text(meta: &Metadata, sha256: &str) -> String {
    let modified = meta.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    format!("{} {} {sha256}\n", meta.len(), modified.map_or(0, |since| since.as_nanos()))
}

/// Without a stamp the file is only hashed again at the next start, so a failure to write one is no error.
fn write_stamp(path: &Path, stamp: &str) {
    let _ = fs::write(stamp_path(path), stamp);
}
