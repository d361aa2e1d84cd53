//! The vectors of the integer kernels: eight lanes, one a weight row, for each instruction set. All
//! give the same bits. Not for float32 weights: see the parent's `simd`.

use headway_tensor::quant::half_bits::f16_to_f32;

/// Eight lanes of int32 and of float32. All functions are to be inlined into code that is compiled for
/// the instruction set.
///
/// # Safety
/// Every function may execute instructions of the type's instruction set, which the processor must
/// have, and pointers must be good for what the function says, at any alignment.
pub(in super::super) trait IntSimd {
    /// Eight int32.
    type I: Copy;
    /// Eight float32.
    type F: Copy;
    /// 32 bytes, four of them a lane.
    type B: Copy;
    /// Activation rows of a register tile, at most 4.
    const COLS: usize;
    /// Exact below 2^24.
    unsafe fn to_float(a: Self::I) -> Self::F;
    /// One value in all lanes.
    unsafe fn splat(v: f32) -> Self::F;
    /// Reads eight float32.
    unsafe fn load(p: *const f32) -> Self::F;
    /// Writes eight float32.
    unsafe fn store(v: Self::F, p: *mut f32);
    /// Lane-wise product, rounded.
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// Lane-wise sum, rounded.
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    /// Reads eight binary16.
    unsafe fn load_halves(p: *const u8) -> Self::F;
    /// Reads eight unsigned bytes.
    unsafe fn load_unsigned(p: *const u8) -> Self::F;
    /// Reads eight signed bytes.
    unsafe fn load_signed(p: *const u8) -> Self::F;
    /// Reads eight bytes: their low and their high nibbles.
    unsafe fn load_nibbles(p: *const u8) -> (Self::F, Self::F);
    /// Reads 32 bytes.
    unsafe fn load_bytes(p: *const u8) -> Self::B;
    /// Writes 32 bytes.
    unsafe fn store_bytes(v: Self::B, p: *mut u8);
    /// The bits of `mask` in each byte, after a shift right by `SHIFT` (left where it is negative), by
    /// which no bit of `mask` may come from a neighbouring byte.
    unsafe fn field<const SHIFT: i32>(v: Self::B, mask: u8) -> Self::B;
    /// All bits of both.
    unsafe fn or(a: Self::B, b: Self::B) -> Self::B;
    /// Four vectors of `[row][4 elements]` times C rows of 16 bytes, summed. At most `pairs` vectors of
    /// products in pairs are added in 16 bits. `signed`: the vectors' bytes are signed.
    unsafe fn dot<const C: usize>(
        q: [Self::B; 4],
        x: [*const i8; C],
        signed: bool,
        pairs: usize,
    ) -> [Self::I; C];
}

/// Plain Rust: the reference, and what other processors get.
pub(in super::super) struct Plain;

#[inline(always)]
fn product(q: u8, x: i8, signed: bool) -> i32 {
    let q = if signed { i32::from(q.cast_signed()) } else { i32::from(q) };
    q * i32::from(x)
}

impl IntSimd for Plain {
    type I = [i32; 8];
    type F = [f32; 8];
    type B = [u32; 8];
    const COLS: usize = 4;

    #[inline(always)]
    unsafe fn to_float(a: [i32; 8]) -> [f32; 8] {
        a.map(|a| a as f32)
    }

