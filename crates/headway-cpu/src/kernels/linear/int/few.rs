//! Few activation rows: eight weight rows are unpacked 256 elements at a time into the first-level
//! cache and multiplied there, so a weight is read from memory once.
//!
//! Not for many rows, where [`super::panel()`] unpacks into a better order once for all of them.

use super::{Activations, Chunk, IntSimd, K_BLOCK, Kind, ROWS, Rows8, contribution};
use crate::kernels::linear::Job;
use headway_tensor::quant::MAX_BLOCK_ELEMS;
use std::ops::Range;

/// The weight rows `rows` of `weights` with the activation rows of `job`, at most three.
///
/// # Safety
/// The processor has the instruction set of `S`; no other task writes the same elements of the output.
#[inline(always)]
pub(in super::super) unsafe fn few<S: IntSimd, K: Kind>(
    job: &Job<'_>,
    x: &Activations,
    weights: &Rows8<'_>,
    rows: Range<usize>,
) {
    let mut chunk = Chunk::new();
    for n in rows.clone().step_by(ROWS) {
        let count = ROWS.min(rows.end - n);
        let weights = weights.from(n, count);
        // SAFETY: the caller's.
        unsafe {
            match job.m.len() {
                1 => eight::<S, K, 1>(job, x, &weights, n, &mut chunk),
                2 => eight::<S, K, 2>(job, x, &weights, n, &mut chunk),
                _ => eight::<S, K, 3>(job, x, &weights, n, &mut chunk),
            }
        }
    }
}

/// Up to eight weight rows, row `n` of the part the first, with C activation rows.
///
/// # Safety
/// As [`few`]'s.
#[inline(always)]
unsafe fn eight<S: IntSimd, K: Kind, const C: usize>(
    job: &Job<'_>,
    x: &Activations,
    weights: &Rows8<'_>,
    n: usize,
    chunk: &mut Chunk,
) {
    for k0 in (0..job.k).step_by(K_BLOCK) {
        let k_end = job.k.min(k0 + K_BLOCK);
        // SAFETY: the caller's.
        let mut acc = [unsafe { S::splat(0.0) }; C];
        for from in (k0..k_end).step_by(MAX_BLOCK_ELEMS) {
            let len = MAX_BLOCK_ELEMS.min(k_end - from);
            // SAFETY: the caller's.
            unsafe {
                weights.prefetch_next(from, len, job.k);
                weights.unpack(chunk, from, len);
                multiply::<S, K, C>(x, job.m.start, from, len, chunk, &mut acc);
            }
        }
        for (c, acc) in acc.into_iter().enumerate() {
            let mut sums = [0f32; ROWS];
            // SAFETY: eight lanes into eight elements; the rest is the caller's.
            unsafe {
                S::store(acc, sums.as_mut_ptr());
                job.put(job.m.start + c, n, &sums[..weights.count()], k0 == 0, k_end == job.k);
            }
        }
    }
}

/// Adds the chunk, elements `from..from + len` of its rows, times C activation rows from `m` to `acc`.
///
/// # Safety
/// The processor has the instruction set of `S`.
#[inline(always)]
unsafe fn multiply<S: IntSimd, K: Kind, const C: usize>(
    x: &Activations,
    m: usize,
    from: usize,
    len: usize,
    chunk: &Chunk,
    acc: &mut [S::F; C],
) {
    for b in 0..len / 32 {
        let q = &raw const chunk.q[0][b * 32];
        let sub = b * (32 / K::SUB_BLOCK);
        let (d, mins) = (chunk.d[sub..].as_ptr().cast(), chunk.m[sub..].as_ptr().cast());
        for (c, acc) in acc.iter_mut().enumerate() {
            let (dx, s) = x.scales(m + c, from / 32 + b);
            let bytes: *const i8 = x.q(m + c, from + b * 32)[..32].as_ptr();
            // SAFETY: b · 32 + 32 ≤ 256 bytes in each of the eight rows, which are 256 apart; 32 bytes of
            // activations by the slice; one or two sub-blocks of scales follow `sub`.
            unsafe {
                let sums = S::rows_dot(q, MAX_BLOCK_ELEMS, bytes, K::SIGNED);
                *acc = S::add(*acc, contribution::<S, K>(sums, d, mins, s, dx));
            }
        }
    }
}
