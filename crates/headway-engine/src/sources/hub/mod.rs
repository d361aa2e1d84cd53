//! The Hugging Face hub: finds a repository's files in the hub's cache or downloads them into it.
//!
//! Crate `hf-hub` (0.5, blocking) supplies the cache layout shared by all hub clients ([`hf_hub::Cache`]) and the
//! addresses. The transfers are a thin client on `ureq`, which `hf-hub` uses itself, because its own download sets no
//! time limit on any phase (a silent server would hold the program for ever) and takes none from outside, appends a
//! whole file to a partial one when a server ignores the range, fails for good on a partial file that is complete, and
//! checks no hash.
//!
//! A repository counts as cached once `refs/REVISION` names a snapshot with config, tokenizer and all weight files. A
//! fetch writes blobs first, then the snapshot's links, and the reference last, so an interrupted one never counts.

mod client;
mod download;
mod files;

use std::fs;
use std::path::{Path, PathBuf};

use hf_hub::{Cache, Repo, RepoType};

use super::error::HubError;
use super::options::FetchOptions;
use super::progress::Progress;
use super::spec::HubId;
use super::{Resolved, ResolvedFile, Source};
use client::Client;
use download::Blob;
pub(super) use download::lock;

/// The repository's files if all that are needed lie in the hub's cache.
pub(super) fn cached(name: &str, id: &HubId, opts: &FetchOptions) -> Option<Resolved> {
    let cache = Cache::new(opts.hub_cache_dir.clone()).repo(repo(id));
    let config = cache.get(files::CONFIG).or_else(|| {
        // A revision that is a commit has no reference of its own.
        Some(cache.pointer_path(&id.revision).join(files::CONFIG)).filter(|path| path.exists())
    })?;
    let folder = config.parent()?;
    let tokenizer = folder.join(files::TOKENIZER).exists();
    let weights = files::local_weights(folder)?;
    let complete = tokenizer && weights.iter().all(|file| folder.join(file).exists());
    if complete { snapshot(name, folder, Source::Cache) } else { None }
}

/// Downloads what is missing of the repository.
pub(super) fn fetch(
    name: &str,
    id: &HubId,
    opts: &FetchOptions,
    progress: &dyn Progress,
) -> Result<Resolved, HubError> {
    if opts.hub_offline {
        return Err(HubError::Offline);
    }
    let client = Client::new(id, opts)?;
    let cache = Cache::new(opts.hub_cache_dir.clone()).repo(repo(id));
    let mut blobs = Vec::new();
    let listed = client.list()?;
    for file in files::small(listed.as_deref()) {
        match download::blob(&client, &cache, file, progress) {
            Ok(blob) => blobs.push(blob),
            Err(HubError::NotFound { .. }) if listed.is_none() && file != files::CONFIG => {}
            Err(error) => return Err(error),
        }
    }
    for file in weights(&client, &cache, listed.as_deref(), &mut blobs, progress)? {
        blobs.push(download::blob(&client, &cache, &file, progress)?);
    }
    let folder = link(&cache, id, &blobs)?;
    snapshot(name, &folder, Source::Hub).ok_or_else(|| HubError::Unusable {
        repo: id.to_string(),
        because: format!("the snapshot '{}' can't be read", folder.display()),
    })
}

/// The names of the weight files; the index of a sharded checkpoint is fetched on the way.
fn weights(
    client: &Client,
    cache: &hf_hub::CacheRepo,
    listed: Option<&[String]>,
    blobs: &mut Vec<Blob>,
    progress: &dyn Progress,
) -> Result<Vec<String>, HubError> {
    let unusable = |because: String| HubError::Unusable { repo: client.id().to_string(), because };
    if listed.is_none_or(|names| names.iter().any(|name| name == files::INDEX)) {
        match download::blob(client, cache, files::INDEX, progress) {
            Ok(index) => {
                let text = fs::read(&index.path).map_err(|e| HubError::io("read", &index.path, e))?;
                let shards = files::shards(&text).map_err(unusable)?;
                blobs.push(index);
                return Ok(shards);
            }
            Err(HubError::NotFound { .. }) if listed.is_none() => {}
            Err(error) => return Err(error),
        }
    }
    match listed {
        None => Ok(vec![files::SINGLE.to_owned()]),
        Some(names) => files::single(names).map(|name| vec![name]).map_err(unusable),
    }
}