    #[inline(always)]
    unsafe fn splat(v: f32) -> [f32; 8] {
        [v; 8]
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> [f32; 8] {
        // SAFETY: the caller's.
        unsafe { p.cast::<[f32; 8]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(v: [f32; 8], p: *mut f32) {
        // SAFETY: the caller's.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(v) }
    }

    #[inline(always)]
    unsafe fn mul(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn add(a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    unsafe fn load_halves(p: *const u8) -> [f32; 8] {
        // SAFETY: the caller's.
        let bits = unsafe { p.cast::<[u16; 8]>().read_unaligned() };
        bits.map(|b| f16_to_f32(u16::from_le(b)))
    }

    #[inline(always)]
    unsafe fn load_unsigned(p: *const u8) -> [f32; 8] {
        // SAFETY: the caller's.
        unsafe { p.cast::<[u8; 8]>().read() }.map(f32::from)
    }

    #[inline(always)]
    unsafe fn load_signed(p: *const u8) -> [f32; 8] {
        // SAFETY: the caller's.
        unsafe { p.cast::<[i8; 8]>().read() }.map(f32::from)
    }

    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> ([f32; 8], [f32; 8]) {
        // SAFETY: the caller's.
        let bytes = unsafe { p.cast::<[u8; 8]>().read() };
        (bytes.map(|b| f32::from(b & 15)), bytes.map(|b| f32::from(b >> 4)))
    }

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> [u32; 8] {
        // SAFETY: the caller's.
        unsafe { p.cast::<[u32; 8]>().read_unaligned() }.map(u32::from_le)
    }

    #[inline(always)]
    unsafe fn store_bytes(v: [u32; 8], p: *mut u8) {
        // SAFETY: the caller's.
        unsafe { p.cast::<[u32; 8]>().write_unaligned(v.map(u32::to_le)) }
    }

    #[inline(always)]
    unsafe fn field<const SHIFT: i32>(v: [u32; 8], mask: u8) -> [u32; 8] {
        let mask = u32::from_ne_bytes([mask; 4]);
        v.map(|v| (if SHIFT < 0 { v << -SHIFT } else { v >> SHIFT }) & mask)
    }

    #[inline(always)]
    unsafe fn or(a: [u32; 8], b: [u32; 8]) -> [u32; 8] {
        std::array::from_fn(|i| a[i] | b[i])
    }

    #[inline(always)]
    unsafe fn dot<const C: usize>(
        q: [[u32; 8]; 4],
        x: [*const i8; C],
        signed: bool,
        _: usize,
    ) -> [[i32; 8]; C] {
        let q = q.map(|q| q.map(u32::to_le_bytes));
        x.map(|x| {
            // SAFETY: the caller's: 16 bytes.
            let x = unsafe { x.cast::<[[i8; 4]; 4]>().read() };
            let mut sums = [0i32; 8];
            for (q, x) in q.iter().zip(&x) {
                for (sum, q) in sums.iter_mut().zip(q) {
                    *sum += (0..4).map(|i| product(q[i], x[i], signed)).sum::<i32>();
                }
            }
            sums
        })
    }
}

#[cfg(target_arch = "x86_64")]
pub(in super::super) use x86::{Avx2, Vnni};

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! x86-64: AVX2, and AVX-512 VNNI in 256-bit registers.

    use super::IntSimd;
    use std::arch::x86_64::*;

    /// The operations that both levels share.
    macro_rules! shared {
        () => {
            type I = __m256i;
            type F = __m256;
            type B = __m256i;

            #[inline(always)]
            unsafe fn to_float(a: __m256i) -> __m256 {
                // SAFETY: the caller's: the processor has AVX2.
                unsafe { _mm256_cvtepi32_ps(a) }
            }

            #[inline(always)]
            unsafe fn splat(v: f32) -> __m256 {
                // SAFETY: the caller's: the processor has AVX2.
                unsafe { _mm256_set1_ps(v) }
            }

            #[inline(always)]
            unsafe fn load(p: *const f32) -> __m256 {
                // SAFETY: the caller's: 32 readable bytes.
                unsafe { _mm256_loadu_ps(p) }
            }

            #[inline(always)]
            unsafe fn store(v: __m256, p: *mut f32) {
                // SAFETY: the caller's: 32 writable bytes.
                unsafe { _mm256_storeu_ps(p, v) }
            }

            #[inline(always)]
            unsafe fn mul(a: __m256, b: __m256) -> __m256 {
                // SAFETY: the caller's: the processor has AVX2.
                unsafe { _mm256_mul_ps(a, b) }
            }

            #[inline(always)]
            unsafe fn add(a: __m256, b: __m256) -> __m256 {
                // SAFETY: the caller's: the processor has AVX2.
                unsafe { _mm256_add_ps(a, b) }
            }

            #[inline(always)]
            unsafe fn load_halves(p: *const u8) -> __m256 {
                // SAFETY: the caller's: 16 readable bytes; the processor has F16C.
                unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
            }

            #[inline(always)]
            unsafe fn load_unsigned(p: *const u8) -> __m256 {
                // SAFETY: the caller's: 8 readable bytes.
                unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()))) }
            }

            #[inline(always)]
            unsafe fn load_signed(p: *const u8) -> __m256 {
                // SAFETY: the caller's: 8 readable bytes.
                unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()))) }
            }

            #[inline(always)]
            unsafe fn load_nibbles(p: *const u8) -> (__m256, __m256) {
                // SAFETY: the caller's: 8 readable bytes.
                unsafe {
                    let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
                    let low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
                    (_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(bytes)))
                }
            }

            #[inline(always)]
            unsafe fn load_bytes(p: *const u8) -> __m256i {
                // SAFETY: the caller's: 32 readable bytes.
                unsafe { _mm256_loadu_si256(p.cast()) }
            }

            #[inline(always)]
            unsafe fn store_bytes(v: __m256i, p: *mut u8) {
                // SAFETY: the caller's: 32 writable bytes.
                unsafe { _mm256_storeu_si256(p.cast(), v) }
            }

            #[inline(always)]
            unsafe fn field<const SHIFT: i32>(v: __m256i, mask: u8) -> __m256i {
                // SAFETY: the caller's: the processor has AVX2. The count is a constant.
                unsafe {
                    let v = match SHIFT {
                        0 => v,
                        1.. => _mm256_srl_epi16(v, _mm_cvtsi32_si128(SHIFT)),
                        _ => _mm256_sll_epi16(v, _mm_cvtsi32_si128(-SHIFT)),
                    };
                    _mm256_and_si256(v, _mm256_set1_epi8(mask.cast_signed()))
                }
            }

            #[inline(always)]
            unsafe fn or(a: __m256i, b: __m256i) -> __m256i {
                // SAFETY: the caller's: the processor has AVX2.
                unsafe { _mm256_or_si256(a, b) }
            }
        };
    }

    /// |q| and x with the sign of q: the same products, with an unsigned first factor.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[inline(always)]
    unsafe fn magnitude(q: __m256i, x: __m256i) -> (__m256i, __m256i) {
        // SAFETY: the caller's.
        unsafe { (_mm256_abs_epi8(q), _mm256_sign_epi8(x, q)) }
    }

    /// Four bytes in all lanes.
    ///
    /// # Safety
    /// Four readable bytes; the processor has AVX2.
    #[inline(always)]
    unsafe fn broadcast(x: *const i8) -> __m256i {
        // SAFETY: the caller's.
        unsafe { _mm256_set1_epi32(x.cast::<i32>().read_unaligned()) }
    }

    /// AVX2.
    pub(in super::super::super) struct Avx2;

    impl IntSimd for Avx2 {
        const COLS: usize = 4;
        shared!();

        #[inline(always)]
        unsafe fn dot<const C: usize>(
            q: [__m256i; 4],
            x: [*const i8; C],
            signed: bool,
            pairs: usize,
        ) -> [__m256i; C] {
            // SAFETY: the caller's: 16 bytes of each activation row.
            unsafe {
                let mut total = [_mm256_setzero_si256(); C];
                for first in (0..4).step_by(pairs.min(4)) {
                    let mut part = [_mm256_setzero_si256(); C];
                    for j in first..(first + pairs).min(4) {
                        for c in 0..C {
                            let x = broadcast(x[c].add(j * 4));
                            let (q, x) = if signed { magnitude(q[j], x) } else { (q[j], x) };
                            part[c] = _mm256_add_epi16(part[c], _mm256_maddubs_epi16(q, x));
                        }
                    }
                    for c in 0..C {
                        let wide = _mm256_madd_epi16(part[c], _mm256_set1_epi16(1));
                        total[c] = _mm256_add_epi32(total[c], wide);
                    }
                }
                total
            }
        }
    }

    /// AVX-512 VL with VNNI.
    pub(in super::super::super) struct Vnni;

    impl IntSimd for Vnni {
        const COLS: usize = 4;
        shared!();

        #[inline(always)]
        unsafe fn dot<const C: usize>(
            q: [__m256i; 4],
            x: [*const i8; C],
            signed: bool,
            _: usize,
        ) -> [__m256i; C] {
            // SAFETY: the caller's: 16 bytes of each activation row.
            unsafe {
                let mut total = [_mm256_setzero_si256(); C];
                for (j, q) in q.into_iter().enumerate() {
                    for c in 0..C {
                        let x = broadcast(x[c].add(j * 4));
                        let (q, x) = if signed { magnitude(q, x) } else { (q, x) };
                        total[c] = _mm256_dpbusd_epi32(total[c], q, x);
                    }
                }
                total
            }
        }
    }
}
