//! Downloads one file of a repository into the hub cache's blob folder: locked, resumable, verified, renamed last.
//!
//! Large files are named after their SHA-256, which is checked; small ones after a git hash, of which only the size is.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::CacheRepo;

use super::client::{Client, FileInfo};
use crate::sources::digest::{is_sha256, sha256_file};
use crate::sources::error::HubError;
use crate::sources::progress::Progress;

/// Attempts in a row that bring no byte before a download is given up.
const IDLE_ATTEMPTS: u32 = 3;
/// Attempts in all, whether they bring bytes or not.
const MAX_ATTEMPTS: u32 = 100;

/// A file that lies whole in the blob folder.
#[derive(Debug)]
pub(super) struct Blob {
    /// Its name in the repository.
    pub name: String,
    /// Its name in the blob folder.
    pub etag: String,
    /// The commit that it was asked from.
    pub commit: String,
    /// Where it lies.
    pub path: PathBuf,
}

/// Makes sure that a file lies whole in the blob folder.
pub(super) fn blob(
    client: &Client,
    cache: &CacheRepo,
    name: &str,
    progress: &dyn Progress,
) -> Result<Blob, HubError> {
    let info = client.info(name)?;
    let path = cache.blob_path(&info.etag);
    let done = Blob { name: name.to_owned(), etag: info.etag.clone(), commit: info.commit.clone(), path };
    if is_whole(&done.path, &info) {
        return Ok(done);
    }
    let folder = done.path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(|e| HubError::io("create", folder, e))?;
    let _lock = lock(&beside(&done.path, "lock"), name, progress)?;
    if is_whole(&done.path, &info) {
        return Ok(done);
    }
    let part = beside(&done.path, "part");
    let mut resumed = fs::metadata(&part).is_ok_and(|meta| meta.len() > 0);
    loop {
        progress.start(name, Some(info.size));
        let arrived = transfer(client, name, &info, &part, progress);
        progress.finish();
        arrived?;
        match verify(name, &info, &part, progress) {
            Ok(()) => break,
            // The fault may be in what an earlier run left.
            Err(error @ HubError::Damaged { .. }) if resumed => {
                progress.message(&format!("{error}; fetching it anew"));
                resumed = false;
            }
            Err(error) => return Err(error),
        }
    }
    fs::rename(&part, &done.path).map_err(|e| HubError::io("rename into", &done.path, e))?;
    Ok(done)
}

/// The blob's path with a suffix.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(suffix);
    PathBuf::from(name)
}

/// Blobs get their name only when whole, so the size is enough of a check.
fn is_whole(path: &Path, info: &FileInfo) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.len() == info.size)
}

/// Takes a lock that the system drops when its holder ends, however it ends. The file stays.
pub(in crate::sources) fn lock(path: &Path, what: &str, progress: &dyn Progress) -> Result<File, HubError> {
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .map_err(|e| HubError::io("create", path, e))?;
    let mut told = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(e)) => return Err(HubError::io("lock", path, e)),
            Err(TryLockError::WouldBlock) => {
                if !told {
                    progress.message(&format!("another process is fetching {what}; waiting for it"));
                    told = true;
                }
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    }
}

