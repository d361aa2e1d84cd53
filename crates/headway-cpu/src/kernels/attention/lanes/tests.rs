//! Every lane type against scalar arithmetic; `math` against float64.

use super::*;
use crate::{Isa, kernels::attention::math};
use half::{bf16, f16};
use headway_tensor::fp8::{e4m3_to_f32, e5m2_to_f32};

/// Runs a generic function over the lanes of every level that this machine has.
macro_rules! on_every_level {
    ($f:ident($($a:expr),*)) => {
        for isa in Isa::available() {
            // SAFETY: the level is available, and each function is compiled for it.
            unsafe {
                match isa {
                    Isa::Portable => $f::<Portable>($($a),*),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => {
                        #[target_feature(enable = "avx2,fma,f16c")]
                        fn at() {
// SAFETY: compiled for the level.
unsafe { $f::<Avx2>($($a),*) } }
                        at()
                    }
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => {
                        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                        fn at() {
// SAFETY: compiled for the level.
unsafe { $f::<Avx512>($($a),*) } }
                        at()
                    }
                    #[cfg(target_arch = "aarch64")]
                    Isa::Neon => {
                        #[target_feature(enable = "neon")]
                        fn at() {
// SAFETY: compiled for the level.
unsafe { $f::<Neon>($($a),*) } }
                        at()
                    }
                    _ => {}
                }
            }
        }
    };
}

/// `$f` of every element of `$x`, by lanes.
macro_rules! through {
    ($l:ty, $f:path, $x:expr) => {{
        let x: &[f32] = &$x;
        let mut out = vec![0.0f32; x.len()];
        for (x, o) in x.chunks_exact(<$l>::N).zip(out.chunks_exact_mut(<$l>::N)) {
            // SAFETY: whole vectors, on a level that `on_every_level` entered.
            unsafe { $f(<$l>::load(x.as_ptr().cast())).store(o.as_mut_ptr().cast()) };
        }
        out
    }};
}

fn ulps(got: f32, want: f64) -> f64 {
    let unit = f64::from((want as f32).abs().next_up()) - f64::from((want as f32).abs());
    (f64::from(got) - want).abs() / unit
}

#[inline(always)]
unsafe fn exp_errors<L: Lanes>() {
    let x: Vec<f32> = (0..1 << 20).map(|i| -(i as f32) * (87.34 / (1 << 20) as f32)).collect();
    let y = through!(L, math::exp, x);
    let worst = x
        .iter()
        .zip(&y)
        .filter(|(x, _)| **x >= math::EXP_UNDERFLOW)
        .map(|(&x, &y)| ulps(y, f64::from(x).exp()))
        .fold(0.0, f64::max);
    assert!(worst <= 2.0, "exp is {worst} units off");
    let edge = [0.0, -0.0, -87.4, -1e30, f32::NEG_INFINITY, f32::NAN, -1e-30, -88.0];
    let edge = [edge, edge].concat();
    let y = through!(L, math::exp, edge);
    assert_eq!(y[..5], [1.0, 1.0, 0.0, 0.0, 0.0]);
    assert!(y[5].is_nan() && y[6] == 1.0 && y[7] == 0.0);
    // SAFETY: on a level that `on_every_level` entered.
    let (one, first) = unsafe { (math::exp1::<L>(-1.5), math::exp(L::splat(-1.5)).first()) };
    assert_eq!(one, first);
}

#[inline(always)]
unsafe fn tanh_errors<L: Lanes>() {
    let x: Vec<f32> = (-(1 << 19)..1 << 19).map(|i| i as f32 * (12.0 / (1 << 19) as f32)).collect();
    let y = through!(L, math::tanh, x);
    for (&x, &y) in x.iter().zip(&y) {
        let want = f64::from(x).tanh();
        assert!((f64::from(y) - want).abs() <= 3e-7 * want.abs(), "tanh {x} = {y}");
    }
    let edge = [f32::INFINITY, f32::NEG_INFINITY, 1e30, -1e30, f32::NAN, 1e-20, 0.0, 100.0];
    let y = through!(L, math::tanh, [edge, edge].concat());
    assert_eq!((&y[..4], y[7]), (&[1.0, -1.0, 1.0, -1.0][..], 1.0));
    assert!(y[4].is_nan() && (y[5] - 1e-20).abs() < 1e-26 && y[6] == 0.0);
}

