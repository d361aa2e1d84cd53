//! Whether a file is a whole shared library of this machine's kind, and what it imports: the dynamic linker does not survive
//! one that is cut off, because it maps what the header promises.

/// What such a file begins with.
pub const MAGIC: &[u8] = b"\x7fELF";
/// `ET_DYN`: a shared object.
const SHARED: u16 = 3;
/// `PT_LOAD`: a part that is mapped.
const LOAD: u32 = 1;
/// `e_machine` of this machine.
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

/// `SHT_DYNSYM`: the section of the symbols that the linker sees.
const SYMBOLS: u64 = 11;
/// Bytes of a symbol.
const SYMBOL: usize = 24;

/// A number of so many bytes.
fn number(file: &[u8], at: usize, len: usize) -> Option<u64> {
    let bytes = file.get(at..at.checked_add(len)?)?;
    Some(bytes.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b)))
}

/// The symbols that a library imports, of a file that [`check`] took for one.
///
/// # Errors
/// What is wrong.
pub fn undefined(file: &[u8]) -> Result<Vec<&str>, &'static str> {
    symbols(file, true).ok_or(UNREADABLE)
}

/// The symbols that a library has for others, of a file that [`check`] took for one.
///
/// # Errors
/// What is wrong.
pub fn defined(file: &[u8]) -> Result<Vec<&str>, &'static str> {
    symbols(file, false).ok_or(UNREADABLE)
}

const UNREADABLE: &str = "its symbols can't be read";

fn symbols(file: &[u8], imported: bool) -> Option<Vec<&str>> {
    let place = |at: usize, len| number(file, at, len).and_then(|n| usize::try_from(n).ok());
    let (sections, size, count) = (place(40, 8)?, place(58, 2)?, place(60, 2)?);
    let section = |i: usize| sections.checked_add(i.checked_mul(size)?);
    let bytes = |i: usize| {
        let at = section(i)?;
        let (from, len) = (place(at + 24, 8)?, place(at + 32, 8)?);
        file.get(from..from.checked_add(len)?)
    };
    let dynamic = (0..count).find(|&i| section(i).and_then(|at| number(file, at + 4, 4)) == Some(SYMBOLS))?;
    let names = bytes(place(section(dynamic)? + 40, 4)?)?;
    let of = |s: &[u8]| {
        let name = names.get(usize::try_from(number(s, 0, 4)?).ok()?..)?;
        std::str::from_utf8(name.split(|&b| b == 0).next()?).ok()
    };
    // Imported: of no section, with a name.
    let asked = |s: &&[u8]| (number(s, 6, 2) == Some(0)) == imported && number(s, 0, 4) != Some(0);
    bytes(dynamic)?.chunks_exact(SYMBOL).filter(asked).map(of).collect()
}

/// Checks the header (ELF64, little-endian), and that every part that is mapped lies in the file.
///
/// # Errors
/// What is wrong.
pub fn check(file: &[u8]) -> Result<(), &'static str> {
    let number = |at: usize, len: usize| number(file, at, len);
    if !file.starts_with(MAGIC) {
        return Err("it has no ELF header");
    }
    // Class 2: 64 bits; data 1: little-endian.
    if file.get(4..6) != Some(&[2, 1]) {
        return Err("it is for machines of another word size or byte order");
    }
    let kind = (number(16, 2), number(18, 2));
    if kind != (Some(SHARED.into()), Some(MACHINE.into())) {
        return Err("it is a program, an object, or for another processor");
    }
    let cut = "it is cut off";
    let (at, size, count) = (number(32, 8).ok_or(cut)?, number(54, 2).ok_or(cut)?, number(56, 2).ok_or(cut)?);
    for i in 0..count {
        let header = at.checked_add(i * size).and_then(|h| usize::try_from(h).ok()).ok_or(cut)?;
        let loads = number(header, 4).ok_or(cut)? == u64::from(LOAD);
        let (from, len) = (
            number(header.saturating_add(8), 8).ok_or(cut)?,
            number(header.saturating_add(32), 8).ok_or(cut)?,
        );
        if loads && from.checked_add(len).is_none_or(|end| end > file.len() as u64) {
            return Err(cut);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{check, defined, undefined};

    #[test]
    fn imports_are_read_from_the_file() {
        let library = std::env::current_exe().unwrap().with_file_name(headway_ffi_shim::FILE);
        let library = if library.is_file() {
            library
        } else {
            library.with_file_name("..").join(headway_ffi_shim::FILE)
        };
        let file = std::fs::read(library).expect("cargo makes the shim before this test");
        assert_eq!(check(&file), Ok(()));
        let imported = undefined(&file).unwrap();
        // What it calls, not what it has.
        assert!(imported.contains(&"free"), "{imported:?}");
        assert!(!imported.contains(&"aoti_torch_get_dim"));
        let own = defined(&file).unwrap();
        assert!(own.contains(&"aoti_torch_get_dim") && own.contains(&"TVMFFIEnvSetStream"), "{own:?}");
        assert!(!own.contains(&"free"));
        // Every way of cutting it off is an error or a shorter list, and no panic.
        (0..file.len()).step_by(997).for_each(|n| drop(undefined(&file[..n])));
        assert_eq!(undefined(&file[..64]), Err("its symbols can't be read"));
    }

    #[test]
    fn files_of_other_kinds() {
        assert_eq!(check(b"#!/bin/sh"), Err("it has no ELF header"));
        assert_eq!(check(b"\x7fELF"), Err("it is for machines of another word size or byte order"));
        let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        assert_eq!(check(&file), Err("it is a program, an object, or for another processor"));
        file.extend(3u16.to_le_bytes());
        file.extend(super::MACHINE.to_le_bytes());
        assert_eq!(check(&file), Err("it is cut off"));
        // Headers that no file could hold.
        file.resize(64, 0xff);
        assert_eq!(check(&file), Err("it is cut off"));
    }
}
