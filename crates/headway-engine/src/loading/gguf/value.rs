//! Metadata values of a GGUF file, in memory no larger than they are in the file.
//!
//! Integers and floats of all widths are widened (without loss) to one variant each; number arrays keep
//! the bytes of the file and convert when asked; string arrays are one text with end offsets.
//!
//! Not for looking values up by key: see [`Metadata`](super::Metadata).

use super::reader::Reader;
use crate::loading::LoadError;

/// Arrays of arrays deeper than this are refused: nobody writes them.
const MAX_DEPTH: usize = 4;

/// The value types of the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the format's")]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    /// The type with this number in the format.
    pub fn from_id(id: u32) -> Option<Self> {
        use ValueType as V;
        let all = [
            V::U8,
            V::I8,
            V::U16,
            V::I16,
            V::U32,
            V::I32,
            V::F32,
            V::Bool,
            V::Text,
            V::Array,
            V::U64,
            V::I64,
            V::F64,
        ];
        all.get(usize::try_from(id).ok()?).copied()
    }

    /// Bytes of one value, `None` for texts and arrays.
    pub const fn size(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Text | Self::Array => None,
        }
    }
}

/// One metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// An unsigned integer of any width.
    Uint(u64),
    /// A signed integer of any width.
    Int(i64),
    /// A float of either width.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A string.
    Text(String),
    /// An array.
    Array(Array),
}

/// An array value.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    /// Numbers or booleans, as they stand in the file.
    Numbers(Numbers),
    /// Strings.
    Strings(Strings),
    /// Arrays.
    Arrays(Vec<Array>),
}

/// Numbers or booleans of one type in the little-endian bytes of the file.
#[derive(Debug, Clone, PartialEq)]
pub struct Numbers {
    kind: ValueType,
    bytes: Vec<u8>,
}

/// Many strings in one allocation.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Strings {
    text: String,
    ends: Vec<usize>,
}

impl Value {
    /// What kind of value it is, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Uint(_) | Self::Int(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a boolean",
            Self::Text(_) => "a string",
            Self::Array(Array::Numbers(_)) => "an array of numbers",
            Self::Array(Array::Strings(_)) => "an array of strings",
            Self::Array(Array::Arrays(_)) => "an array of arrays",
        }
    }

    /// The integer, if it is one and not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Uint(v) => Some(*v),
            Self::Int(v) => u64::try_from(*v).ok(),
            _ => None,
        }
    }

    pub(super) fn read(reader: &mut Reader<'_>, kind: ValueType, key: &str) -> Result<Self, LoadError> {
        let what = || format!("the value of '{key}'");
        if let Some(size) = kind.size() {
            let bytes = reader.take(size as u64, &what())?;
            return number(kind, bytes).ok_or_else(|| reader.damaged(format!("{} is no boolean", what())));
        }
        if kind == ValueType::Text {
            return Ok(Self::Text(reader.text(&what())?.to_owned()));
        }
        Ok(Self::Array(Array::read(reader, key, 1)?))
    }
}

/// One number or boolean out of exactly its bytes.
fn number(kind: ValueType, bytes: &[u8]) -> Option<Value> {
    let mut wide = [0u8; 8];
    wide.get_mut(..bytes.len())?.copy_from_slice(bytes);
    let unsigned = u64::from_le_bytes(wide);
    Some(match kind {
        ValueType::U8 | ValueType::U16 | ValueType::U32 | ValueType::U64 => Value::Uint(unsigned),
        ValueType::I8 => Value::Int(i64::from(unsigned as i8)),
        ValueType::I16 => Value::Int(i64::from(unsigned as i16)),
        ValueType::I32 => Value::Int(i64::from(unsigned as i32)),
        ValueType::I64 => Value::Int(unsigned.cast_signed()),
        ValueType::F32 => Value::Float(f64::from(f32::from_bits(unsigned as u32))),
        ValueType::F64 => Value::Float(f64::from_bits(unsigned)),
        ValueType::Bool if unsigned <= 1 => Value::Bool(unsigned == 1),
        ValueType::Bool | ValueType::Text | ValueType::Array => return None,
    })
}

