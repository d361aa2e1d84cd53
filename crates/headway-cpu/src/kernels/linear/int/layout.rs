//! The packed form of each format: eight weight rows beside one another, block after block, without
//! loss and within a few per cent of the file's size.
//!
//! A *unit* is what a block of the format becomes, for eight rows: a header (the half-precision numbers
//! of 256 elements, eight rows side by side; the formats of 32 have none), then for every 32 elements
//! their scales, eight rows side by side, and their [`Integers`].
//! The scales of 32 elements are, for eight rows each:
//!
//! | formats | scales |
//! |---|---|
//! | of 32 | the half-precision numbers of the block |
//! | Q4_K, Q5_K | a byte of scale; a byte of minimum |
//! | Q3_K, Q6_K | a signed byte of scale for each 16 elements |
//! | Q2_K | a byte for each 16 elements: scale in the low nibble, minimum in the high one |
//!
//! Not for where packed weights live: see `packed`.

use super::{
    IntSimd, Kind, Like, ROWS, Scales,
    integers::{Bits, Integers},
};
use headway_tensor::quant::{
    BlockFormat, MAX_BLOCK_ELEMS, MAX_SUB_BLOCKS, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0,
};

/// The packed form of a format.
pub(in super::super) trait Layout: BlockFormat {
    /// What the kernels are told.
    type Kind: Kind;
    /// The integers.
    type Integers: Integers;
    /// Where a file's block has its half-precision numbers: the scale, then the minimum if there is one.
    const HALVES: &'static [usize];

    /// Bytes of a unit's header.
    const HEADER: usize = if Self::BLOCK_ELEMS == 32 { 0 } else { 2 * ROWS * Self::HALVES.len() };
    /// Bytes of the scales of 32 elements.
    const SCALES: usize = if Self::BLOCK_ELEMS == 32 { 2 * ROWS * Self::HALVES.len() } else { 2 * ROWS };
    /// Bytes of 32 elements, their scales included.
    const STEP: usize = Self::SCALES + 32 * Self::Integers::VECTORS;
    /// Steps of a unit.
    const STEPS: usize = Self::BLOCK_ELEMS / 32;
    /// Bytes of a unit.
    const UNIT: usize = Self::HEADER + Self::STEPS * Self::STEP;
}

macro_rules! layouts {
    ($($format:ident: $sub:literal, $signed:literal, $bits:literal, $pairs:literal, $halves:expr;)*) => {$(
        impl Layout for $format {
            type Kind = Like<$sub, $signed, $pairs>;
            type Integers = Bits<$bits>;
            const HALVES: &'static [usize] = $halves;
        }
    )*};
}

// The numbers repeat what the format says of itself; a test compares them.
layouts! {
    Q4_0: 32, false, 4, 8, &[0];
    Q4_1: 32, false, 4, 8, &[0, 2];
    Q5_0: 32, false, 5, 4, &[0];
    Q5_1: 32, false, 5, 4, &[0, 2];
    Q8_0: 32, true, 8, 1, &[0];
    Q2K: 16, false, 2, 8, &[80, 82];
    Q3K: 16, false, 3, 8, &[108];
    Q4K: 32, false, 4, 8, &[0, 2];
    Q5K: 32, false, 5, 4, &[0, 2];
    Q6K: 16, false, 6, 2, &[208];
}

/// Half-precision 1.0.
const ONE: [u8; 2] = 0x3c00_u16.to_le_bytes();

/// Packs up to eight rows of blocks, each `row_bytes` long, into units. Rows that are not there leave
/// `out` as it is: zeros.
#[inline(always)]
pub(super) fn pack<L: Layout>(rows: &[u8], row_bytes: usize, out: &mut [u8]) {
    for (u, unit) in out.chunks_exact_mut(L::UNIT).enumerate() {
        for (r, row) in rows.chunks_exact(row_bytes).take(ROWS).enumerate() {
            pack_block::<L>(&row[u * L::BLOCK_BYTES..][..L::BLOCK_BYTES], r, unit);
        }
    }
}

