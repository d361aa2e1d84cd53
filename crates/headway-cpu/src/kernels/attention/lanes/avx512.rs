//! Sixteen lanes in a 512-bit register: AVX-512 F, BW, DQ and VL.

use super::{Avx2, Lanes, lane_ops};
use std::arch::x86_64::*;

/// Sixteen float32.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512(__m512);

/// Sixteen e4m3 codes in 16-bit lanes as binary16, 2^8 too small; NaN codes become NaN.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn e4m3_as_f16(x: __m256i) -> __m256i {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
        let magnitude = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7);
        let nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f << 7));
        let nan = _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00));
        _mm256_or_si256(_mm256_or_si256(sign, magnitude), nan)
    }
}

/// Sixteen float32 rounded to bfloat16, in 32-bit lanes.
///
/// # Safety
/// AVX-512 F.
#[inline(always)]
unsafe fn bf16_bits(x: __m512) -> __m512i {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let bits = _mm512_castps_si512(x);
        let odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
        _mm512_srli_epi32(_mm512_mask_blend_epi32(nan, rounded, quiet), 16)
    }
}

impl Lanes for Avx512 {
    const N: usize = 16;
    type Narrow = Avx2;

    lane_ops! {
        fn splat(x: f32) -> Self { Self(_mm512_set1_ps(x)) }
        fn iota() -> Self {
            Self(_mm512_setr_ps(0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.))
        }
        fn load(p: *const u8) -> Self { Self(_mm512_loadu_ps(p.cast())) }
        fn load_f16(p: *const u8) -> Self { Self(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))) }
        fn load_bf16(p: *const u8) -> Self {
            let x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)))
        }
        fn load_bf16_pairs(p: *const u8) -> [Self; 2] {
            let x = _mm512_loadu_si512(p.cast());
            let (first, second) = (_mm512_slli_epi32(x, 16), _mm512_and_si512(x, _mm512_set1_epi32(!0xffff)));
            [Self(_mm512_castsi512_ps(first)), Self(_mm512_castsi512_ps(second))]
        }
        fn load_e4m3(p: *const u8) -> Self {
            let h = e4m3_as_f16(_mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast())));
            Self(_mm512_mul_ps(_mm512_cvtph_ps(h), _mm512_set1_ps(256.0)))
        }
        fn load_e5m2(p: *const u8) -> Self {
            let h = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast())), 8);
            Self(_mm512_cvtph_ps(h))
        }
        fn store(self, p: *mut u8) { _mm512_storeu_ps(p.cast(), self.0) }
        fn store_f16(self, p: *mut u8) {
            _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph(self.0, _MM_FROUND_TO_NEAREST_INT))
        }
        fn store_bf16(self, p: *mut u8) {
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(bf16_bits(self.0)))
        }
        fn add(a: Self, b: Self) -> Self { Self(_mm512_add_ps(a.0, b.0)) }
        fn sub(a: Self, b: Self) -> Self { Self(_mm512_sub_ps(a.0, b.0)) }
        fn mul(a: Self, b: Self) -> Self { Self(_mm512_mul_ps(a.0, b.0)) }
        fn div(a: Self, b: Self) -> Self { Self(_mm512_div_ps(a.0, b.0)) }
        fn fma(a: Self, b: Self, c: Self) -> Self { Self(_mm512_fmadd_ps(a.0, b.0, c.0)) }
        fn max(a: Self, b: Self) -> Self { Self(_mm512_max_ps(a.0, b.0)) }
        fn select_lt(a: Self, b: Self, x: Self, y: Self) -> Self {
            Self(_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.0, b.0, _CMP_LT_OQ), y.0, x.0))
        }
        fn round(a: Self) -> Self { Self(_mm512_roundscale_ps(a.0, _MM_FROUND_TO_NEAREST_INT)) }
        fn pow2(a: Self) -> Self {
            let n = _mm512_add_epi32(_mm512_cvtps_epi32(a.0), _mm512_set1_epi32(127));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32(n, 23)))
        }
        fn sum(self) -> f32 { _mm512_reduce_add_ps(self.0) }
        fn largest(self) -> f32 { _mm512_reduce_max_ps(self.0) }
        fn first(self) -> f32 { _mm512_cvtss_f32(self.0) }
    }
}
