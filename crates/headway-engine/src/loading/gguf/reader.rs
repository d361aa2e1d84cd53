//! A cursor over the bytes of a GGUF file that cannot run past the end.
//!
//! Not for tensor data.

use crate::loading::LoadError;
use std::path::Path;

/// Where in a file the next value is read.
pub(super) struct Reader<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(path: &'a Path, bytes: &'a [u8]) -> Self {
        Self { path, bytes, at: 0 }
    }

    /// Bytes read so far.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    /// Bytes left.
    pub(super) fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub(super) fn path(&self) -> &'a Path {
        self.path
    }

    /// An error about this file.
    pub(super) fn damaged(&self, what: impl AsRef<str>) -> LoadError {
        LoadError::damaged(self.path, "GGUF", what)
    }

    /// The next `len` bytes; `what` names them in the error.
    pub(super) fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8], LoadError> {
        let end = usize::try_from(len).ok().and_then(|len| self.at.checked_add(len));
        match end.and_then(|end| self.bytes.get(self.at..end)) {
            Some(bytes) => {
                self.at += bytes.len();
                Ok(bytes)
            }
            None => Err(self.damaged(format!(
                "{what} at byte {} takes {len} bytes, but {} are left",
                self.at,
                self.remaining()
            ))),
        }
    }

    /// The next `N` bytes as an array.
    pub(super) fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], LoadError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, LoadError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, LoadError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A length-prefixed UTF-8 string, borrowed from the file.
    pub(super) fn text(&mut self, what: &str) -> Result<&'a str, LoadError> {
        let len = self.u64(what)?;
        let bytes = self.take(len, what)?;
        std::str::from_utf8(bytes).map_err(|_| self.damaged(format!("{what} is not UTF-8")))
    }

    /// A string that names something: not empty and without control characters, so that it can be printed.
    pub(super) fn name(&mut self, what: &str) -> Result<&'a str, LoadError> {
        let name = self.text(what)?;
        if name.is_empty() || name.len() > 65_535 || name.chars().any(char::is_control) {
            return Err(self.damaged(format!("{what} is no usable name: '{name}'")));
        }
        Ok(name)
    }
}
