//! A weight as it lies in a model file: name, type, shape and read-only bytes, not yet converted.
//!
//! Lives as long as the model; clones share the bytes (usually a memory-mapped file). Model code turns a
//! weight into the layout its device wants, once, at load.
//!
//! Not for activations or anything that is written to: those are the strided views of this crate.

use crate::quant::{self, QuantFormat};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// How the elements of a weight are stored. All multi-byte values are little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    BF16,
    /// A GGUF block format.
    Quant(QuantFormat),
}

impl WeightType {
    /// The name that messages and reports use, such as `BF16` or `Q4_K`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Quant(format) => format.name(),
        }
    }

    /// Elements that are stored together: 1, or the block of a quantised format.
    pub const fn block_elems(self) -> usize {
        match self {
            Self::Quant(format) => format.block_elems(),
            _ => 1,
        }
    }

    /// Bytes of [`block_elems`](Self::block_elems) elements.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Quant(format) => format.block_bytes(),
        }
    }

    /// Bytes of `elems` elements, or `None` when they are not whole blocks or the size overflows.
    pub fn bytes_for(self, elems: usize) -> Option<usize> {
        if elems.is_multiple_of(self.block_elems()) {
            (elems / self.block_elems()).checked_mul(self.block_bytes())
        } else {
            None
        }
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What holds read-only bytes and can give the memory of some back until they are read again: a memory map.
///
/// ```
/// use headway_tensor::{SharedBytes, weight::BytesOwner};
/// use std::{ops::Range, sync::{Arc, Mutex}};
/// /// Writes down what it hears.
/// struct Listens(Vec<u8>, Arc<Mutex<Vec<Range<usize>>>>);
/// impl AsRef<[u8]> for Listens {
///     fn as_ref(&self) -> &[u8] {
///         &self.0
///     }
/// }
/// impl BytesOwner for Listens {
///     fn not_needed_now(&self, range: Range<usize>) {
///         self.1.lock().unwrap().push(range);
///     }
/// }
///
/// let heard = Arc::default();
/// let bytes = SharedBytes::of(Listens(vec![7; 100], Arc::clone(&heard)));
/// let part = bytes.slice(40..60).unwrap();
/// part.not_needed_now(5..50); // counted from the part's beginning, and no further than its end
/// assert_eq!(*heard.lock().unwrap(), [45..60]);
/// assert_eq!(part.as_slice(), [7; 20]);
/// ```
pub trait BytesOwner: AsRef<[u8]> + Send + Sync {
    /// Hears that `range` is not needed for now. The bytes can still be read, and are the same.
    fn not_needed_now(&self, range: Range<usize>);
}

/// An owner that keeps its memory.
struct Kept<T>(T);

impl<T: AsRef<[u8]>> AsRef<[u8]> for Kept<T> {
    fn as_ref(&self) -> &[u8] {
        self.0.as_ref()
    }
}

impl<T: AsRef<[u8]> + Send + Sync> BytesOwner for Kept<T> {
    fn not_needed_now(&self, _: Range<usize>) {}
}

/// A range of read-only bytes that keeps its owner (a memory map, a vector) alive. Cloning is cheap.
#[derive(Clone)]
pub struct SharedBytes {
    owner: Arc<dyn BytesOwner>,
    start: usize,
    len: usize,
}

impl SharedBytes {
    /// All bytes of `owner`, as long as they are now.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        Self::of(Kept(owner))
    }

    /// All bytes of an owner that hears what is not needed.
    pub fn of(owner: impl BytesOwner + 'static) -> Self {
        let len = owner.as_ref().len();
        Self { owner: Arc::new(owner), start: 0, len }
    }

    /// Tells the owner that the part `range` of these bytes is not needed for now. What lies outside is
    /// left out; reading stays possible.
    pub fn not_needed_now(&self, range: Range<usize>) {
        let range = range.start..range.end.min(self.len);
        if !range.is_empty() {
            self.owner.not_needed_now(self.start + range.start..self.start + range.end);
        }
    }

    /// The bytes.
    ///
    /// # Panics
    /// When the owner now returns fewer bytes than it did in [`SharedBytes::new`]: owners must not shrink.
    pub fn as_slice(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.start..self.start + self.len]
    }

    /// A part of these bytes, or `None` when `range` is not inside them. The owner is shared.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.len {
            return None;
        }
        Some(Self {
            owner: Arc::clone(&self.owner),
            start: self.start + range.start,
            len: range.end - range.start,
        })
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes as little-endian numbers without a copy, or `None` when they are not aligned for `T`,
    /// not a whole number of them, or the machine is big-endian.
    pub fn try_cast<T: bytemuck::AnyBitPattern>(&self) -> Option<&[T]> {
        if cfg!(target_endian = "little") { bytemuck::try_cast_slice(self.as_slice()).ok() } else { None }
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({} bytes)", self.len)
    }
}