/// Fills the partial file, resuming after every cut as long as bytes keep coming.
fn transfer(
    client: &Client,
    name: &str,
    info: &FileInfo,
    part: &Path,
    progress: &dyn Progress,
) -> Result<(), HubError> {
    let mut file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .append(true)
        .open(part)
        .map_err(|e| HubError::io("create", part, e))?;
    let mut have = length(&file, part)?;
    if have > info.size {
        file.set_len(0).map_err(|e| HubError::io("truncate", part, e))?;
        have = 0;
    }
    if have > 0 {
        progress.message(&format!("resuming {name} at {have} of {} bytes", info.size));
        progress.advance(have);
    }
    let mut idle = 0;
    for _ in 0..MAX_ATTEMPTS {
        if have >= info.size {
            return file.sync_all().map_err(|e| HubError::io("write", part, e));
        }
        let before = have;
        let error = match receive(client, name, info, &mut file, part, &mut have, progress) {
            Ok(()) => continue,
            Err(error) => error,
        };
        idle = if have > before { 0 } else { idle + 1 };
        let lasting = !matches!(
            error,
            HubError::Interrupted { .. } | HubError::TimedOut { .. } | HubError::Unreachable { .. }
        );
        if lasting || idle >= IDLE_ATTEMPTS || (have == 0 && before == 0) {
            return Err(if have > 0 && !lasting { broke_off(name, info, have, &error) } else { error });
        }
        progress.message(&format!("{name}: {error}; resuming"));
        std::thread::sleep(Duration::from_millis(200 << idle));
    }
    Err(broke_off(name, info, have, &"too many cuts"))
}

fn broke_off(name: &str, info: &FileInfo, have: u64, because: &dyn ToString) -> HubError {
    HubError::Interrupted { file: name.to_owned(), have, total: info.size, because: because.to_string() }
}

/// One request: appends what it brings.
fn receive(
    client: &Client,
    name: &str,
    info: &FileInfo,
    file: &mut File,
    part: &Path,
    have: &mut u64,
    progress: &dyn Progress,
) -> Result<(), HubError> {
    let url = client.file_url(name);
    let response = client.open(name, *have)?;
    if *have > 0 {
        let range = response.headers().get("content-range").and_then(|value| value.to_str().ok());
        if response.status().as_u16() != 206 {
            // The server sends the file from its beginning whatever was asked.
            file.set_len(0).map_err(|e| HubError::io("truncate", part, e))?;
            *have = 0;
        } else if !range.is_some_and(|range| range.starts_with(&format!("bytes {have}-"))) {
            return Err(
                client.protocol(&url, format!("asked from byte {have}, it sends '{}'", range.unwrap_or("")))
            );
        }
    }
    let mut reader = response.into_body().into_reader();
    let mut buffer = vec![0u8; 256 * 1024];
    loop {
        let n = reader.read(&mut buffer).map_err(|e| read_error(client, name, &url, info, *have, e))?;
        if n == 0 && *have < info.size {
            return Err(broke_off(name, info, *have, &"the connection was closed"));
        } else if n == 0 {
            return Ok(());
        }
        if *have + n as u64 > info.size {
            let got = format!("more than {}", info.size);
            let _ = fs::remove_file(part);
            let announced = info.size.to_string();
            return Err(HubError::Damaged { file: name.to_owned(), what: "size", got, announced });
        }
        file.write_all(buffer.get(..n).unwrap_or_default()).map_err(|e| HubError::io("write", part, e))?;
        *have += n as u64;
        progress.advance(n as u64);
    }
}

fn read_error(
    client: &Client,
    name: &str,
    url: &str,
    info: &FileInfo,
    have: u64,
    error: std::io::Error,
) -> HubError {
    match client.failure(url, ureq::Error::from(error)) {
        timed_out @ HubError::TimedOut { .. } => timed_out,
        other => broke_off(name, info, have, &other),
    }
}

/// Checks what arrived; a wrong file is deleted, so that the next run starts anew.
fn verify(name: &str, info: &FileInfo, part: &Path, progress: &dyn Progress) -> Result<(), HubError> {
    if !is_sha256(&info.etag) {
        return Ok(());
    }
    progress.message(&format!("checking {name}"));
    let sum = sha256_file(part).map_err(|e| HubError::io("read", part, e))?;
    if sum == info.etag {
        return Ok(());
    }
    fs::remove_file(part).map_err(|e| HubError::io("delete", part, e))?;
    Err(HubError::Damaged { file: name.to_owned(), what: "sha256", got: sum, announced: info.etag.clone() })
}

fn length(file: &File, part: &Path) -> Result<u64, HubError> {
    Ok(file.metadata().map_err(|e| HubError::io("read", part, e))?.len())
}
