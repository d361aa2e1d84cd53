//! How the integers of 32 elements of eight weight rows lie in vectors of 32 bytes, by their width.
//!
//! Unpacked they are eight vectors, number j of which holds elements `4 j .. 4 j + 4` of each row, rows
//! side by side. Packed, what belongs together lies in the same byte, so that a shift and a mask give a
//! whole vector. A row has four bytes, a word, of each vector.
//!
//! Not for scales: see `layout`.

use super::IntSimd;

/// Integers of one width.
pub(in super::super) trait Integers {
    /// Vectors that hold the integers of 32 elements.
    const VECTORS: usize;

    /// One row's words of the packed vectors, from its words of the eight unpacked ones. `out` has
    /// `VECTORS` elements.
    fn pack(v: [u32; 8], out: &mut [u32]);

    /// Unpacked vectors 0 to 3: the first 16 elements.
    ///
    /// # Safety
    /// The processor has the instruction set of `S`; `p` is readable for `VECTORS` vectors.
    unsafe fn low<S: IntSimd>(p: *const u8) -> [S::B; 4];

    /// Unpacked vectors 4 to 7: the last 16 elements.
    ///
    /// # Safety
    /// As [`Integers::low`]'s.
    unsafe fn high<S: IntSimd>(p: *const u8) -> [S::B; 4];
}

/// Integers of N bits.
pub(in super::super) struct Bits<const N: usize>;

/// Vector j and vector j + 4 in one byte.
#[inline(always)]
fn pack_nibbles(v: [u32; 8], out: &mut [u32]) {
    for j in 0..4 {
        out[j] = (v[j] & 0x0f0f_0f0f) | ((v[j + 4] & 0x0f0f_0f0f) << 4);
    }
}

/// Two bits, from `bit` on, of four vectors in one byte.
#[inline(always)]
fn pack_pairs(v: &[u32], bit: u32) -> u32 {
    (0..4).fold(0, |all, j| all | (((v[j] >> bit) & 0x0303_0303) << (2 * j)))
}

/// One bit of eight vectors in one byte.
#[inline(always)]
fn pack_bits(v: [u32; 8], bit: u32) -> u32 {
    (0..8).fold(0, |all, j| all | (((v[j] >> bit) & 0x0101_0101) << j))
}

/// # Safety
/// As [`Integers::low`]'s, for vector `j`.
#[inline(always)]
unsafe fn vector<S: IntSimd>(p: *const u8, j: usize) -> S::B {
    // SAFETY: the caller's.
    unsafe { S::load_bytes(p.add(32 * j)) }
}

/// # Safety
/// As [`Integers::low`]'s, for four vectors.
#[inline(always)]
unsafe fn nibbles<S: IntSimd, const SHIFT: i32>(p: *const u8) -> [S::B; 4] {
    // SAFETY: the caller's.
    std::array::from_fn(|j| unsafe { S::field::<SHIFT>(vector::<S>(p, j), 0x0f) })
}

/// The four vectors whose bits lie in pairs in `v`, moved to the lowest two bits.
///
/// # Safety
/// The processor has the instruction set of `S`.
#[inline(always)]
unsafe fn pairs<S: IntSimd>(v: S::B) -> [S::B; 4] {
    // SAFETY: the caller's.
    unsafe { [S::field::<0>(v, 3), S::field::<2>(v, 3), S::field::<4>(v, 3), S::field::<6>(v, 3)] }
}

/// # Safety
/// The processor has the instruction set of `S`.
#[inline(always)]
unsafe fn or<S: IntSimd>(a: [S::B; 4], b: [S::B; 4]) -> [S::B; 4] {
    // SAFETY: the caller's.
    std::array::from_fn(|j| unsafe { S::or(a[j], b[j]) })
}

impl Integers for Bits<2> {
    const VECTORS: usize = 2;

    #[inline(always)]
    fn pack(v: [u32; 8], out: &mut [u32]) {
        out[0] = pack_pairs(&v[..4], 0);
        out[1] = pack_pairs(&v[4..], 0);
    }

    #[inline(always)]
    unsafe fn low<S: IntSimd>(p: *const u8) -> [S::B; 4] {
        // SAFETY: the caller's.
        unsafe { pairs::<S>(vector::<S>(p, 0)) }
    }

    #[inline(always)]
    unsafe fn high<S: IntSimd>(p: *const u8) -> [S::B; 4] {
        // SAFETY: the caller's.
        unsafe { pairs::<S>(vector::<S>(p, 1)) }
    }
}

impl Integers for Bits<3> {
    const VECTORS: usize = 3;

    #[inline(always)]
    fn pack(v: [u32; 8], out: &mut [u32]) {
        Bits::<2>::pack(v, out);
        out[2] = pack_bits(v, 2);
    }

