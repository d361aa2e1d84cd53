//! GGUF block-quantised weight formats: their geometry, and their decoding to float32.
//!
//! A block holds 32 or 256 weights in a fixed number of bytes: packed integers `q` and one or more
//! scales. Every format here stores `weight = d * q + m`, with one `(d, m)` per sub-block of 16 or 32
//! weights; [`unpack`] decodes a block into exactly that form, and [`dequantize`] is built on it.
//! [`encode`] makes blocks of the five 32-weight formats.
//!
//! The layouts are those of ggml (<https://github.com/ggml-org/ggml>, `ggml-common.h`), described in its
//! GGUF documentation. A block lives wherever the weight file lives; nothing here keeps state.
//!
//! Not for multiplication: integer kernels are a device crate's business and build on [`unpack`].

pub mod encode;
pub mod half_bits;
mod k_blocks;
mod small_blocks;
pub mod unpack;

pub use encode::quantize;
pub use k_blocks::{Q2K, Q3K, Q4K, Q5K, Q6K};
pub use small_blocks::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
pub use unpack::{BlockFormat, FormatVisitor, unpack_block};

use serde::{Deserialize, Serialize};
use std::fmt;

/// Most weights in one block of any format: the length a `q` buffer needs to serve all formats.
pub const MAX_BLOCK_ELEMS: usize = 256;
/// Most sub-blocks in one block of any format: the length that `d` and `m` buffers need.
pub const MAX_SUB_BLOCKS: usize = 16;

/// A block format that headway reads, named as ggml names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(non_camel_case_types)]
pub enum QuantFormat {
    /// 32 signed bytes and a scale.
    Q8_0,
    /// 32 nibbles and a scale; zero point 8.
    Q4_0,
    /// 32 nibbles, a scale and a minimum.
    Q4_1,
    /// 32 five-bit integers and a scale; zero point 16.
    Q5_0,
    /// 32 five-bit integers, a scale and a minimum.
    Q5_1,
    /// 256 two-bit integers; four-bit scales and minima per 16.
    Q2_K,
    /// 256 three-bit integers; six-bit signed scales per 16, zero point 4.
    Q3_K,
    /// 256 nibbles; six-bit scales and minima per 32.
    Q4_K,
    /// 256 five-bit integers; six-bit scales and minima per 32.
    Q5_K,
    /// 256 six-bit integers; eight-bit signed scales per 16, zero point 32.
    Q6_K,
}

impl QuantFormat {
    /// Every format, in the order of the ggml type numbers.
    pub const ALL: [QuantFormat; 10] = [
        QuantFormat::Q4_0,
        QuantFormat::Q4_1,
        QuantFormat::Q5_0,
        QuantFormat::Q5_1,
        QuantFormat::Q8_0,
        QuantFormat::Q2_K,
        QuantFormat::Q3_K,
        QuantFormat::Q4_K,
        QuantFormat::Q5_K,
        QuantFormat::Q6_K,
    ];

    /// Weights in one block: 32, or 256 for the K formats.
    pub const fn block_elems(self) -> usize {
        match self {
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => 32,
            Self::Q2_K | Self::Q3_K | Self::Q4_K | Self::Q5_K | Self::Q6_K => 256,
        }
    }

    /// Bytes in one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q2_K => 84,
            Self::Q3_K => 110,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
        }
    }

    /// Weights that share one `(d, m)`: 16 or 32.
    pub const fn sub_block(self) -> usize {
        match self {
            Self::Q2_K | Self::Q3_K | Self::Q6_K => 16,
            _ => 32,
        }
    }

    /// Sub-blocks in one block: 1, 8 or 16.
    pub const fn sub_blocks(self) -> usize {
        self.block_elems() / self.sub_block()
    }

    /// Whether `q` is a signed byte (`Q8_0` only); otherwise it is unsigned and at most [`max_q`](Self::max_q).
    pub const fn signed(self) -> bool {
        matches!(self, Self::Q8_0)
    }

    /// Whether `m` can be nonzero: every format but `Q8_0`, since a zero point is folded into `m`.
    pub const fn has_min(self) -> bool {
        !matches!(self, Self::Q8_0)
    }

    /// The integer that stands for weight 0 in the formats without a stored minimum: there `m = -zero_point * d`.
    pub const fn zero_point(self) -> Option<u8> {
        match self {
            Self::Q8_0 => Some(0),
            Self::Q4_0 => Some(8),
            Self::Q5_0 => Some(16),
            Self::Q3_K => Some(4),
            Self::Q6_K => Some(32),
            Self::Q4_1 | Self::Q5_1 | Self::Q2_K | Self::Q4_K | Self::Q5_K => None,
        }
    }

    /// The largest magnitude `q` can have.
    pub const fn max_q(self) -> u8 {
        match self {
            Self::Q8_0 => 128,
            Self::Q2_K => 3,
            Self::Q3_K => 7,
            Self::Q4_0 | Self::Q4_1 | Self::Q4_K => 15,
            Self::Q5_0 | Self::Q5_1 | Self::Q5_K => 31,
            Self::Q6_K => 63,
        }
    }

    /// The number that GGUF files give this format.
    pub const fn ggml_type_id(self) -> u32 {
        match self {
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q2_K => 10,
            Self::Q3_K => 11,
            Self::Q4_K => 12,
            Self::Q5_K => 13,
            Self::Q6_K => 14,
        }
    }

    /// The format with this ggml type number, if it is one of ours.
    pub fn from_ggml_type_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.ggml_type_id() == id)
    }

    /// ggml's name, such as `Q4_K`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q2_K => "Q2_K",
            Self::Q3_K => "Q3_K",
            Self::Q4_K => "Q4_K",
            Self::Q5_K => "Q5_K",
            Self::Q6_K => "Q6_K",
        }
    }

    /// Bytes that `elems` weights take, or `None` when they are not whole blocks or the size overflows.
    pub fn bytes_for(self, elems: usize) -> Option<usize> {
        if elems.is_multiple_of(self.block_elems()) {
            (elems / self.block_elems()).checked_mul(self.block_bytes())
        } else {
            None
        }
    }
}

