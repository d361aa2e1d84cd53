//! Eight lanes in a 256-bit register: AVX2 with FMA and F16C.

use super::{Lanes, Turn, lane_ops};
use std::arch::x86_64::*;

/// Eight float32.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx2(__m256);

/// Eight e4m3 codes in 16-bit lanes as binary16, 2^8 too small; NaN codes become NaN.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn e4m3_as_f16(x: __m128i) -> __m128i {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let sign = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8);
        let magnitude = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x7f)), 7);
        let nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f << 7));
        let nan = _mm_and_si128(nan, _mm_set1_epi16(0x7e00));
        _mm_or_si128(_mm_or_si128(sign, magnitude), nan)
    }
}

/// Eight float32 rounded to bfloat16, in the upper halves of 32-bit lanes moved down.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn bf16_bits(x: __m256) -> __m256i {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let bits = _mm256_castps_si256(x);
        let odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
        _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16)
    }
}

/// Lane 0 of the fold of the upper half onto the lower one, three times.
macro_rules! fold {
    ($v:expr, $op128:ident) => {{
        let v = $v;
        let q = $op128(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        let d = $op128(q, _mm_movehl_ps(q, q));
        _mm_cvtss_f32($op128(d, _mm_movehdup_ps(d)))
    }};
}

impl Lanes for Avx2 {
    const N: usize = 8;
    type Narrow = Self;

    lane_ops! {
        fn splat(x: f32) -> Self { Self(_mm256_set1_ps(x)) }
        fn iota() -> Self { Self(_mm256_setr_ps(0., 1., 2., 3., 4., 5., 6., 7.)) }
        fn load(p: *const u8) -> Self { Self(_mm256_loadu_ps(p.cast())) }
        fn load_f16(p: *const u8) -> Self { Self(_mm256_cvtph_ps(_mm_loadu_si128(p.cast()))) }
        fn load_bf16(p: *const u8) -> Self {
            let x = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            Self(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)))
        }
        fn load_bf16_pairs(p: *const u8) -> [Self; 2] {
            let x = _mm256_loadu_si256(p.cast());
            let (first, second) = (_mm256_slli_epi32(x, 16), _mm256_and_si256(x, _mm256_set1_epi32(!0xffff)));
            [Self(_mm256_castsi256_ps(first)), Self(_mm256_castsi256_ps(second))]
        }
        fn load_e4m3(p: *const u8) -> Self {
            let h = e4m3_as_f16(_mm_cvtepu8_epi16(_mm_loadl_epi64(p.cast())));
            Self(_mm256_mul_ps(_mm256_cvtph_ps(h), _mm256_set1_ps(256.0)))
        }
        fn load_e5m2(p: *const u8) -> Self {
            let h = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64(p.cast())), 8);
            Self(_mm256_cvtph_ps(h))
        }
        fn store(self, p: *mut u8) { _mm256_storeu_ps(p.cast(), self.0) }
        fn store_f16(self, p: *mut u8) {
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph(self.0, _MM_FROUND_TO_NEAREST_INT))
        }
        fn store_bf16(self, p: *mut u8) {
            let x = bf16_bits(self.0);
            let packed = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
            _mm_storeu_si128(p.cast(), packed)
        }
        fn add(a: Self, b: Self) -> Self { Self(_mm256_add_ps(a.0, b.0)) }
        fn sub(a: Self, b: Self) -> Self { Self(_mm256_sub_ps(a.0, b.0)) }
        fn mul(a: Self, b: Self) -> Self { Self(_mm256_mul_ps(a.0, b.0)) }
        fn div(a: Self, b: Self) -> Self { Self(_mm256_div_ps(a.0, b.0)) }
        fn fma(a: Self, b: Self, c: Self) -> Self { Self(_mm256_fmadd_ps(a.0, b.0, c.0)) }
        fn max(a: Self, b: Self) -> Self { Self(_mm256_max_ps(a.0, b.0)) }
        fn select_lt(a: Self, b: Self, x: Self, y: Self) -> Self {
            Self(_mm256_blendv_ps(y.0, x.0, _mm256_cmp_ps(a.0, b.0, _CMP_LT_OQ)))
        }
        fn round(a: Self) -> Self {
            Self(_mm256_round_ps(a.0, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))
        }
        fn pow2(a: Self) -> Self {
            let n = _mm256_add_epi32(_mm256_cvtps_epi32(a.0), _mm256_set1_epi32(127));
            Self(_mm256_castsi256_ps(_mm256_slli_epi32(n, 23)))
        }
        fn sum(self) -> f32 { fold!(self.0, _mm_add_ps) }
        fn largest(self) -> f32 { fold!(self.0, _mm_max_ps) }
        fn first(self) -> f32 { _mm256_cvtss_f32(self.0) }
    }
}

impl Turn for Avx2 {
    /// Pairs, then fours, then halves of registers change places.
    #[inline(always)]
    unsafe fn turn(x: [Self; 8]) -> [Self; 8] {
        // SAFETY: the caller has the instruction set.
        unsafe {
            let mut pairs = [_mm256_setzero_ps(); 8];
            for i in 0..4 {
                pairs[2 * i] = _mm256_unpacklo_ps(x[2 * i].0, x[2 * i + 1].0);
                pairs[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i].0, x[2 * i + 1].0);
            }
            let mut fours = pairs;
            for i in [0, 4] {
                fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
                fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
                fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
                fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
            }
            let mut r = x;
            for i in 0..4 {
                r[i] = Self(_mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
                r[i + 4] = Self(_mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
            }
            r
        }
    }
}
