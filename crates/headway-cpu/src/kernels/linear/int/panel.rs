//! Many activation rows: weight rows are unpacked once into a panel in which a vector holds the same
//! four elements of eight rows, so that products need no sums across lanes.
//!
//! The panel belongs to a worker thread and is refilled a block of K at a time.

use super::{Activations, Chunk, IntSimd, K_BLOCK, Kind, ROWS, Rows8, contribution};
use crate::kernels::linear::Job;
use headway_tensor::quant::MAX_BLOCK_ELEMS;
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
    /// Scales by sub-block, a lane a row.
    d: [[f32; ROWS]; K_BLOCK / 16],
    /// Minima by sub-block, a lane a row.
    m: [[f32; ROWS]; K_BLOCK / 16],
}

/// A worker's panel.
pub(in super::super) struct Panel {
    groups: Vec<Group>,
    chunk: Box<Chunk>,
}

impl Panel {
    pub(in super::super) fn new() -> Self {
        let group = || Group {
            q: [[0; 4 * ROWS]; K_BLOCK / 4],
            d: [[0.0; ROWS]; K_BLOCK / 16],
            m: [[0.0; ROWS]; K_BLOCK / 16],
        };
        Self { groups: (0..GROUPS).map(|_| group()).collect(), chunk: Box::new(Chunk::new()) }
    }
}

/// At most [`PANEL_ROWS`] weight rows `rows` of `weights` with the activation rows of `job`.
///
/// # Safety
/// The processor has the instruction set of `S`; no other task writes the same elements of the output.
#[inline(always)]
pub(in super::super) unsafe fn panel<S: IntSimd, K: Kind>(
    job: &Job<'_>,
    x: &Activations,
    weights: &Rows8<'_>,
    rows: Range<usize>,
    panel: &mut Panel,
) {
    for k0 in (0..job.k).step_by(K_BLOCK) {
        let k = k0..job.k.min(k0 + K_BLOCK);
        for (group, n) in panel.groups.iter_mut().zip(rows.clone().step_by(ROWS)) {
            let weights = weights.from(n, ROWS.min(rows.end - n));
            // SAFETY: the caller's.
            unsafe { fill::<S, K>(group, &mut panel.chunk, &weights, k.clone()) };
        }
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
}

/// Unpacks elements `k` of up to eight rows into the group.
///
/// # Safety
/// The processor has the instruction set of `S`.
#[inline(always)]
unsafe fn fill<S: IntSimd, K: Kind>(
    group: &mut Group,
    chunk: &mut Chunk,
    weights: &Rows8<'_>,
    k: Range<usize>,
) {
    for from in k.clone().step_by(MAX_BLOCK_ELEMS) {
        let len = MAX_BLOCK_ELEMS.min(k.end - from);
        let at = from - k.start;
        // SAFETY: the caller's; each step reads 32 bytes of each of the chunk's eight rows, and writes the
        // 256 bytes of eight vectors.
        unsafe {
            weights.unpack(chunk, from, len);
            for b in 0..len / 32 {
                let out = &mut group.q[at / 4 + b * 8..at / 4 + b * 8 + 8];
                S::interleave(&raw const chunk.q[0][b * 32], MAX_BLOCK_ELEMS, out.as_mut_ptr().cast());
            }
        }
        let (sub, subs) = (at / K::SUB_BLOCK, len / K::SUB_BLOCK);
        group.d[sub..sub + subs].copy_from_slice(&chunk.d[..subs]);
        group.m[sub..sub + subs].copy_from_slice(&chunk.m[..subs]);
    }
}

/// A group with C activation rows from `m`, over the block `k`.
///
/// # Safety
/// As [`panel`]'s; the group holds the block.
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
    let rows: [&[i8]; C] = std::array::from_fn(|c| &x.q(m + c, k.start)[..k.len()]);
    // SAFETY: the caller's.
    let mut acc = [unsafe { S::splat(0.0) }; C];
    for b in 0..k.len() / 32 {
        let q = group.q[b * 8..b * 8 + 8].as_ptr().cast();
        let sub = b * (32 / K::SUB_BLOCK);
        let (d, mins) = (group.d[sub..].as_ptr().cast(), group.m[sub..].as_ptr().cast());
        // SAFETY: eight vectors of weights by the slice; 32 activation bytes from b · 32 of rows as long as
        // the block; one or two sub-blocks of scales follow `sub`.
        unsafe {
            let bytes = rows.map(|r| r.as_ptr().add(b * 32));
            let sums = S::panel_dot(q, bytes, K::SIGNED, K::PAIRS);
            for c in 0..C {
                let (dx, s) = x.scales(m + c, k.start / 32 + b);
                acc[c] = S::add(acc[c], contribution::<S, K>(sums[c], d, mins, s, dx));
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
