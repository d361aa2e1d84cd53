//! Empty shared libraries with torch's names. Modules name `libtorch.so` and two more as libraries that they need; glibc
//! looks among those that are loaded first, by the name that a library gives itself.

use super::ExtensionError;
use crate::modules::library::{Library, Linking};
use std::{io::Write, path::Path};

/// The libraries that modules need and that have nothing in them for us.
pub const NAMES: [&str; 3] = ["libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so"];

/// Loads the three. They stay.
///
/// # Errors
/// A real one that is in the process; the system's.
pub fn load() -> Result<(), ExtensionError> {
    if let Some(name) = NAMES.into_iter().find(|n| Library::is_loaded(Path::new(n))) {
        return Err(ExtensionError::Torch(name));
    }
    for name in NAMES {
        let failed = |why: String| ExtensionError::Open {
            path: name.into(),
            why,
            remedy: "an empty library by this name is written to the folder for temporary files (TMPDIR)",
        };
        let file = tempfile::NamedTempFile::new().and_then(|mut f| f.write_all(&library(name)).map(|()| f));
        let file = file.map_err(|e| failed(e.to_string()))?;
        Library::open(file.path(), Linking::LOCAL).map_err(failed)?;
    }
    Ok(())
}

const HEADER: usize = 64;
const SEGMENT: usize = 56;
const SYMBOL: usize = 24;

/// An ELF file for x86-64 that is a shared library of this name, without code or symbols.
fn library(name: &str) -> Vec<u8> {
    let names = [b"\0", name.as_bytes(), b"\0"].concat();
    let symbols = HEADER + 3 * SEGMENT;
    // One bucket, one symbol: the null one.
    let hash = symbols + SYMBOL;
    let hash_table = [1u32, 1, 0, 0];
    let strings = hash + size_of_val(&hash_table);
    let dynamic = (strings + names.len()).next_multiple_of(16);
    let tags: [(u64, usize); 7] = [
        // The library's name, the first string.
        (14, 1),
        (4, hash),
        (5, strings),
        (6, symbols),
        (10, names.len()),
        (11, SYMBOL),
        (0, 0),
    ];
    let len = dynamic + size_of_val(&tags);
    let mut file = vec![0u8; len];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    // 64 bits, little-endian, version 1; a shared object for x86-64.
    put(0, b"\x7fELF\x02\x01\x01");
    put(16, &[3, 0, 62, 0, 1, 0, 0, 0]);
    // Where segments are described; sizes of this header and of those, how many.
    put(32, &(HEADER as u64).to_le_bytes());
    put(52, &[HEADER as u8, 0, SEGMENT as u8, 0, 3, 0]);
    // All of it, readable and writable; its dynamic section; a stack that is not executed.
    let segments = [(1u32, 0, len, 4096u64), (2, dynamic, size_of_val(&tags), 8), (0x6474_e551, 0, 0, 16)];
    for (i, (kind, from, size, align)) in segments.into_iter().enumerate() {
        let at = HEADER + i * SEGMENT;
        put(at, &kind.to_le_bytes());
        put(at + 4, &6u32.to_le_bytes());
        // Where it begins in the file, mapped and physically; its size in the file and in memory.
        for (offset, x) in [(8, from), (16, from), (24, from), (32, size), (40, size)] {
            put(at + offset, &(x as u64).to_le_bytes());
        }
        put(at + 48, &align.to_le_bytes());
    }
    for (i, n) in hash_table.iter().enumerate() {
        put(hash + 4 * i, &n.to_le_bytes());
    }
    put(strings, &names);
    for (i, (tag, value)) in tags.into_iter().enumerate() {
        put(dynamic + 16 * i, &tag.to_le_bytes());
        put(dynamic + 16 * i + 8, &(value as u64).to_le_bytes());
    }
    file
}

#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::modules::elf;

    #[test]
    fn an_empty_library_is_one_to_the_linker() {
        // A name that no other test loads.
        let name = "libheadway_empty_stub.so";
        let bytes = library(name);
        assert_eq!(elf::check(&bytes), Ok(()));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::fs::write(&path, &bytes).unwrap();
        assert!(!Library::is_loaded(Path::new(name)));
        let opened = Library::open(&path, Linking::LOCAL).unwrap();
        assert!(opened.symbol("nothing").is_none());
        // By the name that it gives itself.
        assert!(Library::is_loaded(Path::new(name)));
    }
}