/// Links the blobs into the snapshot folder and makes the revision point at it.
fn link(cache: &hf_hub::CacheRepo, id: &HubId, blobs: &[Blob]) -> Result<PathBuf, HubError> {
    let Some(first) = blobs.first() else {
        return Err(HubError::Unusable { repo: id.to_string(), because: "it lists no file".to_owned() });
    };
    if let Some(other) = blobs.iter().find(|blob| blob.commit != first.commit) {
        let because =
            format!("it changed from commit {} to {} meanwhile; run again", first.commit, other.commit);
        return Err(HubError::Unusable { repo: id.to_string(), because });
    }
    let folder = cache.pointer_path(&first.commit);
    for blob in blobs {
        link_one(&folder, blob)?;
    }
    cache.create_ref(&first.commit).map_err(|e| HubError::io("write the reference in", &folder, e))?;
    Ok(folder)
}

fn link_one(folder: &Path, blob: &Blob) -> Result<(), HubError> {
    let pointer = folder.join(&blob.name);
    let parent = pointer.parent().unwrap_or(folder);
    fs::create_dir_all(parent).map_err(|e| HubError::io("create", parent, e))?;
    if pointer.exists() {
        return Ok(());
    }
    // A link that leads nowhere, left by a deleted blob, is in the way.
    let _ = fs::remove_file(&pointer);
    let made = make_link(folder, blob, &pointer);
    match made {
        Err(e) if !pointer.exists() => Err(HubError::io("create", &pointer, e)),
        _ => Ok(()),
    }
}

#[cfg(unix)]
fn make_link(folder: &Path, blob: &Blob, pointer: &Path) -> std::io::Result<()> {
    // snapshots/COMMIT/[FOLDERS/]NAME -> ../../[../]blobs/ETAG
    let depth = pointer.strip_prefix(folder).map_or(1, |rest| rest.components().count());
    let mut target: PathBuf = std::iter::repeat_n("..", depth + 1).collect();
    target.push("blobs");
    target.push(&blob.etag);
    std::os::unix::fs::symlink(target, pointer)
}

#[cfg(not(unix))]
fn make_link(_folder: &Path, blob: &Blob, pointer: &Path) -> std::io::Result<()> {
    // Links need a privilege on some systems; a hard link or a copy always works.
    fs::hard_link(&blob.path, pointer).or_else(|_| fs::copy(&blob.path, pointer).map(|_| ()))
}

/// The needed files of a snapshot folder as an answer.
fn snapshot(name: &str, folder: &Path, source: Source) -> Option<Resolved> {
    let mut names: Vec<String> = files::SMALL.iter().map(|file| (*file).to_owned()).collect();
    names.push(files::INDEX.to_owned());
    names.extend(files::local_weights(folder)?);
    let mut found: Vec<ResolvedFile> = names
        .into_iter()
        .filter_map(|file| {
            let path = folder.join(file);
            let bytes = fs::metadata(&path).ok()?.len();
            let sha256 = fs::canonicalize(&path)
                .ok()
                .and_then(|blob| Some(blob.file_name()?.to_str()?.to_owned()))
                .filter(|etag| super::digest::is_sha256(etag));
            Some(ResolvedFile { path, bytes, sha256 })
        })
        .collect();
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found.dedup();
    Some(Resolved { name: name.to_owned(), path: folder.to_path_buf(), source, files: found })
}

fn repo(id: &HubId) -> Repo {
    Repo::with_revision(id.repo.clone(), RepoType::Model, id.revision.clone())
}