impl From<Vec<u8>> for SharedBytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self::new(bytes)
    }
}

/// Why a weight cannot be made or read as asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WeightError {
    /// The element count of the shape overflows, or a dimension is zero.
    #[error("tensor '{name}' has the impossible shape {shape:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape, outermost first.
        shape: Vec<usize>,
    },
    /// The row length is not whole blocks of the quantised format.
    #[error("tensor '{name}' of shape {shape:?} has rows that are not whole {dtype} blocks of {block}")]
    PartialBlock {
        /// The tensor.
        name: String,
        /// Its shape, outermost first.
        shape: Vec<usize>,
        /// Its type.
        dtype: WeightType,
        /// Elements per block.
        block: usize,
    },
    /// The bytes are not as many as the shape and type need.
    #[error("tensor '{name}' of shape {shape:?} and type {dtype} needs {expected} bytes, but has {actual}")]
    ByteLength {
        /// The tensor.
        name: String,
        /// Its shape, outermost first.
        shape: Vec<usize>,
        /// Its type.
        dtype: WeightType,
        /// Bytes that shape and type need.
        expected: usize,
        /// Bytes there are.
        actual: usize,
    },
    /// Rows outside the tensor were asked for.
    #[error("tensor '{name}' has {rows} rows; rows {start}..{end} were asked for")]
    Rows {
        /// The tensor.
        name: String,
        /// Rows it has.
        rows: usize,
        /// First row asked for.
        start: usize,
        /// One past the last row asked for.
        end: usize,
    },
    /// The output of a row conversion is not as long as a row.
    #[error("tensor '{name}' has rows of {cols} elements; the output holds {actual}")]
    RowLength {
        /// The tensor.
        name: String,
        /// Elements in a row.
        cols: usize,
        /// Elements the output holds.
        actual: usize,
    },
}

/// One named tensor of a model file.
///
/// Invariant: `bytes` holds exactly the elements of `shape` in `dtype`, row-major, and the last
/// dimension is whole blocks. [`Weight::new`] checks it, so everything after it can rely on it.
#[derive(Debug, Clone)]
pub struct Weight {
    name: String,
    dtype: WeightType,
    shape: Vec<usize>,
    bytes: SharedBytes,
}

impl Weight {
    /// A weight over `bytes`.
    ///
    /// `shape` is row-major with the outermost dimension first: a linear layer is `[out, in]`. An empty
    /// shape is a single element.
    ///
    /// # Errors
    /// [`WeightError::Shape`], [`WeightError::PartialBlock`] or [`WeightError::ByteLength`].
    pub fn new(
        name: impl Into<String>,
        dtype: WeightType,
        shape: Vec<usize>,
        bytes: SharedBytes,
    ) -> Result<Self, WeightError> {
        let name = name.into();
        let expected = match byte_len(dtype, &shape) {
            Ok(expected) => expected,
            Err(Fault::Shape) => return Err(WeightError::Shape { name, shape }),
            Err(Fault::Block) => {
                return Err(WeightError::PartialBlock { name, shape, dtype, block: dtype.block_elems() });
            }
        };
        if bytes.len() != expected {
            return Err(WeightError::ByteLength { name, shape, dtype, expected, actual: bytes.len() });
        }
        Ok(Self { name, dtype, shape, bytes })
    }

