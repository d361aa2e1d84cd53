//! The header of one safetensors file.
//!
//! The `safetensors` crate parses the JSON and checks that shapes, types and offsets agree and cover the
//! data without holes; this adds names for what is wrong, refuses names listed twice (a JSON map would
//! keep the last), and checks the data's end without overflow.
//!
//! Not for tensor data.

use crate::loading::LoadError;
use crate::loading::error::{SUPPORTED_SAFETENSORS_TYPES, one_line};
use headway_tensor::WeightType;
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// Headers beyond this are refused; real ones stay below a tenth of it.
const LARGEST_HEADER: u64 = 64 << 20;

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Its type as the file has it; not every type can be loaded.
    pub dtype: Dtype,
    /// Its shape, outermost first.
    pub shape: Vec<usize>,
    /// Its bytes in the file.
    pub range: Range<usize>,
}

/// What stands before the data of one file, checked.
#[derive(Debug, Clone)]
pub struct Header {
    /// The tensors, in the order of the data.
    pub entries: Vec<Entry>,
}

impl Header {
    /// Reads the header of the file whose bytes are `bytes`; `path` only names it in messages.
    ///
    /// # Errors
    /// [`LoadError::Damaged`], [`LoadError::UnsupportedTensor`] for an unknown or packed type.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, LoadError> {
        Self::parse_with(path, bytes, &[])
    }

    /// [`Header::parse`] of a file that may hold the `packed` types too: those of a quantised format that is read.
    ///
    /// # Errors
    /// As [`Header::parse`].
    pub(crate) fn parse_with(path: &Path, bytes: &[u8], packed: &[&str]) -> Result<Self, LoadError> {
        let damaged = |what: String| LoadError::damaged(path, "safetensors", what);
        let (json, data) = split_header(path, bytes)?;
        let names: Names = serde_json::from_slice(json).map_err(|e| damaged(format!("header: {e}")))?;
        check_names(path, &names, packed)?;
        let metadata: Metadata = serde_json::from_slice(json).map_err(|e| damaged(format!("header: {e}")))?;
        let mut entries = Vec::new();
        for name in metadata.offset_keys() {
            let Some(info) = metadata.info(&name) else { continue };
            let (start, end) = info.data_offsets;
            let range = data.start.checked_add(start).zip(data.start.checked_add(end)).map(|(s, e)| s..e);
            let range = range.filter(|range| range.end <= data.end).ok_or_else(|| {
                let have = data.len();
                damaged(format!("tensor '{name}' ends at byte {end} of the data, but the file has {have}"))
            })?;
            entries.push(Entry { name, dtype: info.dtype, shape: info.shape.clone(), range });
        }
        let end = entries.last().map_or(data.start, |entry| entry.range.end);
        if end != data.end {
            return Err(damaged(format!("{} bytes after the last tensor", data.end - end)));
        }
        Ok(Self { entries })
    }
}

/// The JSON bytes, and where the data lies in the file.
fn split_header<'a>(path: &Path, bytes: &'a [u8]) -> Result<(&'a [u8], Range<usize>), LoadError> {
    let damaged = |what: String| LoadError::damaged(path, "safetensors", what);
    let size =
        bytes.first_chunk().ok_or_else(|| damaged("shorter than the 8 bytes of its header size".into()))?;
    let size = u64::from_le_bytes(*size);
    if size > LARGEST_HEADER {
        return Err(damaged(format!("claims a header of {size} bytes ({LARGEST_HEADER} are the most)")));
    }
    let end = 8 + size as usize;
    let json = bytes.get(8..end);
    let json =
        json.ok_or_else(|| damaged(format!("claims a header of {size} bytes in a file of {}", bytes.len())))?;
    Ok((json, end..bytes.len()))
}

/// Refuses unprintable and repeated names, types that are unknown, and packed ones but those that are expected.
fn check_names(path: &Path, names: &Names, packed: &[&str]) -> Result<(), LoadError> {
    let mut seen = HashSet::new();
    let mut unsupported = Vec::new();
    for (name, probe) in &names.0 {
        if name.is_empty() || name.chars().any(char::is_control) {
            return Err(LoadError::damaged(
                path,
                "safetensors",
                format!("'{name}' is no usable tensor name"),
            ));
        }
        if !seen.insert(name) {
            return Err(LoadError::damaged(path, "safetensors", format!("tensor '{name}' is listed twice")));
        }
        if let Some(Word::Text(dtype)) = &probe.dtype
            && name != "__metadata__"
            && !tolerated(dtype)
            && !packed.contains(&dtype.as_str())
        {
            unsupported.push((name, dtype));
        }
    }
    match unsupported.as_slice() {
        [] => Ok(()),
        [(name, dtype), others @ ..] => Err(LoadError::UnsupportedTensor {
            path: path.to_owned(),
            tensor: one_line(name),
            dtype: format!("{}{}", one_line(dtype), packed_hint(dtype)),
            others: others.len(),
            supported: SUPPORTED_SAFETENSORS_TYPES,
        }),
    }
}

/// Types that may stand in a file: those that can be loaded, and those of buffers that no model asks for
/// (position ids, masks), which are refused when they are asked for.
fn tolerated(dtype: &str) -> bool {
    matches!(dtype, "F32" | "F16" | "BF16" | "F64" | "I64" | "I32" | "U64" | "U32" | "BOOL")
}

fn packed_hint(dtype: &str) -> &'static str {
    match dtype {
        d if d.starts_with("F8") => " (a float8 checkpoint with scales beside it)",
        d if d.starts_with("F4") || d.starts_with("F6") => " (a microscaling checkpoint)",
        "U8" | "I8" | "U16" | "I16" => " (a checkpoint of packed integers)",
        _ => "",
    }
}

/// The type to load, `None` for the merely tolerated ones.
pub(super) fn weight_type(dtype: Dtype) -> Option<WeightType> {
    match dtype {
        Dtype::F32 => Some(WeightType::F32),
        Dtype::F16 => Some(WeightType::F16),
        Dtype::BF16 => Some(WeightType::BF16),
        _ => None,
    }
}

/// The names of a header in order, repeats included, each with its type.
struct Names(Vec<(String, Probe)>);

/// The one field of an entry that is read twice.
#[derive(Deserialize)]
struct Probe {
    #[serde(default)]
    dtype: Option<Word>,
}

/// A string, or whatever else stands in its place.
#[derive(Deserialize)]
#[serde(untagged)]
enum Word {
    Text(String),
    Other(IgnoredAny),
}

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Names;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tensor entries")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Names, A::Error> {
                let mut names = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    names.push(entry);
                }
                Ok(Names(names))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
