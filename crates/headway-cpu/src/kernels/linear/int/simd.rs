//! The vectors of the integer kernels: eight lanes, one a weight row, for each instruction set. All
//! give the same bits. Not for float32 weights: see the parent's `simd`.

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
    /// Of eight rows of 32 bytes, `stride` apart, the products with the 32 bytes of `x`, summed over the
    /// first 16 and over the last 16. `signed`: the rows' bytes are signed.
    unsafe fn rows_dot(q: *const u8, stride: usize, x: *const i8, signed: bool) -> (Self::I, Self::I);
    /// The same for eight vectors of `[row][4 elements]` (256 bytes) and C rows of 32 bytes. At most
    /// `pairs` vectors of products in pairs are added in 16 bits.
    unsafe fn panel_dot<const C: usize>(
        q: *const u8,
        x: [*const i8; C],
        signed: bool,
        pairs: usize,
    ) -> [(Self::I, Self::I); C];
    /// Eight rows of 32 bytes, `stride` apart, as eight vectors of `[row][4 elements]`.
    unsafe fn interleave(q: *const u8, stride: usize, out: *mut u8);
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
    unsafe fn rows_dot(q: *const u8, stride: usize, x: *const i8, signed: bool) -> ([i32; 8], [i32; 8]) {
        // SAFETY: the caller's: 32 bytes.
        let x = unsafe { x.cast::<[i8; 32]>().read_unaligned() };
        let (mut low, mut high) = ([0; 8], [0; 8]);
        for r in 0..8 {
            // SAFETY: the caller's: 32 bytes of each row.
            let q = unsafe { q.add(r * stride).cast::<[u8; 32]>().read_unaligned() };
            low[r] = (0..16).map(|i| product(q[i], x[i], signed)).sum();
            high[r] = (16..32).map(|i| product(q[i], x[i], signed)).sum();
        }
        (low, high)
    }

    #[inline(always)]
    unsafe fn panel_dot<const C: usize>(
        q: *const u8,
        x: [*const i8; C],
        signed: bool,
        _: usize,
    ) -> [([i32; 8], [i32; 8]); C] {
        // SAFETY: the caller's: 256 bytes.
        let q = unsafe { q.cast::<[[[u8; 4]; 8]; 8]>().read_unaligned() };
        x.map(|x| {
            // SAFETY: the caller's: 32 bytes.
            let x = unsafe { x.cast::<[[i8; 4]; 8]>().read_unaligned() };
            let mut sums = [[0i32; 8]; 2];
            for (j, (q, x)) in q.iter().zip(&x).enumerate() {
                for (sum, q) in sums[j / 4].iter_mut().zip(q) {
                    *sum += (0..4).map(|i| product(q[i], x[i], signed)).sum::<i32>();
                }
            }
            (sums[0], sums[1])
        })
    }

    #[inline(always)]
    unsafe fn interleave(q: *const u8, stride: usize, out: *mut u8) {
        for r in 0..8 {
            // SAFETY: the caller's: 32 bytes of each row, 256 bytes of output.
            unsafe {
                let row = q.add(r * stride).cast::<[[u8; 4]; 8]>().read_unaligned();
                for (j, four) in row.into_iter().enumerate() {
                    out.add(j * 32 + r * 4).cast::<[u8; 4]>().write_unaligned(four);
                }
            }
        }
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
            unsafe fn rows_dot(
                q: *const u8,
                stride: usize,
                x: *const i8,
                signed: bool,
            ) -> (__m256i, __m256i) {
                // SAFETY: the caller's: 32 bytes of each row and of x.
                unsafe {
                    let x = _mm256_loadu_si256(x.cast());
                    let t: [__m256i; 8] = std::array::from_fn(|r| {
                        let q = _mm256_loadu_si256(q.add(r * stride).cast());
                        let (q, x) = if signed { magnitude(q, x) } else { (q, x) };
                        Self::fours(q, x)
                    });
                    let a = _mm256_hadd_epi32(_mm256_hadd_epi32(t[0], t[1]), _mm256_hadd_epi32(t[2], t[3]));
                    let b = _mm256_hadd_epi32(_mm256_hadd_epi32(t[4], t[5]), _mm256_hadd_epi32(t[6], t[7]));
                    (_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b))
                }
            }

            #[inline(always)]
            unsafe fn interleave(q: *const u8, stride: usize, out: *mut u8) {
                // SAFETY: the caller's: 32 bytes of each row, 256 bytes of output.
                unsafe {
                    let rows = std::array::from_fn(|r| _mm256_loadu_si256(q.add(r * stride).cast()));
                    for (j, v) in transpose(rows).into_iter().enumerate() {
                        _mm256_storeu_si256(out.add(j * 32).cast(), v);
                    }
                }
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

    /// Eight rows of eight int32, transposed.
    ///
    /// # Safety
    /// The processor has AVX2.
    #[inline(always)]
    unsafe fn transpose(r: [__m256i; 8]) -> [__m256i; 8] {
        // SAFETY: the caller's.
        unsafe {
            let pair = |a, b| (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
            let quad = |a, b| (_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
            let ((a0, a1), (b0, b1)) = (pair(r[0], r[1]), pair(r[2], r[3]));
            let ((c0, c1), (d0, d1)) = (pair(r[4], r[5]), pair(r[6], r[7]));
            let ((e0, e1), (e2, e3)) = (quad(a0, b0), quad(a1, b1));
            let ((f0, f1), (f2, f3)) = (quad(c0, d0), quad(c1, d1));
            [
                _mm256_permute2x128_si256::<0x20>(e0, f0),
                _mm256_permute2x128_si256::<0x20>(e1, f1),
                _mm256_permute2x128_si256::<0x20>(e2, f2),
                _mm256_permute2x128_si256::<0x20>(e3, f3),
                _mm256_permute2x128_si256::<0x31>(e0, f0),
                _mm256_permute2x128_si256::<0x31>(e1, f1),
                _mm256_permute2x128_si256::<0x31>(e2, f2),
                _mm256_permute2x128_si256::<0x31>(e3, f3),
            ]
        }
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

    impl Avx2 {
        /// Products of bytes, summed in fours. Pairs are summed in 16 bits, which hold them for every
        /// format (2 · 127 · 128 at most).
        ///
        /// # Safety
        /// The processor has AVX2.
        #[inline(always)]
        unsafe fn fours(q: __m256i, x: __m256i) -> __m256i {
            // SAFETY: the caller's.
            unsafe { _mm256_madd_epi16(_mm256_maddubs_epi16(q, x), _mm256_set1_epi16(1)) }
        }

        /// Four vectors of weights with C activation rows.
        ///
        /// # Safety
        /// As [`IntSimd::panel_dot`]'s, for 128 and 16 bytes.
        #[inline(always)]
        unsafe fn half<const C: usize>(
            q: *const u8,
            x: [*const i8; C],
            signed: bool,
            pairs: usize,
        ) -> [__m256i; C] {
            // SAFETY: the caller's.
            unsafe {
                let mut total = [_mm256_setzero_si256(); C];
                for first in (0..4).step_by(pairs.min(4)) {
                    let mut part = [_mm256_setzero_si256(); C];
                    for j in first..(first + pairs).min(4) {
                        let w = _mm256_loadu_si256(q.add(j * 32).cast());
                        for c in 0..C {
                            let xv = broadcast(x[c].add(j * 4));
                            let (w, xv) = if signed { magnitude(w, xv) } else { (w, xv) };
                            part[c] = _mm256_add_epi16(part[c], _mm256_maddubs_epi16(w, xv));
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

    impl IntSimd for Avx2 {
        const COLS: usize = 4;
        shared!();

        #[inline(always)]
        unsafe fn panel_dot<const C: usize>(
            q: *const u8,
            x: [*const i8; C],
            signed: bool,
            pairs: usize,
        ) -> [(__m256i, __m256i); C] {
            // SAFETY: the caller's: 256 bytes of weights and 32 of each activation row.
            unsafe {
                let low = Self::half(q, x, signed, pairs);
                let high = Self::half(q.add(128), x.map(|x| x.add(16)), signed, pairs);
                std::array::from_fn(|c| (low[c], high[c]))
            }
        }
    }

    /// AVX-512 VL with VNNI.
    pub(in super::super::super) struct Vnni;

    impl Vnni {
        /// Products of bytes, summed in fours.
        ///
        /// # Safety
        /// The processor has AVX-512 VL and VNNI.
        #[inline(always)]
        unsafe fn fours(q: __m256i, x: __m256i) -> __m256i {
            // SAFETY: the caller's.
            unsafe { _mm256_dpbusd_epi32(_mm256_setzero_si256(), q, x) }
        }

        /// Four vectors of weights with C activation rows.
        ///
        /// # Safety
        /// As [`IntSimd::panel_dot`]'s, for 128 and 16 bytes.
        #[inline(always)]
        unsafe fn half<const C: usize>(q: *const u8, x: [*const i8; C], signed: bool) -> [__m256i; C] {
            // SAFETY: the caller's.
            unsafe {
                let mut total = [_mm256_setzero_si256(); C];
                for j in 0..4 {
                    let w = _mm256_loadu_si256(q.add(j * 32).cast());
                    for c in 0..C {
                        let xv = broadcast(x[c].add(j * 4));
                        let (w, xv) = if signed { magnitude(w, xv) } else { (w, xv) };
                        total[c] = _mm256_dpbusd_epi32(total[c], w, xv);
                    }
                }
                total
            }
        }
    }

    impl IntSimd for Vnni {
        const COLS: usize = 4;
        shared!();

        #[inline(always)]
        unsafe fn panel_dot<const C: usize>(
            q: *const u8,
            x: [*const i8; C],
            signed: bool,
            _: usize,
        ) -> [(__m256i, __m256i); C] {
            // SAFETY: the caller's: 256 bytes of weights and 32 of each activation row.
            unsafe {
                let low = Self::half(q, x, signed);
                let high = Self::half(q.add(128), x.map(|x| x.add(16)), signed);
                std::array::from_fn(|c| (low[c], high[c]))
            }
        }
    }
}
