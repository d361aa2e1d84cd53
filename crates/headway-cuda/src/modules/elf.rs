//! Whether a file is a whole shared library of this machine's kind: the dynamic linker does not survive one that is cut
//! off, because it maps what the header promises.

/// What such a file begins with.
pub const MAGIC: &[u8] = b"\x7fELF";
/// `ET_DYN`: a shared object.
const SHARED: u16 = 3;
/// `PT_LOAD`: a part that is mapped.
const LOAD: u32 = 1;
/// `e_machine` of this machine.
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

/// Checks the header (ELF64, little-endian), and that every part that is mapped lies in the file.
///
/// # Errors
/// What is wrong.
pub fn check(file: &[u8]) -> Result<(), &'static str> {
    let number = |at: usize, len: usize| -> Option<u64> {
        let bytes = file.get(at..at.checked_add(len)?)?;
        Some(bytes.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b)))
    };
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
    use super::check;

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