impl fmt::Display for QuantFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What can be wrong with a request to encode or decode blocks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantError {
    /// The number of weights is not a whole number of blocks.
    #[error("{elems} weights are not whole {format} blocks of {block}; pad the row to a multiple of {block}")]
    PartialBlock {
        /// The format asked for.
        format: QuantFormat,
        /// Weights given.
        elems: usize,
        /// Weights per block.
        block: usize,
    },
    /// The byte slice does not hold exactly the blocks that the float slice asks for.
    #[error("{elems} weights in {format} take {expected} bytes, but {actual} were given")]
    ByteLength {
        /// The format asked for.
        format: QuantFormat,
        /// Weights asked for.
        elems: usize,
        /// Bytes they take.
        expected: usize,
        /// Bytes given.
        actual: usize,
    },
    /// There is no encoder for this format.
    #[error("no encoder for {0}; encoders exist for Q8_0, Q4_0, Q4_1, Q5_0, Q5_1")]
    NoEncoder(QuantFormat),
}

/// Checks that `bytes` is exactly the blocks of `elems` weights.
fn check_lengths(format: QuantFormat, elems: usize, bytes: usize) -> Result<(), QuantError> {
    let expected = format.bytes_for(elems).ok_or(QuantError::PartialBlock {
        format,
        elems,
        block: format.block_elems(),
    })?;
    if bytes == expected {
        Ok(())
    } else {
        Err(QuantError::ByteLength { format, elems, expected, actual: bytes })
    }
}

/// Decodes whole blocks to float32, as ggml defines the format.
///
/// `bytes` are consecutive blocks (no alignment needed), `out` receives `block_elems` weights a block.
/// The result equals ggml's float32 arithmetic for every finite scale: each product `d * q` has at most
/// 24 significant bits and is exact, so only the final addition rounds, as it does there.
///
/// # Errors
/// [`QuantError`] when `out` is not whole blocks or `bytes` is of another length.
pub fn dequantize(format: QuantFormat, bytes: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
    check_lengths(format, out.len(), bytes.len())?;
    format.visit(Dequantize { bytes, out });
    Ok(())
}

/// The arguments of one [`dequantize`] call, monomorphised per format.
struct Dequantize<'a> {
    bytes: &'a [u8],
    out: &'a mut [f32],
}

impl FormatVisitor for Dequantize<'_> {
    type Output = ();

    fn visit<F: BlockFormat>(self) {
        let (mut q, mut d, mut m) = ([0u8; MAX_BLOCK_ELEMS], [0f32; MAX_SUB_BLOCKS], [0f32; MAX_SUB_BLOCKS]);
        let blocks = self.bytes.chunks_exact(F::BLOCK_BYTES).zip(self.out.chunks_exact_mut(F::BLOCK_ELEMS));
        for (block, out) in blocks {
            F::unpack(block, &mut q, &mut d, &mut m);
            let subs = out.chunks_exact_mut(F::SUB_BLOCK).zip(q.chunks_exact(F::SUB_BLOCK));
            for ((out, q), (&d, &m)) in subs.zip(d.iter().zip(&m)) {
                for (w, &q) in out.iter_mut().zip(q) {
                    let q = if F::SIGNED { f32::from(q.cast_signed()) } else { f32::from(q) };
                    *w = d * q + m;
                }
            }
        }
    }
}
