//! The tensor directory of a GGUF file: names, types, shapes and places, all checked.
//!
//! Three passes, so that the most telling error comes first: read all entries, check all types, then
//! check sizes and offsets against the file and each other.
//!
//! Not for tensor data.

use super::reader::Reader;
use crate::loading::LoadError;
use crate::loading::error::SUPPORTED_GGUF_TYPES;
use headway_tensor::WeightType;
use headway_tensor::quant::QuantFormat;
use std::collections::HashSet;
use std::ops::Range;

/// ggml has no tensors of more dimensions.
const MAX_DIMS: u32 = 4;
/// The least bytes an entry takes: name length, one character, dimension count, a dimension, type, offset.
const LEAST_ENTRY: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// How its elements are stored.
    pub dtype: WeightType,
    /// Its shape, row-major with the outermost dimension first (the file has it the other way round).
    pub shape: Vec<usize>,
    /// Its bytes in the file.
    pub range: Range<usize>,
}

/// An entry as it stands in the file.
pub(super) struct RawEntry<'a> {
    name: &'a str,
    type_id: u32,
    /// Innermost dimension first.
    dims: [u64; MAX_DIMS as usize],
    n_dims: usize,
    offset: u64,
}

/// Reads `count` entries.
pub(super) fn read_entries<'a>(reader: &mut Reader<'a>, count: u64) -> Result<Vec<RawEntry<'a>>, LoadError> {
    if count.checked_mul(LEAST_ENTRY).is_none_or(|bytes| bytes > reader.remaining() as u64) {
        let left = reader.remaining();
        return Err(reader.damaged(format!("it claims {count} tensors, but {left} bytes are left")));
    }
    let (mut entries, mut seen) = (Vec::new(), HashSet::new());
    for number in 0..count {
        let entry = read_entry(reader, number)?;
        if !seen.insert(entry.name) {
            return Err(reader.damaged(format!("tensor '{}' is listed twice", entry.name)));
        }
        entries.push(entry);
    }
    Ok(entries)
}

fn read_entry<'a>(reader: &mut Reader<'a>, number: u64) -> Result<RawEntry<'a>, LoadError> {
    let name = reader.name(&format!("the name of tensor {number}"))?;
    let what = format!("the entry of tensor '{name}'");
    let n_dims = reader.u32(&what)?;
    if !(1..=MAX_DIMS).contains(&n_dims) {
        return Err(
            reader.damaged(format!("tensor '{name}' has {n_dims} dimensions (1 to {MAX_DIMS} are possible)"))
        );
    }
    let mut dims = [1u64; MAX_DIMS as usize];
    for dim in dims.iter_mut().take(n_dims as usize) {
        *dim = reader.u64(&what)?;
    }
    let (type_id, offset) = (reader.u32(&what)?, reader.u64(&what)?);
    Ok(RawEntry { name, type_id, dims, n_dims: n_dims as usize, offset })
}

/// Checks types, then sizes, then places; `data` is where the tensor data begins and where the file ends.
pub(super) fn resolve(
    reader: &Reader<'_>,
    entries: &[RawEntry<'_>],
    alignment: u64,
    data: Range<usize>,
) -> Result<Vec<TensorInfo>, LoadError> {
    check_types(reader, entries)?;
    let place = |entry| place(reader, entry, alignment, &data);
    let tensors = entries.iter().map(place).collect::<Result<Vec<_>, _>>()?;
    check_overlap(reader, &tensors)?;
    Ok(tensors)
}

fn check_types(reader: &Reader<'_>, entries: &[RawEntry<'_>]) -> Result<(), LoadError> {
    let mut unsupported = entries.iter().filter(|entry| weight_type(entry.type_id).is_none());
    match unsupported.next() {
        None => Ok(()),
        Some(first) => Err(LoadError::UnsupportedTensor {
            path: reader.path().to_owned(),
            tensor: first.name.to_owned(),
            dtype: type_name(first.type_id),
            others: unsupported.count(),
            supported: SUPPORTED_GGUF_TYPES,
        }),
    }
}

/// Size and place of one tensor.
fn place(
    reader: &Reader<'_>,
    entry: &RawEntry<'_>,
    alignment: u64,
    data: &Range<usize>,
) -> Result<TensorInfo, LoadError> {
    let name = entry.name;
    let dims = &entry.dims[..entry.n_dims];
    let bad = |what: String| reader.damaged(format!("tensor '{name}' {what}"));
    let dtype = weight_type(entry.type_id).ok_or_else(|| bad(format!("has type {}", entry.type_id)))?;
    // Positive and below 2^63, as ggml's signed sizes are; the product is checked for overflow.
    if dims.iter().any(|&dim| dim == 0 || dim > i64::MAX as u64) {
        return Err(bad(format!("has the impossible dimensions {dims:?}")));
    }
    let elems = dims.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim));
    let elems = elems.and_then(|n| usize::try_from(n).ok());
    let elems = elems.ok_or_else(|| bad(format!("has dimensions {dims:?}, whose product overflows")))?;
    let block = dtype.block_elems();
    if !dims[0].is_multiple_of(block as u64) {
        return Err(bad(format!("has rows of {} elements, not whole {dtype} blocks of {block}", dims[0])));
    }
    let size = dtype.bytes_for(elems);
    let size = size.ok_or_else(|| bad(format!("has dimensions {dims:?}, whose size overflows")))?;
    if !entry.offset.is_multiple_of(alignment) {
        return Err(bad(format!("lies at offset {}, which is not a multiple of {alignment}", entry.offset)));
    }
    let start = usize::try_from(entry.offset).ok().and_then(|offset| data.start.checked_add(offset));
    let range = start.and_then(|start| Some(start..start.checked_add(size)?)).filter(|r| r.end <= data.end);
    let range = range.ok_or_else(|| {
        let (offset, have) = (entry.offset, data.end.saturating_sub(data.start));
        bad(format!(
            "takes {size} bytes at offset {offset} of the data, but the file has {have} bytes of data"
        ))
    })?;
    let shape = dims.iter().rev().map(|&dim| dim as usize).collect();
    Ok(TensorInfo { name: name.to_owned(), dtype, shape, range })
}

fn check_overlap(reader: &Reader<'_>, tensors: &[TensorInfo]) -> Result<(), LoadError> {
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.range.start);
    for pair in order.windows(2) {
        if let [a, b] = pair
            && a.range.end > b.range.start
        {
            return Err(reader.damaged(format!("tensors '{}' and '{}' overlap", a.name, b.name)));
        }
    }
    Ok(())
}

/// The type with this ggml number, if it can be loaded.
pub fn weight_type(id: u32) -> Option<WeightType> {
    match id {
        0 => Some(WeightType::F32),
        1 => Some(WeightType::F16),
        30 => Some(WeightType::BF16),
        id => QuantFormat::from_ggml_type_id(id).map(WeightType::Quant),
    }
}

/// The ggml number of a type.
pub fn type_id(dtype: WeightType) -> u32 {
    match dtype {
        WeightType::F32 => 0,
        WeightType::F16 => 1,
        WeightType::BF16 => 30,
        WeightType::Quant(format) => format.ggml_type_id(),
    }
}

/// Name and number of a ggml type, for messages: also of the types that cannot be loaded.
fn type_name(id: u32) -> String {
    let name = match id {
        4 => "Q4_2",
        5 => "Q4_3",
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        31 => "Q4_0_4_4",
        32 => "Q4_0_4_8",
        33 => "Q4_0_8_8",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        40 => "NVFP4",
        41 => "Q1_0",
        _ => return format!("number {id} (not a known GGUF type)"),
    };
    format!("{name} (number {id})")
}