impl Array {
    /// Number of entries.
    pub fn len(&self) -> usize {
        match self {
            Self::Numbers(numbers) => numbers.len(),
            Self::Strings(strings) => strings.len(),
            Self::Arrays(arrays) => arrays.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn read(reader: &mut Reader<'_>, key: &str, depth: usize) -> Result<Self, LoadError> {
        if depth > MAX_DEPTH {
            return Err(reader.damaged(format!("'{key}' has arrays nested deeper than {MAX_DEPTH}")));
        }
        let id = reader.u32(&format!("the element type of '{key}'"))?;
        let kind = ValueType::from_id(id)
            .ok_or_else(|| reader.damaged(format!("'{key}' has elements of the unknown type {id}")))?;
        let count = reader.u64(&format!("the length of '{key}'"))?;
        // The least that an entry takes: a string has a length, an array an element type and a length.
        let least = kind.size().unwrap_or(if kind == ValueType::Text { 8 } else { 12 }) as u64;
        let fits = count.checked_mul(least).is_some_and(|bytes| bytes <= reader.remaining() as u64);
        if !fits {
            let left = reader.remaining();
            return Err(reader.damaged(format!("'{key}' claims {count} entries, but {left} bytes are left")));
        }
        match kind {
            ValueType::Text => Ok(Self::Strings(Strings::read(reader, key, count)?)),
            ValueType::Array => {
                let arrays = (0..count).map(|_| Self::read(reader, key, depth + 1));
                Ok(Self::Arrays(arrays.collect::<Result<_, _>>()?))
            }
            _ => Ok(Self::Numbers(Numbers::read(reader, key, kind, count * least)?)),
        }
    }
}

impl Numbers {
    fn read(reader: &mut Reader<'_>, key: &str, kind: ValueType, len: u64) -> Result<Self, LoadError> {
        let bytes = reader.take(len, &format!("the array '{key}'"))?;
        if kind == ValueType::Bool && bytes.iter().any(|&b| b > 1) {
            return Err(reader.damaged(format!("'{key}' has entries that are no booleans")));
        }
        Ok(Self { kind, bytes: bytes.to_vec() })
    }

    /// The type of the entries.
    pub fn kind(&self) -> ValueType {
        self.kind
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.kind.size().unwrap_or(1)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The entries as values.
    pub fn iter(&self) -> impl Iterator<Item = Value> + '_ {
        self.bytes.chunks_exact(self.kind.size().unwrap_or(1)).filter_map(|bytes| number(self.kind, bytes))
    }

    /// All entries as float32, `None` unless they are floats.
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        self.iter().map(|v| if let Value::Float(v) = v { Some(v as f32) } else { None }).collect()
    }

    /// All entries as signed 32-bit integers, `None` unless they are integers that fit.
    pub fn to_i32(&self) -> Option<Vec<i32>> {
        let as_i32 = |v| match v {
            Value::Int(v) => i32::try_from(v).ok(),
            Value::Uint(v) => i32::try_from(v).ok(),
            _ => None,
        };
        self.iter().map(as_i32).collect()
    }

    /// All entries as sizes, `None` unless they are integers that fit and are not negative.
    pub fn to_usize(&self) -> Option<Vec<usize>> {
        self.iter().map(|v| v.as_u64().and_then(|v| usize::try_from(v).ok())).collect()
    }

    /// All entries as booleans, `None` unless they are.
    pub fn to_bool(&self) -> Option<Vec<bool>> {
        self.iter().map(|v| if let Value::Bool(v) = v { Some(v) } else { None }).collect()
    }
}

impl Strings {
    fn read(reader: &mut Reader<'_>, key: &str, count: u64) -> Result<Self, LoadError> {
        let mut strings = Self::default();
        let what = format!("an entry of '{key}'");
        for _ in 0..count {
            strings.push(reader.text(&what)?);
        }
        strings.text.shrink_to_fit();
        strings.ends.shrink_to_fit();
        Ok(strings)
    }

    fn push(&mut self, text: &str) {
        self.text.push_str(text);
        self.ends.push(self.text.len());
    }

    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// String number `index`.
    pub fn get(&self, index: usize) -> Option<&str> {
        let start = if index == 0 { 0 } else { *self.ends.get(index - 1)? };
        self.text.get(start..*self.ends.get(index)?)
    }

    /// All strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> + '_ {
        (0..self.len()).map(|i| self.get(i).unwrap_or_default())
    }

    /// All strings, each on its own.
    pub fn to_vec(&self) -> Vec<String> {
        self.iter().map(str::to_owned).collect()
    }
}

impl<S: AsRef<str>> FromIterator<S> for Strings {
    fn from_iter<I: IntoIterator<Item = S>>(texts: I) -> Self {
        let mut strings = Self::default();
        texts.into_iter().for_each(|text| strings.push(text.as_ref()));
        strings
    }
}
