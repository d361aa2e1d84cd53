//! Few activation rows: packed weights go from memory through registers, once, and are never written.
//!
//! Not for many rows, where [`super::fill`] makes a panel of bytes once for all of them.

use super::{Activations, IntSimd, K_BLOCK, Kind, Packed, ROWS, contribution, integers::Integers, layout};
use crate::kernels::linear::{AHEAD, Job, prefetch};
use layout::Layout;
use std::ops::Range;

/// The weight rows `rows`, from a multiple of eight on, with the activation rows of `job`.
///
/// # Safety
/// The processor has the instruction set of `S`; no other task writes the same elements of the output.
#[inline(always)]
pub(in super::super) unsafe fn few<S: IntSimd, L: Layout>(
    job: &Job<'_>,
    x: &Activations,
    weights: &Packed,
    rows: Range<usize>,
) {
    for n in rows.clone().step_by(ROWS) {
        let (group, count) = (weights.group(n / ROWS), ROWS.min(rows.end - n));
        let mut m = job.m.start;
        while m < job.m.end {
            let cols = S::COLS.min(job.m.end - m);
            // SAFETY: the caller's.
            unsafe {
                match cols {
                    1 => eight::<S, L, 1>(job, x, group, m, n, count),
                    2 => eight::<S, L, 2>(job, x, group, m, n, count),
                    3 => eight::<S, L, 3>(job, x, group, m, n, count),
                    _ => eight::<S, L, 4>(job, x, group, m, n, count),
                }
            }
            m += cols;
        }
    }
}

/// A group of eight weight rows, row `n` of the part the first, of which `count` exist, with C activation
/// rows from `m`.
///
/// # Safety
/// As [`few`]'s.
#[inline(always)]
unsafe fn eight<S: IntSimd, L: Layout, const C: usize>(
    job: &Job<'_>,
    x: &Activations,
    group: &[u8],
    m: usize,
    n: usize,
    count: usize,
) {
    let rows: [_; C] = std::array::from_fn(|c| x.row(m + c));
    let blocks = group.chunks(K_BLOCK / L::BLOCK_ELEMS * L::UNIT);
    for (block, k0) in blocks.zip((0..).step_by(K_BLOCK)) {
        // SAFETY: the caller's.
        let mut acc = [unsafe { S::splat(0.0) }; C];
        for (u, unit) in block.chunks_exact(L::UNIT).enumerate() {
            // SAFETY: the caller's; a unit holds a header and its steps, 32 elements each.
            unsafe {
                let head = layout::header::<S, L>(unit.as_ptr());
                for b in 0..L::STEPS {
                    let at = k0 / 32 + u * L::STEPS + b;
                    let step = unit.as_ptr().add(L::HEADER + b * L::STEP);
                    for line in 0..L::STEP.div_ceil(64) {
                        prefetch(step.wrapping_add(AHEAD + 64 * line));
                    }
                    let scales = layout::scales::<S, L>(head, step);
                    let q = step.add(L::SCALES);
                    let xs: [*const i8; C] = std::array::from_fn(|c| rows[c].q[at].as_ptr());
                    let low = S::dot(L::Integers::low::<S>(q), xs, L::Kind::SIGNED, L::Kind::PAIRS);
                    let xs = xs.map(|x| x.add(16));
                    let high = S::dot(L::Integers::high::<S>(q), xs, L::Kind::SIGNED, L::Kind::PAIRS);
                    for c in 0..C {
                        let (dx, s) = (rows[c].d[at], rows[c].s[at]);
                        let sums = (low[c], high[c]);
                        acc[c] = S::add(acc[c], contribution::<S, L::Kind>(sums, scales, s, dx));
                    }
                }
            }
        }
        let last = k0 + K_BLOCK >= job.k;
        for (c, acc) in acc.into_iter().enumerate() {
            let mut sums = [0f32; ROWS];
            // SAFETY: eight lanes into eight elements; the rest is the caller's.
            unsafe {
                S::store(acc, sums.as_mut_ptr());
                job.put(m + c, n, &sums[..count], k0 == 0, last);
            }
        }
    }
}
