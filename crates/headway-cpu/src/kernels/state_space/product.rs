//! Small matrix products of a chunk's scan, on row-major float32. Columns of B and C come in whole panels
//! of [`PANEL`]; whoever lays them out pads them.

/// Columns of a panel.
pub(super) const PANEL: usize = 16;
/// Rows that are computed together.
const ROWS: usize = 4;

/// How a product is summed: with one rounding an element where the instruction set fuses, else with two.
pub(super) trait Madd {
    /// a · b + c.
    fn madd(a: f32, b: f32, c: f32) -> f32;
}

/// For instruction sets with fused multiply-add.
pub(super) struct Fused;
/// For those without, where a fused one would be a call.
pub(super) struct Plain;

impl Madd for Fused {
    #[inline(always)]
    fn madd(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

impl Madd for Plain {
    #[inline(always)]
    fn madd(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

/// What part of a product is wanted, or nonzero.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// All of it.
    All,
    /// Columns of C up to the row's index, as panels.
    LowerC,
    /// A is zero right of the row's index.
    LowerA,
}

/// `C[i] = scale(i) · A[i] · B + keep · C[i]`: A `[m, k]`, B `[k, n]`, C `[m, n]`, each with the elements from
/// one row to the next.
#[inline(always)]
pub(super) fn product<M: Madd>(
    (a, a_row): (&[f32], usize),
    (b, b_row): (&[f32], usize),
    (c, c_row): (&mut [f32], usize),
    (m, n, k): (usize, usize, usize),
    part: Part,
    keep: f32,
    scale: impl Fn(usize) -> f32,
) {
    let mut i = 0;
    while i < m {
        let rows = if m - i >= ROWS { ROWS } else { 1 };
        let last = i + rows;
        let n = if part == Part::LowerC { n.min(last.next_multiple_of(PANEL)) } else { n };
        let k = if part == Part::LowerA { k.min(last) } else { k };
        for j in (0..n).step_by(PANEL) {
            if rows == ROWS {
                let sums = tile::<M, ROWS>(&a[i * a_row..], a_row, &b[j..], b_row, k);
                for (r, sums) in sums.iter().enumerate() {
                    put::<M>(&mut c[(i + r) * c_row + j..], sums, scale(i + r), keep);
                }
            } else {
                let sums = tile::<M, 1>(&a[i * a_row..], a_row, &b[j..], b_row, k);
                put::<M>(&mut c[i * c_row + j..], &sums[0], scale(i), keep);
            }
        }
        i = last;
    }
}

#[inline(always)]
fn tile<M: Madd, const R: usize>(
    a: &[f32],
    a_row: usize,
    b: &[f32],
    b_row: usize,
    k: usize,
) -> [[f32; PANEL]; R] {
    let mut rows = [&a[..0]; R];
    for (r, row) in rows.iter_mut().enumerate() {
        *row = &a[r * a_row..][..k];
    }
    let mut sums = [[0f32; PANEL]; R];
    for (t, b) in b.chunks(b_row).take(k).enumerate() {
        let Some(b) = b.first_chunk::<PANEL>() else { break };
        for r in 0..R {
            let x = rows[r][t];
            for l in 0..PANEL {
                sums[r][l] = M::madd(x, b[l], sums[r][l]);
            }
        }
    }
    sums
}

#[inline(always)]
fn put<M: Madd>(c: &mut [f32], sums: &[f32; PANEL], scale: f32, keep: f32) {
    let Some(c) = c.first_chunk_mut::<PANEL>() else { return };
    if keep == 0.0 {
        // What was there may be anything.
        for l in 0..PANEL {
            c[l] = scale * sums[l];
        }
    } else {
        for l in 0..PANEL {
            c[l] = M::madd(scale, sums[l], keep * c[l]);
        }
    }
}
