//! SHA-256 of files, as lower-case hex.
//!
//! For checking what was fetched; nothing here is about secrecy.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

/// Lower-case hex of a finished digest.
pub(super) fn hex(hasher: Sha256) -> String {
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// SHA-256 of a whole file.
pub(super) fn sha256_file(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex(hasher)),
            n => hasher.update(buffer.get(..n).unwrap_or_default()),
        }
    }
}

/// Whether a text is 64 lower-case hex digits.
pub(super) fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}
