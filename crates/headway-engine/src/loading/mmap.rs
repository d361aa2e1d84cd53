//! A whole file mapped read-only into memory, as [`SharedBytes`].
//!
//! The map lives until the last weight over it is dropped. Pages are read from disk when they are first
//! touched and may be dropped again under memory pressure, so a model needs no second copy in memory.
//!
//! What happens when somebody changes the file meanwhile: overwritten in place, the weights change under
//! the model (wrong answers, but every size was fixed at load and nothing is read out of bounds);
//! truncated, the next access to a lost page ends the process with SIGBUS. Replacing the file by rename,
//! as package managers and downloaders do, is safe: the map keeps the old file.
//!
//! Not for small text files: those are read normally.

use super::LoadError;
use headway_tensor::SharedBytes;
use std::fs::File;
use std::path::Path;

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
    Ok(SharedBytes::new(map))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_bytes_and_refuses_the_rest() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w");
        std::fs::write(&path, [1, 2, 3]).unwrap();
        assert_eq!(map_file(&path).unwrap().as_slice(), [1, 2, 3]);
        std::fs::write(&path, []).unwrap();
        assert!(map_file(&path).unwrap_err().to_string().contains("the file is empty"));
        assert!(matches!(map_file(dir.path()), Err(LoadError::Io { .. })));
        assert!(matches!(map_file(&dir.path().join("none")), Err(LoadError::Io { .. })));
    }
}
