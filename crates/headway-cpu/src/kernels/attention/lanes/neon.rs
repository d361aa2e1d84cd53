//! Eight lanes in two 128-bit registers: AArch64 Advanced SIMD, with its fused multiply-add.

use super::{Lanes, Turn, lane_ops};
use half::f16;
use std::arch::aarch64::*;

/// Eight float32: lanes 0 to 3, and 4 to 7.
#[derive(Clone, Copy)]
pub(in super::super) struct Neon(float32x4_t, float32x4_t);

/// Four binary16 in 32-bit lanes as float32: exponent and mantissa moved into place and the bias mended by a
/// product, which is exact for subnormal numbers too; infinities and NaN keep their exponent of ones.
///
/// # Safety
/// Advanced SIMD.
#[inline(always)]
unsafe fn widen_f16(x: uint32x4_t) -> float32x4_t {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let sign = vshlq_n_u32::<16>(vandq_u32(x, vdupq_n_u32(0x8000)));
        let magnitude = vshlq_n_u32::<13>(vandq_u32(x, vdupq_n_u32(0x7fff)));
        // 2^112
        let scaled = vmulq_f32(vreinterpretq_f32_u32(magnitude), vdupq_n_f32(f32::from_bits(0x7780_0000)));
        let special = vcgeq_u32(magnitude, vdupq_n_u32(0x0f80_0000));
        let special = vandq_u32(special, vdupq_n_u32(0x7f80_0000));
        vreinterpretq_f32_u32(vorrq_u32(vorrq_u32(vreinterpretq_u32_f32(scaled), special), sign))
    }
}

/// Eight binary16 as float32.
///
/// # Safety
/// Advanced SIMD.
#[inline(always)]
unsafe fn widen_f16s(x: uint16x8_t) -> Neon {
    // SAFETY: the caller has the instruction set.
    unsafe { Neon(widen_f16(vmovl_u16(vget_low_u16(x))), widen_f16(vmovl_high_u16(x))) }
}

/// Four float32 rounded to bfloat16, in the lower halves of 32-bit lanes.
///
/// # Safety
/// Advanced SIMD.
#[inline(always)]
unsafe fn bf16_bits(x: float32x4_t) -> uint32x4_t {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let bits = vreinterpretq_u32_f32(x);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x40_0000));
        // A NaN is not equal to itself.
        vshrq_n_u32::<16>(vbslq_u32(vceqq_f32(x, x), rounded, quiet))
    }
}

