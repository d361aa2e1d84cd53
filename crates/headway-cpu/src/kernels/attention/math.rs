//! exp and tanh over lanes, with stated error bounds (held by `tests`).

use super::lanes::Lanes;

/// Below this e^x is taken as 0 (it is under 2^-126, the smallest normal number).
pub(super) const EXP_UNDERFLOW: f32 = -87.336_54;

/// e^x for x ≤ 0 (exactly 0 below [`EXP_UNDERFLOW`] and for −∞, NaN for NaN), at most 2 units in the
/// last place off; exactly 1 for 0.
///
/// x = n·ln 2 + r with |r| ≤ ln 2 / 2; e^r by a polynomial of degree 6, fitted for least relative error
/// (1.9e-9 before rounding); 2^n into the exponent.
///
/// # Safety
/// The instruction set of `L`.
#[inline(always)]
pub(super) unsafe fn exp<L: Lanes>(x: L) -> L {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let low = L::splat(EXP_UNDERFLOW);
        let c = L::max(low, x);
        let n = L::round(L::mul(c, L::splat(std::f32::consts::LOG2_E)));
        // ln 2 in two parts, the first short enough that n times it is exact.
        let r = L::fma(n, L::splat(-0.693_359_4), c);
        let r = L::fma(n, L::splat(2.121_944_4e-4), r);
        let mut p = L::splat(1.383_674_2e-3);
        for coefficient in [8.374_899e-3, 4.166_823_3e-2, 0.166_664_2, 0.499_999_9, 1.0, 1.0] {
            p = L::fma(p, r, L::splat(coefficient));
        }
        L::select_lt(x, low, L::splat(0.0), L::mul(p, L::pow2(n)))
    }
}

/// [`exp`] of one number, by the same steps.
///
/// # Safety
/// The instruction set of `L`.
#[inline(always)]
pub(super) unsafe fn exp1<L: Lanes>(x: f32) -> f32 {
    // SAFETY: the caller has the instruction set.
    unsafe { exp(L::Narrow::splat(x)).first() }
}

/// tanh x, at most 3e-7 off, relative to the result; never overflows (±1 for ±∞, NaN for NaN).
///
/// Up to 1 by the [7/6] Padé approximant, beyond by (1 − e) / (1 + e) with e = e^(−2|x|).
///
/// # Safety
/// The instruction set of `L`.
#[inline(always)]
pub(super) unsafe fn tanh<L: Lanes>(x: L) -> L {
    // SAFETY: the caller has the instruction set.
    unsafe {
        let (zero, one) = (L::splat(0.0), L::splat(1.0));
        let minus = L::sub(zero, x);
        let a = L::select_lt(x, zero, minus, x);
        let e = exp(L::mul(a, L::splat(-2.0)));
        let far = L::div(L::sub(one, e), L::add(one, e));
        let z = L::mul(x, x);
        let top = L::fma(L::fma(L::add(z, L::splat(378.0)), z, L::splat(17325.0)), z, L::splat(135_135.0));
        let bottom = L::fma(L::fma(L::splat(28.0), z, L::splat(3150.0)), z, L::splat(62370.0));
        let bottom = L::fma(bottom, z, L::splat(135_135.0));
        let near = L::div(L::mul(x, top), bottom);
        let far = L::select_lt(x, zero, L::sub(zero, far), far);
        L::select_lt(a, one, near, far)
    }
}
