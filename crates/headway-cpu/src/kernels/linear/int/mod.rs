//! Block-quantised weights times activations that are quantised to signed bytes: integer products,
//! float32 scales.
//!
//! For 16 elements with activations `dx · qx` and weights `d · q + m` (d and m shared by 16 or by 32
//! elements) an output element receives `d · dx · Σ q·qx + m · dx · Σ qx`. The integer sums
//! are exact, and the float32 operations are the same, in the same order and never fused, at every
//! instruction set: eight output elements lie in eight lanes and blocks follow one another. So every
//! level gives the same bits, whatever the number of rows, the tile, or the threads.
//!
//! A weight is [`Packed`] once, when its layer is loaded; the rest lives for one call. Not for float32 arithmetic on dequantised weights: see `dense`.

mod activations;
mod few;
mod integers;
mod layout;
mod packed;
mod panel;
mod simd;

pub(super) use activations::Activations;
pub(super) use few::few;
pub(super) use layout::Layout;
pub(super) use packed::Packed;
pub(super) use panel::{PANEL_ROWS, Panel, fill, tiles};
#[cfg(target_arch = "x86_64")]
pub(super) use simd::{Avx2, Vnni};
pub(super) use simd::{IntSimd, Plain};

/// Elements of K whose sums are made before they are added to the output.
pub(super) const K_BLOCK: usize = 1024;
/// Weight rows that are worked on together: the lanes of a vector.
const ROWS: usize = 8;

/// Scales and minima of 32 elements: of the first and of the last 16, a lane a row.
struct Scales<S: IntSimd> {
    d: [S::F; 2],
    m: [S::F; 2],
}

impl<S: IntSimd> Clone for Scales<S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: IntSimd> Copy for Scales<S> {}

impl<S: IntSimd> Scales<S> {
    /// The same for all 32 elements.
    #[inline(always)]
    fn same(d: S::F, m: S::F) -> Self {
        Self { d: [d; 2], m: [m; 2] }
    }
}

/// What of a format matters for products of its integers.
pub(super) trait Kind {
    /// Elements that share a scale: 16 or 32.
    const SUB_BLOCK: usize;
    /// Signed bytes, and then without minima; otherwise unsigned bytes with minima.
    const SIGNED: bool;
    /// Vectors of products that may be added in 16 bits ([`pairs_before_overflow`]).
    const PAIRS: usize;
}

/// The [`Kind`] with these properties.
pub(super) struct Like<const SUB_BLOCK: usize, const SIGNED: bool, const PAIRS: usize>;

impl<const SUB_BLOCK: usize, const SIGNED: bool, const PAIRS: usize> Kind for Like<SUB_BLOCK, SIGNED, PAIRS> {
    const SUB_BLOCK: usize = SUB_BLOCK;
    const SIGNED: bool = SIGNED;
    const PAIRS: usize = PAIRS;
}

/// How many products of a byte up to `max_q` with one of magnitude 127, added in neighbouring pairs,
/// fit in 16 bits: vectors of pairs that may be added before they are widened.
#[cfg(test)]
const fn pairs_before_overflow(max_q: u8) -> usize {
    let pairs = i16::MAX as usize / (2 * 127 * max_q as usize);
    if pairs > 8 { 8 } else { pairs }
}

/// What 32 elements add to eight output elements: `d · (dx · i) + m · s` of both halves. `dx` are the
/// scales of the activation's two halves, `s` their sums times the scales.
///
/// # Safety
/// The processor has the instruction set of `S`.
#[inline(always)]
unsafe fn contribution<S: IntSimd, K: Kind>(
    (low, high): (S::I, S::I),
    Scales { d, m }: Scales<S>,
    s: [f32; 2],
    dx: [f32; 2],
) -> S::F {
    // SAFETY: the caller's.
    unsafe {
        let low = S::mul(S::to_float(low), S::splat(dx[0]));
        let high = S::mul(S::to_float(high), S::splat(dx[1]));
        if K::SUB_BLOCK == 16 {
            S::add(half::<S, K>(low, d[0], m[0], s[0]), half::<S, K>(high, d[1], m[1], s[1]))
        } else {
            half::<S, K>(S::add(low, high), d[0], m[0], s[0] + s[1])
        }
    }
}

/// `d · x + m · s` of one sub-block.
///
/// # Safety
/// As [`contribution`]'s.
#[inline(always)]
unsafe fn half<S: IntSimd, K: Kind>(x: S::F, d: S::F, m: S::F, s: f32) -> S::F {
    // SAFETY: the caller's.
    unsafe {
        let product = S::mul(d, x);
        if K::SIGNED { product } else { S::add(product, S::mul(m, S::splat(s))) }
    }
}

#[cfg(test)]
mod tests {
    use super::pairs_before_overflow;

    #[test]
    fn sixteen_bits_never_overflow() {
        for (max_q, pairs) in [(3, 8), (7, 8), (15, 8), (31, 4), (63, 2), (128, 1)] {
            assert_eq!(pairs_before_overflow(max_q), pairs);
            assert!(pairs * 2 * 127 * usize::from(max_q) <= 32767);
        }
    }
}
