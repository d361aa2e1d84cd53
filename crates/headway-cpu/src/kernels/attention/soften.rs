//! The step of the online softmax for one row and one tile.

use super::{
    lanes::Lanes,
    math::{exp, exp1, tanh},
};
use std::ops::Range;

/// A row's scores of a tile, and what is done to them.
pub(super) struct Scores {
    /// Scores, replaced by weights.
    pub(super) s: *mut f32,
    /// The keys that the row sees, in tokens of the tile; not empty.
    pub(super) seen: (usize, usize),
    /// `cap · tanh(score / cap)`.
    pub(super) soft_cap: Option<f32>,
    /// The head's slope, and the position of the tile's first key less the row's own.
    pub(super) alibi: Option<(f32, f32)>,
}

/// Soft cap, ALiBi and mask on the scores, then maximum, weights and sum; scales down what was
/// accumulated where the maximum rose. `state` is the row's maximum and sum, `acc` its values.
///
/// # Safety
/// The instruction set of `L`; a tile of scores, `state` of two and `acc` of `width` float32, a multiple
/// of 8.
#[inline(always)]
pub(super) unsafe fn soften<L: Lanes>(x: &Scores, state: *mut f32, acc: *mut f32, width: usize) {
    let (from, to) = x.seen;
    let span = from / L::N * L::N..to.next_multiple_of(L::N);
    // SAFETY: the span lies in the tile, the rest as the caller has promised.
    unsafe {
        if let Some(cap) = x.soft_cap {
            cap_scores::<L>(x.s, span.clone(), cap);
        }
        if let Some((slope, distance)) = x.alibi {
            bend_scores::<L>(x.s, span.clone(), slope, distance);
        }
        let top = mask_and_find_top::<L>(x.s, span.clone(), (from, to));
        let (old, mut sum) = (*state, *state.add(1));
        let new = if old > top { old } else { top };
        // Where every score so far is −∞ nothing is subtracted: weights are 0, and NaN stays NaN.
        let base = if new == f32::NEG_INFINITY { 0.0 } else { new };
        let mut total = L::splat(0.0);
        for t in span.step_by(L::N) {
            let at = x.s.add(t).cast::<u8>();
            let w = exp(L::sub(L::load(at.cast_const()), L::splat(base)));
            w.store(at);
            total = L::add(total, w);
        }
        if new != old {
            let factor = exp1::<L>(old - base);
            sum *= factor;
            for c in (0..width).step_by(8) {
                let at = acc.add(c).cast::<u8>();
                L::Narrow::mul(L::Narrow::load(at.cast_const()), L::Narrow::splat(factor)).store(at);
            }
        }
        state.write(new);
        state.add(1).write(sum + total.sum());
    }
}

/// # Safety
/// As [`soften`].
#[inline(always)]
unsafe fn cap_scores<L: Lanes>(s: *mut f32, span: Range<usize>, cap: f32) {
    // SAFETY: as the caller has promised.
    unsafe {
        let (cap, inverse) = (L::splat(cap), L::splat(1.0 / cap));
        for t in span.step_by(L::N) {
            let at = s.add(t).cast::<u8>();
            L::mul(cap, tanh(L::mul(L::load(at.cast_const()), inverse))).store(at);
        }
    }
}

/// # Safety
/// As [`soften`].
#[inline(always)]
unsafe fn bend_scores<L: Lanes>(s: *mut f32, span: Range<usize>, slope: f32, distance: f32) {
    // SAFETY: as the caller has promised.
    unsafe {
        for t in span.step_by(L::N) {
            let at = s.add(t).cast::<u8>();
            let j = L::add(L::iota(), L::splat(distance + t as f32));
            L::fma(L::splat(slope), j, L::load(at.cast_const())).store(at);
        }
    }
}

/// Writes −∞ over what the row does not see, and returns the largest score.
///
/// # Safety
/// As [`soften`].
#[inline(always)]
unsafe fn mask_and_find_top<L: Lanes>(s: *mut f32, span: Range<usize>, (from, to): (usize, usize)) -> f32 {
    // SAFETY: as the caller has promised.
    unsafe {
        let minus = L::splat(f32::NEG_INFINITY);
        let masked = span.start != from || span.end != to;
        let (from, to) = (L::splat(from as f32), L::splat(to as f32));
        let mut top = minus;
        for t in span.step_by(L::N) {
            let at = s.add(t).cast::<u8>();
            let mut x = L::load(at.cast_const());
            if masked {
                let j = L::add(L::iota(), L::splat(t as f32));
                x = L::select_lt(j, from, minus, x);
                x = L::select_lt(j, to, x, minus);
                x.store(at);
            }
            top = L::max(top, x);
        }
        top.largest()
    }
}