/// Packs one row's block as row `r` of a unit.
#[inline(always)]
fn pack_block<L: Layout>(block: &[u8], r: usize, unit: &mut [u8]) {
    let mut q = [0u8; MAX_BLOCK_ELEMS];
    let (mut d, mut m) = ([0f32; MAX_SUB_BLOCKS], [0f32; MAX_SUB_BLOCKS]);
    let mut copy = [0u8; MAX_BLOCK_ELEMS];
    let copy = &mut copy[..L::BLOCK_BYTES];
    copy.copy_from_slice(block);
    for (i, &at) in L::HALVES.iter().enumerate() {
        unit[2 * (i * ROWS + r)..][..2].copy_from_slice(&block[at..at + 2]);
        // With ones in their place, scales and minima come out as the integers that they are.
        copy[at..at + 2].copy_from_slice(&ONE);
    }
    L::unpack(copy, &mut q, &mut d, &mut m);
    let steps = unit[L::HEADER..].chunks_exact_mut(L::STEP);
    for (b, (step, q)) in steps.zip(q.as_chunks::<32>().0).enumerate() {
        match (L::BLOCK_ELEMS, L::SUB_BLOCK, L::HALVES.len()) {
            (32, ..) => {}
            (_, 32, _) => (step[r], step[ROWS + r]) = (d[b] as u8, -m[b] as u8),
            (.., halves) => {
                for half in 0..2 {
                    let (d, m) = (d[2 * b + half], m[2 * b + half]);
                    step[half * ROWS + r] =
                        if halves == 2 { d as u8 | (-m as u8) << 4 } else { (d as i8).cast_unsigned() };
                }
            }
        }
        let words: [u32; 8] =
            std::array::from_fn(|j| u32::from_le_bytes([q[4 * j], q[4 * j + 1], q[4 * j + 2], q[4 * j + 3]]));
        let mut packed = [0u32; 8];
        L::Integers::pack(words, &mut packed[..L::Integers::VECTORS]);
        for (vector, word) in step[L::SCALES..].chunks_exact_mut(32).zip(packed) {
            vector[4 * r..4 * r + 4].copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// A unit's header: scale and negated minimum of 256 elements, a lane a row. Zeros where there is none.
///
/// # Safety
/// The processor has the instruction set of `S`; `unit` is readable for a header.
#[inline(always)]
pub(super) unsafe fn header<S: IntSimd, L: Layout>(unit: *const u8) -> [S::F; 2] {
    // SAFETY: the caller's.
    unsafe {
        if L::BLOCK_ELEMS == 32 {
            return [S::splat(0.0); 2];
        }
        let d = S::load_halves(unit);
        let m = if L::HALVES.len() == 2 { S::load_halves(unit.add(2 * ROWS)) } else { d };
        [d, S::mul(m, S::splat(-1.0))]
    }
}

/// The scales and minima of a step of 32 elements. The same numbers as [`BlockFormat::unpack`]'s.
///
/// # Safety
/// The processor has the instruction set of `S`; `step` is readable for its scales.
#[inline(always)]
pub(super) unsafe fn scales<S: IntSimd, L: Layout>([d, m]: [S::F; 2], step: *const u8) -> Scales<S> {
    // SAFETY: the caller's.
    unsafe {
        let zero = || S::splat(-f32::from(L::FORMAT.zero_point().unwrap_or(0)));
        match (L::BLOCK_ELEMS, L::SUB_BLOCK, L::HALVES.len()) {
            (32, _, 1) => {
                let d = S::load_halves(step);
                Scales::same(d, S::mul(d, zero()))
            }
            (32, ..) => Scales::same(S::load_halves(step), S::load_halves(step.add(2 * ROWS))),
            (_, 32, _) => {
                let (scale, min) = (S::load_unsigned(step), S::load_unsigned(step.add(ROWS)));
                Scales::same(S::mul(d, scale), S::mul(m, min))
            }
            (_, _, 2) => {
                let both = [S::load_nibbles(step), S::load_nibbles(step.add(ROWS))];
                Scales { d: both.map(|(scale, _)| S::mul(d, scale)), m: both.map(|(_, min)| S::mul(m, min)) }
            }
            _ => {
                let d = [S::load_signed(step), S::load_signed(step.add(ROWS))].map(|s| S::mul(d, s));
                Scales { d, m: d.map(|d| S::mul(d, zero())) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::linear::int::{Plain, pairs_before_overflow};

    fn check<L: Layout>() {
        let f = L::FORMAT;
        assert_eq!((L::Kind::SUB_BLOCK, L::Kind::SIGNED), (f.sub_block(), f.signed()), "{f}");
        assert_eq!(L::Kind::PAIRS, pairs_before_overflow(f.max_q()), "{f}");
        assert_eq!(f.signed(), !f.has_min(), "{f}");
        // Bytes of every pattern, with scales that are numbers.
        let mut bits = 1u32;
        let mut rows = vec![0u8; 7 * L::BLOCK_BYTES];
        for byte in &mut rows {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = (bits >> 24) as u8;
        }
        for block in rows.chunks_exact_mut(L::BLOCK_BYTES) {
            L::HALVES.iter().for_each(|at| block[at + 1] &= 0x3f);
        }
        let mut unit = vec![0u8; L::UNIT];
        pack::<L>(&rows, L::BLOCK_BYTES, &mut unit);
        for (r, block) in rows.chunks_exact(L::BLOCK_BYTES).enumerate() {
            let (mut q, mut d, mut m) = ([0u8; 256], [0f32; 16], [0f32; 16]);
            L::unpack(block, &mut q, &mut d, &mut m);
            for b in 0..L::STEPS {
                // SAFETY: plain Rust; a unit holds its header and steps.
                let (s, low, high) = unsafe {
                    let head = header::<Plain, L>(unit.as_ptr());
                    let step = unit.as_ptr().add(L::HEADER + b * L::STEP);
                    let q = step.add(L::SCALES);
                    (
                        scales::<Plain, L>(head, step),
                        L::Integers::low::<Plain>(q),
                        L::Integers::high::<Plain>(q),
                    )
                };
                for half in 0..2 {
                    let sub = (32 * b + 16 * half) / L::SUB_BLOCK;
                    assert_eq!(s.d[half][r].to_bits(), d[sub].to_bits(), "{f} {b} {r}");
                    if !L::SIGNED {
                        assert_eq!(s.m[half][r].to_bits(), m[sub].to_bits(), "{f} {b} {r}");
                    }
                }
                let words = [low, high].concat();
                let back: Vec<u8> = words.iter().flat_map(|v| v[r].to_le_bytes()).collect();
                assert_eq!(back, q[32 * b..32 * b + 32], "{f} {b} {r}");
            }
        }
    }

    #[test]
    fn every_format_comes_back_as_it_was() {
        check::<Q4_0>();
        check::<Q4_1>();
        check::<Q5_0>();
        check::<Q5_1>();
        check::<Q8_0>();
        check::<Q2K>();
        check::<Q3K>();
        check::<Q4K>();
        check::<Q5K>();
        check::<Q6K>();
    }
}
