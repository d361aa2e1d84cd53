//! A whole file mapped read-only into memory, as [`SharedBytes`].
//!
//! The map lives until the last weight over it is dropped. Pages are read from disk when they are first
//! touched and may be dropped again under memory pressure, so a model needs no second copy in memory. Of what
//! a device copies into a form of its own, it gives the pages back ([`SharedBytes::not_needed_now`]).
//!
//! What happens when somebody changes the file meanwhile: overwritten in place, the weights change under
//! the model (wrong answers, but every size was fixed at load and nothing is read out of bounds);
//! truncated, the next access to a lost page ends the process with SIGBUS. Replacing the file by rename,
//! as package managers and downloaders do, is safe: the map keeps the old file.
//!
//! Not for small text files: those are read normally.

use super::LoadError;
use headway_tensor::{BytesOwner, SharedBytes};
use std::{fs::File, ops::Range, path::Path};

/// Maps the file at `path`.
///
/// # Errors
/// [`LoadError::Io`] when it cannot be opened or mapped or is not a regular file, [`LoadError::Damaged`] when it is empty.
pub fn map_file(path: &Path) -> Result<SharedBytes, LoadError> {
    let io = |doing| move |source| LoadError::Io { path: path.to_owned(), doing, source };
    let file = File::open(path).map_err(io("open"))?;
    let about = file.metadata().map_err(io("inspect"))?;
    if !about.is_file() {
        let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a regular file");
        return Err(io("map")(source));
    }
    if about.len() == 0 {
        return Err(LoadError::damaged(path, "weight", "the file is empty"));
    }
    // SAFETY: the map is read-only and private to this process's view, and handed out only as `&[u8]`. Its
    // bytes can change only if another program writes to the file while a model runs from it; all offsets
    // and sizes are checked once against the map's length, which does not change, and no code derives a
    // pointer, length or enum value from weight bytes after that, so a change can alter numbers but not
    // memory safety within the process. A truncation raises SIGBUS, which ends the process.
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(io("map"))?;
    Ok(SharedBytes::of(MappedFile(map)))
}

/// A file's read-only map.
struct MappedFile(memmap2::Mmap);

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl BytesOwner for MappedFile {
    fn not_needed_now(&self, range: Range<usize>) {
        #[cfg(unix)]
        {
            // SAFETY: the map is of a file, read-only, and never written through: pages that are dropped
            // come back from the file with the same bytes when they are next read.
            let dropped = unsafe {
                self.0.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len())
            };
            // Advice: where the system refuses it, the pages stay.
            drop(dropped);
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_bytes_and_refuses_the_rest() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w");
        std::fs::write(&path, [1, 2, 3]).unwrap();
        let map = map_file(&path).unwrap();
        assert_eq!(map.as_slice(), [1, 2, 3]);
        map.not_needed_now(1..9);
        assert_eq!(map.as_slice(), [1, 2, 3]);
        std::fs::write(&path, []).unwrap();
        assert!(map_file(&path).unwrap_err().to_string().contains("the file is empty"));
        assert!(matches!(map_file(dir.path()), Err(LoadError::Io { .. })));
        assert!(matches!(map_file(&dir.path().join("none")), Err(LoadError::Io { .. })));
    }
}
