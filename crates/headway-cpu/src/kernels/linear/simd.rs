//! The vectors of the dense kernels: float32 lanes with a multiply-add and a sum in a fixed order,
//! for each instruction set. Values, without a lifetime. Not for integers: see `int`.

/// Float32 lanes. All functions are to be inlined into code that is compiled for the instruction set.
///
/// # Safety
/// Every function may execute instructions of the type's instruction set, which the processor must
/// have, and pointers must be good for reading what the function says, at any alignment.
pub(super) trait Simd: Copy {
    /// Number of lanes; at most 16.
    const LANES: usize;
    /// Activation rows of a register tile (of four weight rows).
    const COLS: usize;
    /// Zero in all lanes.
    unsafe fn zero() -> Self;
    /// `LANES` float32.
    unsafe fn load_f32(p: *const u8) -> Self;
    /// `LANES` binary16.
    unsafe fn load_f16(p: *const u8) -> Self;
    /// `LANES` bfloat16.
    unsafe fn load_bf16(p: *const u8) -> Self;
    /// Writes `LANES` float32.
    unsafe fn store(self, p: *mut f32);
    /// `self · b + c`.
    unsafe fn mul_add(self, b: Self, c: Self) -> Self;
    /// The sums over the lanes of four vectors: neighbours first, the halves of a register last.
    unsafe fn sum4(v: [Self; 4]) -> [f32; 4];
    /// The sum over the lanes, in the order of [`Simd::sum4`].
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the caller's.
        unsafe { Self::sum4([self, Self::zero(), Self::zero(), Self::zero()])[0] }
    }
}

/// Eight lanes in plain Rust: the reference, and what other processors get.
#[derive(Clone, Copy)]
pub(super) struct Plain([f32; 8]);

impl Simd for Plain {
    const LANES: usize = 8;
    const COLS: usize = 2;

    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0.0; 8])
    }

    #[inline(always)]
    unsafe fn load_f32(p: *const u8) -> Self {
        // SAFETY: the caller's; the read is unaligned.
        Self(unsafe { p.cast::<[f32; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        // SAFETY: the caller's; the read is unaligned.
        let bits = unsafe { p.cast::<[u16; 8]>().read_unaligned() };
        Self(bits.map(|b| headway_tensor::quant::half_bits::f16_to_f32(u16::from_le(b))))
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: the caller's; the read is unaligned.
        let bits = unsafe { p.cast::<[u16; 8]>().read_unaligned() };
        Self(bits.map(|b| f32::from_bits(u32::from(u16::from_le(b)) << 16)))
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller's; the write is unaligned.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        Self(std::array::from_fn(|i| c.0[i] + self.0[i] * b.0[i]))
    }

    #[inline(always)]
    unsafe fn sum4(v: [Self; 4]) -> [f32; 4] {
        v.map(|Self(l)| ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7])))
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! x86-64: 8 lanes with AVX2, FMA and F16C; 16 with AVX-512.

    use super::Simd;
    use std::arch::x86_64::*;

    /// Eight lanes, AVX2 + FMA + F16C.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2(__m256);

    impl Simd for Avx2 {
        const LANES: usize = 8;
        const COLS: usize = 3;

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the caller's: the processor has AVX2.
            Self(unsafe { _mm256_setzero_ps() })
        }

        #[inline(always)]
        unsafe fn load_f32(p: *const u8) -> Self {
            // SAFETY: the caller's: 32 readable bytes.
            Self(unsafe { _mm256_loadu_ps(p.cast()) })
        }

        #[inline(always)]
        unsafe fn load_f16(p: *const u8) -> Self {
            // SAFETY: the caller's: 16 readable bytes.
            Self(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) })
        }

        #[inline(always)]
        unsafe fn load_bf16(p: *const u8) -> Self {
            // SAFETY: the caller's: 16 readable bytes.
            let wide = unsafe { _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())) };
            // SAFETY: the caller's: the processor has AVX2.
            Self(unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide)) })
        }

        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: the caller's: 32 writable bytes.
            unsafe { _mm256_storeu_ps(p, self.0) }
        }

        #[inline(always)]
        unsafe fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: the caller's: the processor has FMA.
            Self(unsafe { _mm256_fmadd_ps(self.0, b.0, c.0) })
        }

        #[inline(always)]
        unsafe fn sum4(v: [Self; 4]) -> [f32; 4] {
            // SAFETY: the caller's: the processor has AVX2; the array is 16 bytes.
            unsafe {
                let ab = _mm256_hadd_ps(v[0].0, v[1].0);
                let cd = _mm256_hadd_ps(v[2].0, v[3].0);
                let abcd = _mm256_hadd_ps(ab, cd);
                let sum = _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps::<1>(abcd));
                let mut out = [0f32; 4];
                _mm_storeu_ps(out.as_mut_ptr(), sum);
                out
            }
        }
    }

    /// Sixteen lanes, AVX-512 F and DQ.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx512(__m512);

    impl Simd for Avx512 {
        const LANES: usize = 16;
        const COLS: usize = 6;

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: the caller's: the processor has AVX-512.
            Self(unsafe { _mm512_setzero_ps() })
        }

        #[inline(always)]
        unsafe fn load_f32(p: *const u8) -> Self {
            // SAFETY: the caller's: 64 readable bytes.
            Self(unsafe { _mm512_loadu_ps(p.cast()) })
        }

        #[inline(always)]
        unsafe fn load_f16(p: *const u8) -> Self {
            // SAFETY: the caller's: 32 readable bytes.
            Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) })
        }

        #[inline(always)]
        unsafe fn load_bf16(p: *const u8) -> Self {
            // SAFETY: the caller's: 32 readable bytes.
            let wide = unsafe { _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())) };
            // SAFETY: the caller's: the processor has AVX-512.
            Self(unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)) })
        }

        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: the caller's: 64 writable bytes.
            unsafe { _mm512_storeu_ps(p, self.0) }
        }

        #[inline(always)]
        unsafe fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: the caller's: the processor has AVX-512.
            Self(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
        }

        #[inline(always)]
        unsafe fn sum4(v: [Self; 4]) -> [f32; 4] {
            let halves = v.map(|v| {
                // SAFETY: the caller's: the processor has AVX-512 F and DQ.
                let (low, high) = unsafe { (_mm512_castps512_ps256(v.0), _mm512_extractf32x8_ps::<1>(v.0)) };
                // SAFETY: as above.
                Avx2(unsafe { _mm256_add_ps(low, high) })
            });
            // SAFETY: the caller's: a processor with AVX-512 has AVX2.
            unsafe { Avx2::sum4(halves) }
        }
    }
}
