//! The uniform form of a block: `weight[i] = d[i / SUB_BLOCK] * q[i] + m[i / SUB_BLOCK]`.
//!
//! This is what integer kernels consume: a dot product with activations `x` becomes, per sub-block,
//! `d * sum(q * x) + m * sum(x)`. The functions are branch-free and `#[inline(always)]`, so that a
//! `#[target_feature]` function that calls one gets it vectorised for its own instruction set.
//!
//! Not for whole tensors (see [`dequantize`](super::dequantize)).

use super::{Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, QuantFormat};

/// One block format as a type, so that a kernel is compiled once per format.
///
/// ```
/// use headway_tensor::quant::{BlockFormat, Q4_0};
/// // d = 1.0 (half-precision 0x3c00), all nibbles 9: every weight is 1.0 * 9 - 8.0
/// let mut block = [0x99u8; Q4_0::BLOCK_BYTES];
/// block[..2].copy_from_slice(&0x3c00u16.to_le_bytes());
/// let (mut q, mut d, mut m) = ([0u8; 32], [0f32; 1], [0f32; 1]);
/// Q4_0::unpack(&block, &mut q, &mut d, &mut m);
/// assert_eq!((q[0], d[0], m[0]), (9, 1.0, -8.0));
/// ```
pub trait BlockFormat {
    /// The format as a value.
    const FORMAT: QuantFormat;
    /// Weights in a block.
    const BLOCK_ELEMS: usize = Self::FORMAT.block_elems();
    /// Bytes in a block.
    const BLOCK_BYTES: usize = Self::FORMAT.block_bytes();
    /// Weights that share one `(d, m)`.
    const SUB_BLOCK: usize = Self::FORMAT.sub_block();
    /// Sub-blocks in a block: the entries of `d` and `m` that are written.
    const SUB_BLOCKS: usize = Self::FORMAT.sub_blocks();
    /// Whether the bytes of `q` are `i8` (two's complement) rather than `u8`.
    const SIGNED: bool = Self::FORMAT.signed();
    /// Whether `m` can be nonzero.
    const HAS_MIN: bool = Self::FORMAT.has_min();

    /// Decodes the block at the start of `block`.
    ///
    /// Writes `q[..BLOCK_ELEMS]` (in the order of the weights), `d[..SUB_BLOCKS]` and `m[..SUB_BLOCKS]`;
    /// longer buffers are left alone beyond that.
    ///
    /// # Panics
    /// When a slice is shorter than that: a fault of the caller, who has checked the tensor's size.
    fn unpack(block: &[u8], q: &mut [u8], d: &mut [f32], m: &mut [f32]);
}

/// Something to be run for a format known only at run time; see [`QuantFormat::visit`].
///
/// ```
/// use headway_tensor::quant::{BlockFormat, FormatVisitor, QuantFormat};
/// /// Bits a weight. `visit` is compiled once a format, with its sizes as constants.
/// struct Bits;
/// impl FormatVisitor for Bits {
///     type Output = f32;
///     fn visit<F: BlockFormat>(self) -> f32 {
///         (8 * F::BLOCK_BYTES) as f32 / F::BLOCK_ELEMS as f32
///     }
/// }
///
/// assert_eq!(QuantFormat::Q4_0.visit(Bits), 4.5);
/// assert_eq!(QuantFormat::Q6_K.visit(Bits), 6.5625);
/// ```
pub trait FormatVisitor {
    /// What the run returns.
    type Output;
    /// Runs for the format `F`.
    fn visit<F: BlockFormat>(self) -> Self::Output;
}

impl QuantFormat {
    /// Calls `visitor` with the type that belongs to this format: one branch, then monomorphic code.
    #[inline]
    pub fn visit<V: FormatVisitor>(self, visitor: V) -> V::Output {
        match self {
            QuantFormat::Q8_0 => visitor.visit::<Q8_0>(),
            QuantFormat::Q4_0 => visitor.visit::<Q4_0>(),
            QuantFormat::Q4_1 => visitor.visit::<Q4_1>(),
            QuantFormat::Q5_0 => visitor.visit::<Q5_0>(),
            QuantFormat::Q5_1 => visitor.visit::<Q5_1>(),
            QuantFormat::Q2_K => visitor.visit::<Q2K>(),
            QuantFormat::Q3_K => visitor.visit::<Q3K>(),
            QuantFormat::Q4_K => visitor.visit::<Q4K>(),
            QuantFormat::Q5_K => visitor.visit::<Q5K>(),
            QuantFormat::Q6_K => visitor.visit::<Q6K>(),
        }
    }
}

/// [`BlockFormat::unpack`] for a format known only at run time.
///
/// # Panics
/// As [`BlockFormat::unpack`].
pub fn unpack_block(format: QuantFormat, block: &[u8], q: &mut [u8], d: &mut [f32], m: &mut [f32]) {
    struct One<'a>(&'a [u8], &'a mut [u8], &'a mut [f32], &'a mut [f32]);
    impl FormatVisitor for One<'_> {
        type Output = ();
        fn visit<F: BlockFormat>(self) {
            F::unpack(self.0, self.1, self.2, self.3);
        }
    }
    format.visit(One(block, q, d, m));
}

/// The first `N` items as an array.
#[inline(always)]
pub(super) fn head<T, const N: usize>(items: &[T]) -> &[T; N] {
    match items.first_chunk() {
        Some(array) => array,
        None => too_short(N, items.len()),
    }
}

/// The first `N` items as a mutable array.
#[inline(always)]
pub(super) fn head_mut<T, const N: usize>(items: &mut [T]) -> &mut [T; N] {
    let len = items.len();
    match items.first_chunk_mut() {
        Some(array) => array,
        None => too_short(N, len),
    }
}

#[cold]
#[inline(never)]
fn too_short(needed: usize, len: usize) -> ! {
    panic!("a block buffer holds {len} items, {needed} are needed")
}
