//! Eight lanes in an array: plain Rust on every target, which the compiler vectorises as it can. The
//! reference for the other levels. No fused multiply-add: without the instruction it is a call.

use super::{Lanes, Turn, lane_ops};
use half::{bf16, f16};
use headway_tensor::{
    fp8::{e4m3_to_f32, e5m2_to_f32},
    quant::half_bits::f16_to_f32,
};

/// Eight float32.
#[derive(Clone, Copy)]
pub(in super::super) struct Portable([f32; 8]);

#[inline(always)]
fn zip(a: Portable, b: Portable, f: impl Fn(f32, f32) -> f32) -> Portable {
    let mut r = a;
    for i in 0..8 {
        r.0[i] = f(a.0[i], b.0[i]);
    }
    r
}

#[inline(always)]
fn map<T: Copy>(a: [T; 8], f: impl Fn(T) -> f32) -> Portable {
    let mut r = [0.0; 8];
    for i in 0..8 {
        r[i] = f(a[i]);
    }
    Portable(r)
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

#[inline(always)]
fn fold(a: [f32; 8], f: impl Fn(f32, f32) -> f32) -> f32 {
    let q = [f(a[0], a[4]), f(a[1], a[5]), f(a[2], a[6]), f(a[3], a[7])];
    f(f(q[0], q[2]), f(q[1], q[3]))
}

#[inline(always)]
fn select(a: Portable, b: Portable, x: Portable, y: Portable) -> Portable {
    let mut r = y;
    for i in 0..8 {
        r.0[i] = if a.0[i] < b.0[i] { x.0[i] } else { y.0[i] };
    }
    r
}

/// Adding and taking away 1.5 · 2^23 leaves the nearest integer.
const ROUND: f32 = 12_582_912.0;

impl Lanes for Portable {
    const N: usize = 8;
    type Narrow = Self;

    lane_ops! {
        fn load(p: *const u8) -> Self { Self(p.cast::<[f32; 8]>().read_unaligned()) }
        fn load_f16(p: *const u8) -> Self { map(p.cast::<[u16; 8]>().read_unaligned(), f16_to_f32) }
        fn load_bf16(p: *const u8) -> Self {
            map(p.cast::<[u16; 8]>().read_unaligned(), |x| f32::from_bits(u32::from(x) << 16))
        }
        fn load_bf16_pairs(p: *const u8) -> [Self; 2] {
            let x = p.cast::<[[u16; 2]; 8]>().read_unaligned();
            [0, 1].map(|i| map(x, |pair| f32::from_bits(u32::from(pair[i]) << 16)))
        }
        fn load_e4m3(p: *const u8) -> Self { map(p.cast::<[u8; 8]>().read(), e4m3_to_f32) }
        fn load_e5m2(p: *const u8) -> Self { map(p.cast::<[u8; 8]>().read(), e5m2_to_f32) }
        fn store(self, p: *mut u8) { p.cast::<[f32; 8]>().write_unaligned(self.0) }
        fn store_f16(self, p: *mut u8) { p.cast::<[f16; 8]>().write_unaligned(self.0.map(f16::from_f32)) }
        fn store_bf16(self, p: *mut u8) { p.cast::<[bf16; 8]>().write_unaligned(self.0.map(bf16::from_f32)) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; 8])
    }
    #[inline(always)]
    unsafe fn iota() -> Self {
        Self([0., 1., 2., 3., 4., 5., 6., 7.])
    }
    #[inline(always)]
    unsafe fn add(a: Self, b: Self) -> Self {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self, b: Self) -> Self {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self, b: Self) -> Self {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: Self, b: Self) -> Self {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn fma(a: Self, b: Self, c: Self) -> Self {
        zip(zip(a, b, |a, b| a * b), c, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn max(a: Self, b: Self) -> Self {
        zip(a, b, larger)
    }
    #[inline(always)]
    unsafe fn select_lt(a: Self, b: Self, x: Self, y: Self) -> Self {
        select(a, b, x, y)
    }
    #[inline(always)]
    unsafe fn round(a: Self) -> Self {
        map(a.0, |x| (x + ROUND) - ROUND)
    }
    #[inline(always)]
    unsafe fn pow2(a: Self) -> Self {
        // The low bits of a + 1.5 · 2^23 are the integer; the shift drops all others.
        map(a.0, |x| f32::from_bits((x + (ROUND + 127.0)).to_bits() << 23))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        fold(self.0, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        fold(self.0, larger)
    }
    #[inline(always)]
    unsafe fn first(self) -> f32 {
        self.0[0]
    }
}

impl Turn for Portable {
    #[inline(always)]
    unsafe fn turn(x: [Self; 8]) -> [Self; 8] {
        std::array::from_fn(|i| Self(std::array::from_fn(|j| x[j].0[i])))
    }
}