    #[inline(always)]
    unsafe fn low<S: IntSimd>(p: *const u8) -> [S::B; 4] {
        // SAFETY: the caller's.
        unsafe {
            let h = vector::<S>(p, 2);
            let h = [S::field::<-2>(h, 4), S::field::<-1>(h, 4), S::field::<0>(h, 4), S::field::<1>(h, 4)];
            or::<S>(Bits::<2>::low::<S>(p), h)
        }
    }

    #[inline(always)]
    unsafe fn high<S: IntSimd>(p: *const u8) -> [S::B; 4] {
        // SAFETY: the caller's.
        unsafe {
            let h = vector::<S>(p, 2);
            let h = [S::field::<2>(h, 4), S::field::<3>(h, 4), S::field::<4>(h, 4), S::field::<5>(h, 4)];
            or::<S>(Bits::<2>::high::<S>(p), h)
        }
    }
}

impl Integers for Bits<4> {
    const VECTORS: usize = 4;

    #[inline(always)]
    fn pack(v: [u32; 8], out: &mut [u32]) {
        pack_nibbles(v, out);
    }

    #[inline(always)]
    unsafe fn low<S: IntSimd>(p: *const u8) -> [S::B; 4] {
        // SAFETY: the caller's.
        unsafe { nibbles::<S, 0>(p) }
    }

    #[inline(always)]
    unsafe fn high<S: IntSimd>(p: *const u8) -> [S::B; 4] {
        // SAFETY: the caller's.
        unsafe { nibbles::<S, 4>(p) }
    }
}

impl Integers for Bits<5> {
    const VECTORS: usize = 5;

    #[inline(always)]
    fn pack(v: [u32; 8], out: &mut [u32]) {
        pack_nibbles(v, out);
        out[4] = pack_bits(v, 4);
    }

    #[inline(always)]
    unsafe fn low<S: IntSimd>(p: *const u8) -> [S::B; 4] {
        // SAFETY: the caller's.
        unsafe {
            let h = vector::<S>(p, 4);
            let h =
                [S::field::<-4>(h, 16), S::field::<-3>(h, 16), S::field::<-2>(h, 16), S::field::<-1>(h, 16)];
            or::<S>(nibbles::<S, 0>(p), h)
        }
    }

    #[inline(always)]
    unsafe fn high<S: IntSimd>(p: *const u8) -> [S::B; 4] {
        // SAFETY: the caller's.
        unsafe {
            let h = vector::<S>(p, 4);
            let h = [S::field::<0>(h, 16), S::field::<1>(h, 16), S::field::<2>(h, 16), S::field::<3>(h, 16)];
            or::<S>(nibbles::<S, 4>(p), h)
        }
    }
}

impl Integers for Bits<6> {
    const VECTORS: usize = 6;

    #[inline(always)]
    fn pack(v: [u32; 8], out: &mut [u32]) {
        pack_nibbles(v, out);
        out[4] = pack_pairs(&v[..4], 4);
        out[5] = pack_pairs(&v[4..], 4);
    }

    #[inline(always)]
    unsafe fn low<S: IntSimd>(p: *const u8) -> [S::B; 4] {
        // SAFETY: the caller's.
        unsafe { or::<S>(nibbles::<S, 0>(p), raised::<S>(vector::<S>(p, 4))) }
    }

    #[inline(always)]
    unsafe fn high<S: IntSimd>(p: *const u8) -> [S::B; 4] {
        // SAFETY: the caller's.
        unsafe { or::<S>(nibbles::<S, 4>(p), raised::<S>(vector::<S>(p, 5))) }
    }
}

/// As [`pairs`], moved to bits 4 and 5.
///
/// # Safety
/// The processor has the instruction set of `S`.
#[inline(always)]
unsafe fn raised<S: IntSimd>(v: S::B) -> [S::B; 4] {
    // SAFETY: the caller's.
    unsafe { [S::field::<-4>(v, 48), S::field::<-2>(v, 48), S::field::<0>(v, 48), S::field::<2>(v, 48)] }
}

impl Integers for Bits<8> {
    const VECTORS: usize = 8;

    #[inline(always)]
    fn pack(v: [u32; 8], out: &mut [u32]) {
        out.copy_from_slice(&v);
    }

    #[inline(always)]
    unsafe fn low<S: IntSimd>(p: *const u8) -> [S::B; 4] {
        // SAFETY: the caller's.
        std::array::from_fn(|j| unsafe { vector::<S>(p, j) })
    }

    #[inline(always)]
    unsafe fn high<S: IntSimd>(p: *const u8) -> [S::B; 4] {
        // SAFETY: the caller's.
        std::array::from_fn(|j| unsafe { vector::<S>(p, 4 + j) })
    }
}
