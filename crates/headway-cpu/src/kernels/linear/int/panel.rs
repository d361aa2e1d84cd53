//! Many activation rows: packed weight rows become a panel of bytes once for all of them, in which a
//! vector holds the same four elements of eight rows, so that products need no sums across lanes.
//!
//! The panel belongs to a worker thread and is refilled a block of K at a time.

use super::{
    Activations, IntSimd, K_BLOCK, Kind, Packed, ROWS, Scales, contribution, integers::Integers, layout,
};
use crate::kernels::linear::Job;
use layout::Layout;
use std::ops::Range;

/// Groups of eight weight rows in a panel.
const GROUPS: usize = 8;
/// Most weight rows of a panel.
pub(in super::super) const PANEL_ROWS: usize = GROUPS * ROWS;

/// Eight weight rows over a block of K.
#[repr(C, align(64))]
struct Group {
    /// Four elements of a row beside those of the next row: `[k / 4][row][4]`.
    q: [[u8; 4 * ROWS]; K_BLOCK / 4],
    /// Scales by 16 elements, a lane a row.
    d: [[f32; ROWS]; K_BLOCK / 16],
    /// Minima by 16 elements, a lane a row.
    m: [[f32; ROWS]; K_BLOCK / 16],
}

/// A worker's panel.
pub(in super::super) struct Panel {
    groups: Vec<Group>,
}

impl Panel {
    pub(in super::super) fn new() -> Self {
        let group = || Group {
            q: [[0; 4 * ROWS]; K_BLOCK / 4],
            d: [[0.0; ROWS]; K_BLOCK / 16],
            m: [[0.0; ROWS]; K_BLOCK / 16],
        };
        Self { groups: (0..GROUPS).map(|_| group()).collect() }
    }
}

/// Elements of K from `k0`, a multiple of [`K_BLOCK`], of at most [`PANEL_ROWS`] weight rows `rows`, from a
/// multiple of eight on, into the panel.
///
/// # Safety
/// The processor has the instruction set of `S`.
#[inline(always)]
pub(in super::super) unsafe fn fill<S: IntSimd, L: Layout>(
    weights: &Packed,
    rows: Range<usize>,
    k0: usize,
    panel: &mut Panel,
) {
    for (group, n) in panel.groups.iter_mut().zip(rows.step_by(ROWS)) {
        let units = weights.group(n / ROWS)[k0 / L::BLOCK_ELEMS * L::UNIT..].chunks_exact(L::UNIT);
        for (u, unit) in units.take(K_BLOCK / L::BLOCK_ELEMS).enumerate() {
            // SAFETY: the caller's; a unit holds a header and its steps; a step fills eight vectors of
            // integers and two of scales and minima.
            unsafe {
                let head = layout::header::<S, L>(unit.as_ptr());
                for b in 0..L::STEPS {
                    let at = u * L::STEPS + b;
                    let step = unit.as_ptr().add(L::HEADER + b * L::STEP);
                    let q = step.add(L::SCALES);
                    let vectors = [L::Integers::low::<S>(q), L::Integers::high::<S>(q)];
                    for (to, v) in group.q[8 * at..8 * at + 8].iter_mut().zip(vectors.into_iter().flatten()) {
                        S::store_bytes(v, to.as_mut_ptr());
                    }
                    let scales = layout::scales::<S, L>(head, step);
                    for half in 0..2 {
                        S::store(scales.d[half], group.d[2 * at + half].as_mut_ptr());
                        S::store(scales.m[half], group.m[2 * at + half].as_mut_ptr());
                    }
                }
            }
        }
    }
}

/// The panel, which holds elements `k` of the weight rows `rows`, with the activation rows of `job`.
///
/// # Safety
/// The processor has the instruction set of `S`; no other task writes the same elements of the output.
#[inline(always)]
pub(in super::super) unsafe fn tiles<S: IntSimd, K: Kind>(
    job: &Job<'_>,
    x: &Activations,
    rows: Range<usize>,
    k: Range<usize>,
    panel: &Panel,
) {
    for (group, n) in panel.groups.iter().zip(rows.clone().step_by(ROWS)) {
        let count = ROWS.min(rows.end - n);
        let mut m = job.m.start;
        while m < job.m.end {
            let cols = S::COLS.min(job.m.end - m);
            // SAFETY: the caller's.
            unsafe {
                match cols {
                    1 => tile::<S, K, 1>(job, x, group, k.clone(), m, n, count),
                    2 => tile::<S, K, 2>(job, x, group, k.clone(), m, n, count),
                    3 => tile::<S, K, 3>(job, x, group, k.clone(), m, n, count),
                    _ => tile::<S, K, 4>(job, x, group, k.clone(), m, n, count),
                }
            }
            m += cols;
        }
    }
}

/// A group with C activation rows from `m`, over the block `k`.
///
/// # Safety
/// As [`tiles`]'s; the group holds the block.
#[inline(always)]
unsafe fn tile<S: IntSimd, K: Kind, const C: usize>(
    job: &Job<'_>,
    x: &Activations,
    group: &Group,
    k: Range<usize>,
    m: usize,
    n: usize,
    count: usize,
) {
    let rows: [_; C] = std::array::from_fn(|c| x.row(m + c));
    // SAFETY: the caller's.
    let mut acc = [unsafe { S::splat(0.0) }; C];
    for b in 0..k.len() / 32 {
        let q = group.q[b * 8..b * 8 + 8].as_ptr().cast::<u8>();
        let (d, mins) = (&group.d[2 * b..2 * b + 2], &group.m[2 * b..2 * b + 2]);
        let at = k.start / 32 + b;
        // SAFETY: eight vectors of weights by the slice; 32 bytes of each activation row.
        unsafe {
            let xs: [*const i8; C] = std::array::from_fn(|c| rows[c].q[at].as_ptr());
            let half = |q: *const u8| std::array::from_fn(|j| S::load_bytes(q.add(32 * j)));
            let low = S::dot(half(q), xs, K::SIGNED, K::PAIRS);
            let high = S::dot(half(q.add(128)), xs.map(|x| x.add(16)), K::SIGNED, K::PAIRS);
            let load = |s: &[[f32; ROWS]]| [S::load(s[0].as_ptr()), S::load(s[1].as_ptr())];
            let scales = Scales { d: load(d), m: load(mins) };
            for c in 0..C {
                let (dx, s) = (rows[c].d[at], rows[c].s[at]);
                acc[c] = S::add(acc[c], contribution::<S, K>((low[c], high[c]), scales, s, dx));
            }
        }
    }
    for (c, acc) in acc.into_iter().enumerate() {
        let mut sums = [0f32; ROWS];
        // SAFETY: eight lanes into eight elements; the rest is the caller's.
        unsafe {
            S::store(acc, sums.as_mut_ptr());
            job.put(m + c, n, &sums[..count], k.start == 0, k.end == job.k);
        }
    }
}