#[test]
fn exp_and_tanh_keep_their_bounds() {
    on_every_level!(exp_errors());
    on_every_level!(tanh_errors());
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

#[inline(always)]
unsafe fn conversions<L: Lanes>() {
    let mut got = [0f32; 16];
    let n = L::N;
    let halves: Vec<u16> = (0..=u16::MAX).collect();
    for h in halves.chunks_exact(n) {
        // SAFETY: on a level that `on_every_level` entered; whole vectors.
        unsafe { L::load_f16(h.as_ptr().cast()).store(got.as_mut_ptr().cast()) };
        assert!(h.iter().zip(got).all(|(h, g)| same(f16::from_bits(*h).to_f32(), g)));
        let mut back = [0u16; 16];
        // SAFETY: on a level that `on_every_level` entered; whole vectors.
        unsafe { L::load(got.as_ptr().cast()).store_f16(back.as_mut_ptr().cast()) };
        assert!(h.iter().zip(back).all(|(h, b)| *h == b || f16::from_bits(*h).is_nan()));
        // SAFETY: on a level that `on_every_level` entered; whole vectors.
        unsafe { L::load_bf16(h.as_ptr().cast()).store(got.as_mut_ptr().cast()) };
        assert!(h.iter().zip(got).all(|(h, g)| same(bf16::from_bits(*h).to_f32(), g)));
    }
    for h in halves.chunks_exact(2 * n) {
        for second in [0, 1] {
            // SAFETY: on a level that `on_every_level` entered; whole vectors.
            unsafe { L::load_bf16_pairs(h.as_ptr().cast())[second].store(got.as_mut_ptr().cast()) };
            let want = h.iter().skip(second).step_by(2);
            assert!(want.zip(got).all(|(h, g)| same(bf16::from_bits(*h).to_f32(), g)));
        }
    }
    let bytes: Vec<u8> = (0..=255).collect();
    for b in bytes.chunks_exact(n) {
        // SAFETY: on a level that `on_every_level` entered; whole vectors.
        unsafe { L::load_e4m3(b.as_ptr()).store(got.as_mut_ptr().cast()) };
        assert!(b.iter().zip(got).all(|(b, g)| same(e4m3_to_f32(*b), g)), "{b:?} {got:?}");
        // SAFETY: on a level that `on_every_level` entered; whole vectors.
        unsafe { L::load_e5m2(b.as_ptr()).store(got.as_mut_ptr().cast()) };
        assert!(b.iter().zip(got).all(|(b, g)| same(e5m2_to_f32(*b), g)), "{b:?} {got:?}");
    }
}

#[inline(always)]
unsafe fn rounding<L: Lanes>() {
    let xs: Vec<f32> = (0..1 << 18).map(|i| f32::from_bits((i as u32).wrapping_mul(0x9e37_79b9))).collect();
    for x in xs.chunks_exact(L::N) {
        let (mut h, mut b) = ([0u16; 16], [0u16; 16]);
        // SAFETY: on a level that `on_every_level` entered; whole vectors.
        unsafe {
            L::load(x.as_ptr().cast()).store_f16(h.as_mut_ptr().cast());
            L::load(x.as_ptr().cast()).store_bf16(b.as_mut_ptr().cast());
        }
        for (i, &x) in x.iter().enumerate() {
            assert!(same(f16::from_bits(h[i]).to_f32(), f16::from_f32(x).to_f32()), "{x}");
            assert!(same(bf16::from_bits(b[i]).to_f32(), bf16::from_f32(x).to_f32()), "{x}");
        }
    }
}

#[test]
fn conversions_are_exact_and_round_to_even() {
    on_every_level!(conversions());
    on_every_level!(rounding());
}

#[inline(always)]
unsafe fn basics<L: Lanes>() {
    // SAFETY: on a level that `on_every_level` entered; whole vectors.
    unsafe {
        let (i, two) = (L::iota(), L::splat(2.0));
        let n = L::N as f32;
        assert_eq!((i.sum(), i.largest(), i.first()), (n * (n - 1.0) / 2.0, n - 1.0, 0.0));
        assert_eq!(L::select_lt(i, two, two, i).sum(), i.sum() + 3.0);
        assert_eq!(L::round(L::splat(-2.5)).first(), -2.0);
        assert_eq!(
            (L::pow2(L::splat(-126.0)).first(), L::pow2(L::splat(3.0)).first()),
            (2f32.powi(-126), 8.0)
        );
        let nan = L::splat(f32::NAN);
        assert_eq!(L::max(nan, two).first(), 2.0);
        assert!(L::max(two, nan).first().is_nan());
        assert_eq!(L::select_lt(nan, two, nan, two).first(), 2.0);
        assert_eq!(L::fma(two, two, L::div(two, L::sub(two, L::splat(1.0)))).first(), 6.0);
    }
}

#[test]
fn basic_operations() {
    on_every_level!(basics());
}

#[inline(always)]
unsafe fn turns<L: Lanes>() {
    let from: Vec<f32> = (0..64).map(|i| i as f32).collect();
    let mut to = [0f32; 64];
    // SAFETY: on a level that `on_every_level` entered; eight rows of eight.
    unsafe {
        let rows = std::array::from_fn(|i| L::Narrow::load(from.as_ptr().add(8 * i).cast()));
        for (i, x) in L::Narrow::turn(rows).into_iter().enumerate() {
            x.store(to.as_mut_ptr().add(8 * i).cast());
        }
    }
    assert!((0..64).all(|i| to[i] == from[i % 8 * 8 + i / 8]), "{to:?}");
}

#[test]
fn eight_rows_become_eight_columns() {
    on_every_level!(turns());
}