    /// A float32 weight over values in memory.
    ///
    /// # Errors
    /// As [`Weight::new`].
    pub fn from_f32(name: impl Into<String>, shape: Vec<usize>, values: &[f32]) -> Result<Self, WeightError> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::new(name, WeightType::F32, shape, SharedBytes::new(bytes))
    }

    /// The tensor's name in its file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How its elements are stored.
    pub fn dtype(&self) -> WeightType {
        self.dtype
    }

    /// Its shape, row-major, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Its bytes.
    pub fn bytes(&self) -> &SharedBytes {
        &self.bytes
    }

    /// Elements in a row: the last dimension, 1 for a scalar.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Rows: the product of all dimensions but the last, so 1 for a vector.
    pub fn rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, outer)| outer.iter().product())
    }

    /// Number of elements.
    pub fn elems(&self) -> usize {
        self.rows() * self.cols()
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.cols() / self.dtype.block_elems() * self.dtype.block_bytes()
    }

    /// The same bytes under another name.
    pub fn renamed(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// The bytes of row `row`, or `None` when there is no such row.
    pub fn row(&self, row: usize) -> Option<&[u8]> {
        let start = row.checked_mul(self.row_bytes())?;
        self.bytes.as_slice().get(start..start.checked_add(self.row_bytes())?)
    }

    /// The rows `rows` as a weight of shape `[rows.len(), cols]`, sharing the bytes.
    ///
    /// # Errors
    /// [`WeightError::Rows`] when the range is empty or not inside the tensor.
    pub fn slice_rows(&self, rows: Range<usize>) -> Result<Self, WeightError> {
        if rows.start >= rows.end || rows.end > self.rows() {
            return Err(self.no_rows(rows));
        }
        let bytes = self.bytes.slice(rows.start * self.row_bytes()..rows.end * self.row_bytes());
        let bytes = bytes.ok_or_else(|| self.no_rows(rows.clone()))?;
        Self::new(self.name.clone(), self.dtype, vec![rows.len(), self.cols()], bytes)
    }

    /// Entry `index` of the outermost dimension, for example one expert of a stacked `[experts, out, in]`.
    ///
    /// # Errors
    /// [`WeightError::Rows`] when there is no such entry or the weight has fewer than two dimensions.
    pub fn slice_outer(&self, index: usize) -> Result<Self, WeightError> {
        let inner = self.shape.get(1..).filter(|inner| !inner.is_empty()).unwrap_or(&[]);
        let outer = self.shape.first().copied().unwrap_or(0);
        if inner.is_empty() || index >= outer {
            return Err(self.no_rows(index..index.saturating_add(1)));
        }
        let len = self.bytes.len() / outer;
        let bytes = self.bytes.slice(index * len..(index + 1) * len);
        let bytes = bytes.ok_or_else(|| self.no_rows(index..index.saturating_add(1)))?;
        Self::new(format!("{}[{index}]", self.name), self.dtype, inner.to_vec(), bytes)
    }

    fn no_rows(&self, asked: Range<usize>) -> WeightError {
        WeightError::Rows { name: self.name.clone(), rows: self.rows(), start: asked.start, end: asked.end }
    }

    /// Row `row` as float32 into `out`, which holds exactly [`cols`](Self::cols) elements.
    ///
    /// # Errors
    /// [`WeightError::Rows`] or [`WeightError::RowLength`].
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) -> Result<(), WeightError> {
        if out.len() != self.cols() {
            return Err(WeightError::RowLength {
                name: self.name.clone(),
                cols: self.cols(),
                actual: out.len(),
            });
        }
        let bytes = self.row(row).ok_or_else(|| self.no_rows(row..row.saturating_add(1)))?;
        self.decode(bytes, out);
        Ok(())
    }

    /// All elements as float32, row-major.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0f32; self.elems()];
        self.decode(self.bytes.as_slice(), &mut out);
        out
    }

    /// Decodes `bytes`, whole rows of this weight, into as many elements.
    fn decode(&self, bytes: &[u8], out: &mut [f32]) {
        match self.dtype {
            WeightType::F32 => fill(out, bytes.as_chunks().0, |b| f32::from_le_bytes(*b)),
            WeightType::F16 => {
                fill(out, bytes.as_chunks().0, |b| quant::half_bits::f16_to_f32(u16::from_le_bytes(*b)));
            }
            WeightType::BF16 => {
                fill(out, bytes.as_chunks().0, |b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16));
            }
            WeightType::Quant(format) => {
                if let Err(fault) = quant::dequantize(format, bytes, out) {
                    unreachable!("the size was checked when the weight was made: {fault}");
                }
            }
        }
    }
}

fn fill<const N: usize>(out: &mut [f32], items: &[[u8; N]], convert: impl Fn(&[u8; N]) -> f32) {
    for (out, item) in out.iter_mut().zip(items) {
        *out = convert(item);
    }
}

/// What is wrong with a shape, before a name is attached.
enum Fault {
    Shape,
    Block,
}

/// Bytes that a tensor of this type and shape takes.
fn byte_len(dtype: WeightType, shape: &[usize]) -> Result<usize, Fault> {
    let elems = shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim)).ok_or(Fault::Shape)?;
    if elems == 0 {
        return Err(Fault::Shape);
    }
    if !shape.last().copied().unwrap_or(1).is_multiple_of(dtype.block_elems()) {
        return Err(Fault::Block);
    }
    dtype.bytes_for(elems).ok_or(Fault::Shape)
}
