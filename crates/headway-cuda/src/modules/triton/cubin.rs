//! Whether a file is machine code for NVIDIA devices that has a function: an ELF file with a table of symbols.

use crate::modules::elf::MAGIC;

/// `e_machine` of NVIDIA's devices.
const MACHINE: u64 = 190;
/// `SHT_SYMTAB`.
const SYMBOLS: u64 = 2;
/// `SHT_NOBITS`: takes no room in the file.
const NO_BITS: u64 = 8;
/// Bytes of a section's header.
const HEADER: usize = 64;
/// Bytes of a symbol.
const SYMBOL: usize = 24;

const CUT: &str = "it is cut off";

/// Little-endian numbers of a file.
struct File<'a>(&'a [u8]);

impl File<'_> {
    fn number(&self, at: usize, len: usize) -> Result<u64, String> {
        let bytes = at.checked_add(len).and_then(|end| self.0.get(at..end)).ok_or(CUT)?;
        Ok(bytes.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b)))
    }

    fn at(&self, at: usize) -> Result<usize, String> {
        usize::try_from(self.number(at, 8)?).map_err(|_| CUT.to_owned())
    }

    /// A section: kind, offset, bytes, linked section.
    fn section(&self, table: usize, i: usize) -> Result<(u64, usize, usize, usize), String> {
        let header = i.checked_mul(HEADER).and_then(|n| n.checked_add(table)).ok_or(CUT)?;
        let of = |n: usize| header.checked_add(n).ok_or(CUT);
        let (kind, from, len) = (self.number(of(4)?, 4)?, self.at(of(24)?)?, self.at(of(32)?)?);
        if kind != NO_BITS && from.checked_add(len).is_none_or(|end| end > self.0.len()) {
            return Err(CUT.into());
        }
        Ok((kind, from, len, self.number(of(40)?, 4)? as usize))
    }
}

/// Checks the header (ELF64, little-endian), that every section lies in the file, and that there is such a function.
///
/// # Errors
/// What is wrong.
pub(super) fn check(bytes: &[u8], function: &str) -> Result<(), String> {
    let file = File(bytes);
    if !bytes.starts_with(MAGIC) || bytes.get(4..6) != Some(&[2, 1]) {
        return Err("it has no ELF header".into());
    }
    if file.number(18, 2)? != MACHINE {
        return Err("it is not for NVIDIA's devices".into());
    }
    let (table, size, count) = (file.at(40)?, file.number(58, 2)? as usize, file.number(60, 2)? as usize);
    let end = count.checked_mul(HEADER).and_then(|n| n.checked_add(table));
    if size != HEADER || end.is_none_or(|end| end > bytes.len()) {
        return Err(CUT.into());
    }
    let mut found = false;
    for i in 0..count {
        let (kind, from, len, names) = file.section(table, i)?;
        if kind != SYMBOLS {
            continue;
        }
        let (_, names, names_len, _) = file.section(table, names)?;
        let part = |from: usize, len| from.checked_add(len).and_then(|end| bytes.get(from..end)).ok_or(CUT);
        let (symbols, names) = (part(from, len)?, part(names, names_len)?);
        for symbol in symbols.chunks_exact(SYMBOL) {
            let name = u32::from_le_bytes([symbol[0], symbol[1], symbol[2], symbol[3]]) as usize;
            let name = names.get(name..).and_then(|n| n.split(|&b| b == 0).next());
            // 2: `STT_FUNC`.
            found |= symbol[4] & 15 == 2 && name == Some(function.as_bytes());
        }
    }
    if found { Ok(()) } else { Err(format!("it has no function {function}")) }
}
