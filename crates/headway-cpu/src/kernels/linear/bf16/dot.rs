//! Vectors of dot products: 16 output columns in 16 lanes, two elements of K at a time. A line of the
//! packed weight is multiplied with a pair of an activation row in every lane, so nothing is summed over
//! lanes.

use super::{super::Job, Activations, COLUMNS, Packed};
use std::{arch::x86_64::*, ops::Range};

/// Most activation rows of a block: with four panels 24 sums, four weights and an activation, of 32
/// registers.
const ROWS: usize = 6;
/// Most panels of a block.
const PANELS: usize = 4;

/// Weight rows `rows` with the activation rows of `job`.
///
/// # Safety
/// The processor has AVX512-BF16; `job`'s activation rows are in `x`, the panels of `rows` in `w`, both of
/// one depth; no other task writes the same part of the output.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn multiply(job: &Job<'_>, x: &Activations, w: &Packed, rows: Range<usize>) {
    let (mut panel, end) = (rows.start / COLUMNS, rows.end.div_ceil(COLUMNS));
    while panel < end {
        let panels = if end - panel >= PANELS { PANELS } else { 1 };
        for m in job.m.clone().step_by(ROWS) {
            // SAFETY: the caller's.
            unsafe {
                match (panels, (job.m.end - m).min(ROWS)) {
                    (PANELS, 1) => block::<1, PANELS>(job, x, w, m, panel, rows.end),
                    (PANELS, 2) => block::<2, PANELS>(job, x, w, m, panel, rows.end),
                    (PANELS, 3) => block::<3, PANELS>(job, x, w, m, panel, rows.end),
                    (PANELS, 4) => block::<4, PANELS>(job, x, w, m, panel, rows.end),
                    (PANELS, 5) => block::<5, PANELS>(job, x, w, m, panel, rows.end),
                    (PANELS, _) => block::<6, PANELS>(job, x, w, m, panel, rows.end),
                    (_, 1) => block::<1, 1>(job, x, w, m, panel, rows.end),
                    (_, 2) => block::<2, 1>(job, x, w, m, panel, rows.end),
                    (_, 3) => block::<3, 1>(job, x, w, m, panel, rows.end),
                    (_, 4) => block::<4, 1>(job, x, w, m, panel, rows.end),
                    (_, 5) => block::<5, 1>(job, x, w, m, panel, rows.end),
                    _ => block::<6, 1>(job, x, w, m, panel, rows.end),
                }
            }
        }
        panel += panels;
    }
}

/// R activation rows from `m` with P panels from `panel`; weight rows from `end` on are not there.
///
/// # Safety
/// As [`multiply`]'s.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn block<const R: usize, const P: usize>(
    job: &Job<'_>,
    x: &Activations,
    w: &Packed,
    m: usize,
    panel: usize,
    end: usize,
) {
    let lines: [*const u8; P] = std::array::from_fn(|p| w.panel(panel + p).as_ptr());
    let rows: [*const u8; R] = std::array::from_fn(|r| x.rows_from(m + r).as_ptr());
    let mut sums = [[_mm512_setzero_ps(); P]; R];
    for pair in 0..x.stride() / 4 {
        // SAFETY: a panel has a line, and a row has 4 bytes, for every pair.
        unsafe {
            let mut weights = [_mm512_setzero_si512(); P];
            for p in 0..P {
                weights[p] = _mm512_load_si512(lines[p].add(pair * 64).cast());
            }
            for r in 0..R {
                let a = _mm512_set1_epi32(rows[r].add(pair * 4).cast::<i32>().read());
                for p in 0..P {
                    sums[r][p] = _mm512_dpbf16_ps(sums[r][p], bf16(weights[p]), bf16(a));
                }
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (p, sums) in sums.iter().enumerate() {
            let mut out = [0f32; COLUMNS];
            // SAFETY: 16 floats.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr(), *sums) };
            let first = (panel + p) * COLUMNS;
            // SAFETY: the caller's: these output elements are this task's.
            unsafe { job.put(m + r, first, &out[..COLUMNS.min(end - first)], true, true) };
        }
    }
}

#[inline(always)]
fn bf16(x: __m512i) -> __m512bh {
    // SAFETY: both are 512 bits, of which every pattern is valid.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(x) }
}
