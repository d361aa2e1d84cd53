//! The header of one GGUF file: magic, version, metadata, tensor directory.
//!
//! [`Header::parse`] is a pure function of the file's bytes, so that it can be fuzzed.
//!
//! Not for split files, which have a header each: see [`GgufFile`](super::GgufFile).

use super::metadata::Metadata;
use super::reader::Reader;
use super::tensors::{self, TensorInfo};
use super::value::{Value, ValueType};
use crate::loading::LoadError;
use std::path::Path;

/// The least bytes an entry takes: key length, one character, type, one byte of value.
const LEAST_ENTRY: u64 = 8 + 1 + 4 + 1;
/// Where tensor data is aligned unless the file says otherwise.
const DEFAULT_ALIGNMENT: u64 = 32;

/// What stands before the data of one file, checked.
#[derive(Debug, Clone)]
pub struct Header {
    /// Version of the format: 2 or 3.
    pub version: u32,
    /// The key-value part.
    pub metadata: Metadata,
    /// The tensors, in the order of the file; every range lies inside the file and none overlap.
    pub tensors: Vec<TensorInfo>,
}

impl Header {
    /// Reads the header of the file whose bytes are `bytes`; `path` only names it in messages.
    ///
    /// # Errors
    /// [`LoadError::Damaged`], [`LoadError::NotSupported`] (another version, big-endian) or
    /// [`LoadError::UnsupportedTensor`]. Allocates in proportion to what was actually read, never to a
    /// number that stands in the file.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, LoadError> {
        let mut reader = Reader::new(path, bytes);
        let version = read_version(&mut reader)?;
        let tensor_count = reader.u64("the tensor count")?;
        let entry_count = reader.u64("the metadata count")?;
        let metadata = read_metadata(&mut reader, entry_count)?;
        let entries = tensors::read_entries(&mut reader, tensor_count)?;
        let alignment = alignment(&metadata)?;
        let start = (reader.position() as u64).next_multiple_of(alignment);
        let start = usize::try_from(start).map_err(|_| reader.damaged("its header is too long"))?;
        let tensors = tensors::resolve(&reader, &entries, alignment, start..bytes.len())?;
        Ok(Self { version, metadata, tensors })
    }
}

fn read_version(reader: &mut Reader<'_>) -> Result<u32, LoadError> {
    let magic: [u8; 4] = reader.array("the magic number")?;
    if magic != *b"GGUF" {
        return Err(reader.damaged("it does not begin with 'GGUF'"));
    }
    let version = reader.u32("the version")?;
    let what = match version {
        2 | 3 => return Ok(version),
        v if matches!(v.swap_bytes(), 1..=3) => "a big-endian GGUF file".to_owned(),
        v => format!("GGUF version {v}"),
    };
    Err(LoadError::NotSupported {
        path: reader.path().to_owned(),
        what,
        supported: "little-endian GGUF versions 2 and 3 (convert the model again with a current converter)"
            .into(),
    })
}

fn read_metadata(reader: &mut Reader<'_>, count: u64) -> Result<Metadata, LoadError> {
    if count.checked_mul(LEAST_ENTRY).is_none_or(|bytes| bytes > reader.remaining() as u64) {
        let left = reader.remaining();
        return Err(reader.damaged(format!("it claims {count} metadata entries, but {left} bytes are left")));
    }
    let mut metadata = Metadata::new(reader.path());
    for number in 0..count {
        let key = reader.name(&format!("the key of metadata entry {number}"))?;
        let id = reader.u32(&format!("the type of '{key}'"))?;
        let kind = ValueType::from_id(id)
            .ok_or_else(|| reader.damaged(format!("'{key}' has the unknown value type {id}")))?;
        let value = Value::read(reader, kind, key)?;
        if !metadata.insert(key, value) {
            return Err(reader.damaged(format!("metadata key '{key}' appears twice")));
        }
    }
    Ok(metadata)
}

fn alignment(metadata: &Metadata) -> Result<u64, LoadError> {
    let key = "general.alignment";
    match metadata.opt_u32(key)? {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(value) if value.is_power_of_two() && value <= 1 << 20 => Ok(u64::from(value)),
        Some(value) => Err(metadata.bad(key, format!("must be a power of two up to 1048576, is {value}"))),
    }
}