/// a > b ? a : b.
///
/// # Safety
/// Advanced SIMD.
#[inline(always)]
unsafe fn larger(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: the caller has the instruction set.
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

/// Lane 0 of the fold of the upper half onto the lower one, three times.
macro_rules! fold {
    ($v:expr, $op:expr) => {{
        let v = $v;
        let q = $op(v.0, v.1);
        let d = $op(q, vextq_f32::<2>(q, q));
        vgetq_lane_f32::<0>($op(d, vextq_f32::<1>(d, d)))
    }};
}

impl Lanes for Neon {
    const N: usize = 8;
    type Narrow = Self;

    lane_ops! {
        fn splat(x: f32) -> Self { Self(vdupq_n_f32(x), vdupq_n_f32(x)) }
        fn iota() -> Self { Self::load([0f32, 1., 2., 3., 4., 5., 6., 7.].as_ptr().cast()) }
        fn load(p: *const u8) -> Self {
            // Bytes, because the address need not be a float32's.
            let (low, high) = (vld1q_u8(p), vld1q_u8(p.add(16)));
            Self(vreinterpretq_f32_u8(low), vreinterpretq_f32_u8(high))
        }
        fn load_f16(p: *const u8) -> Self { widen_f16s(vreinterpretq_u16_u8(vld1q_u8(p))) }
        fn load_bf16(p: *const u8) -> Self {
            let x = vreinterpretq_u16_u8(vld1q_u8(p));
            let (low, high) = (vshll_n_u16::<16>(vget_low_u16(x)), vshll_high_n_u16::<16>(x));
            Self(vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(high))
        }
        fn load_bf16_pairs(p: *const u8) -> [Self; 2] {
            let (a, b) = (vreinterpretq_u32_u8(vld1q_u8(p)), vreinterpretq_u32_u8(vld1q_u8(p.add(16))));
            let upper = vdupq_n_u32(!0xffff);
            let first = [a, b].map(|x| vreinterpretq_f32_u32(vshlq_n_u32::<16>(x)));
            let second = [a, b].map(|x| vreinterpretq_f32_u32(vandq_u32(x, upper)));
            [Self(first[0], first[1]), Self(second[0], second[1])]
        }
        fn load_e4m3(p: *const u8) -> Self {
            // As binary16, 2^8 too small; NaN codes become NaN.
            let x = vmovl_u8(vld1_u8(p));
            let sign = vshlq_n_u16::<8>(vandq_u16(x, vdupq_n_u16(0x80)));
            let magnitude = vshlq_n_u16::<7>(vandq_u16(x, vdupq_n_u16(0x7f)));
            let nan = vceqq_u16(magnitude, vdupq_n_u16(0x7f << 7));
            let nan = vandq_u16(nan, vdupq_n_u16(0x7e00));
            let x = widen_f16s(vorrq_u16(vorrq_u16(sign, magnitude), nan));
            Self(vmulq_n_f32(x.0, 256.0), vmulq_n_f32(x.1, 256.0))
        }
        fn load_e5m2(p: *const u8) -> Self { widen_f16s(vshlq_n_u16::<8>(vmovl_u8(vld1_u8(p)))) }
        fn store(self, p: *mut u8) {
            vst1q_u8(p, vreinterpretq_u8_f32(self.0));
            vst1q_u8(p.add(16), vreinterpretq_u8_f32(self.1));
        }
        fn store_f16(self, p: *mut u8) {
            let mut x = [0f32; 8];
            self.store(x.as_mut_ptr().cast());
            p.cast::<[f16; 8]>().write_unaligned(x.map(f16::from_f32));
        }
        fn store_bf16(self, p: *mut u8) {
            let x = vcombine_u16(vmovn_u32(bf16_bits(self.0)), vmovn_u32(bf16_bits(self.1)));
            vst1q_u8(p, vreinterpretq_u8_u16(x));
        }
        fn add(a: Self, b: Self) -> Self { Self(vaddq_f32(a.0, b.0), vaddq_f32(a.1, b.1)) }
        fn sub(a: Self, b: Self) -> Self { Self(vsubq_f32(a.0, b.0), vsubq_f32(a.1, b.1)) }
        fn mul(a: Self, b: Self) -> Self { Self(vmulq_f32(a.0, b.0), vmulq_f32(a.1, b.1)) }
        fn div(a: Self, b: Self) -> Self { Self(vdivq_f32(a.0, b.0), vdivq_f32(a.1, b.1)) }
        fn fma(a: Self, b: Self, c: Self) -> Self {
            Self(vfmaq_f32(c.0, a.0, b.0), vfmaq_f32(c.1, a.1, b.1))
        }
        fn max(a: Self, b: Self) -> Self { Self(larger(a.0, b.0), larger(a.1, b.1)) }
        fn select_lt(a: Self, b: Self, x: Self, y: Self) -> Self {
            Self(vbslq_f32(vcltq_f32(a.0, b.0), x.0, y.0), vbslq_f32(vcltq_f32(a.1, b.1), x.1, y.1))
        }
        fn round(a: Self) -> Self { Self(vrndnq_f32(a.0), vrndnq_f32(a.1)) }
        fn pow2(a: Self) -> Self {
            let of = |a| vshlq_n_s32::<23>(vaddq_s32(vcvtnq_s32_f32(a), vdupq_n_s32(127)));
            Self(vreinterpretq_f32_s32(of(a.0)), vreinterpretq_f32_s32(of(a.1)))
        }
        fn sum(self) -> f32 { fold!(self, |a, b| vaddq_f32(a, b)) }
        fn largest(self) -> f32 { fold!(self, |a, b| larger(a, b)) }
        fn first(self) -> f32 { vgetq_lane_f32::<0>(self.0) }
    }
}

/// Four rows of four as four columns: pairs change places, then pairs of pairs.
///
/// # Safety
/// Advanced SIMD.
#[inline(always)]
unsafe fn turn_four(x: [float32x4_t; 4]) -> [float32x4_t; 4] {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let wide = |a, b| (vreinterpretq_f64_f32(vtrn1q_f32(a, b)), vreinterpretq_f64_f32(vtrn2q_f32(a, b)));
        let ((even, odd), (even2, odd2)) = (wide(x[0], x[1]), wide(x[2], x[3]));
        let narrow = |x| vreinterpretq_f32_f64(x);
        [
            narrow(vtrn1q_f64(even, even2)),
            narrow(vtrn1q_f64(odd, odd2)),
            narrow(vtrn2q_f64(even, even2)),
            narrow(vtrn2q_f64(odd, odd2)),
        ]
    }
}

impl Turn for Neon {
    #[inline(always)]
    unsafe fn turn(x: [Self; 8]) -> [Self; 8] {
        // SAFETY: the caller has the instruction set.
        unsafe {
            let a = turn_four([x[0].0, x[1].0, x[2].0, x[3].0]);
            let b = turn_four([x[4].0, x[5].0, x[6].0, x[7].0]);
            let c = turn_four([x[0].1, x[1].1, x[2].1, x[3].1]);
            let d = turn_four([x[4].1, x[5].1, x[6].1, x[7].1]);
            std::array::from_fn(|i| match i {
                0..4 => Self(a[i], b[i]),
                _ => Self(c[i - 4], d[i - 4]),
            })
        }
    }
}
