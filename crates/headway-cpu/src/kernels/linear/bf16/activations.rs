//! Activation rows as bfloat16, rounded to nearest even, padded with zeros to whole tiles of K.
//!
//! Made at the start of a call, for all tasks; the buffer is kept for the next one.

use super::{
    super::lines::{self, Line},
    DEPTH,
};
use crate::{
    Isa,
    kernels::elementwise::rows::Rows,
    pool::{Pool, SharedMut},
};

/// Rows of rounded activations.
#[derive(Default)]
pub(in super::super) struct Activations {
    lines: Vec<Line>,
    rows: usize,
    depth: usize,
}

/// Elements that one task rounds, at least.
const TASK_ELEMS: usize = 16 << 10;

impl Activations {
    /// Rounds all rows of `x`.
    pub(in super::super) fn fill(&mut self, pool: &Pool, isa: Isa, x: &[f32], xs: &Rows) {
        (self.rows, self.depth) = (xs.count(), xs.width().div_ceil(DEPTH));
        let (rows, row_lines) = (self.rows, self.depth);
        if self.lines.len() < rows * row_lines {
            self.lines = lines::zeroed(rows * row_lines * 64);
        }
        let lines = SharedMut::new(&mut self.lines[..rows * row_lines]);
        let step = (TASK_ELEMS / (row_lines * DEPTH)).max(1);
        pool.run(rows.div_ceil(step), &|task, _| {
            for row in task * step..rows.min((task + 1) * step) {
                // SAFETY: a row's lines meet no other row's, and each row is visited by one task.
                let lines = unsafe { lines.slice_mut(row * row_lines..(row + 1) * row_lines) };
                round_row(isa, xs.of(x, row), bytemuck::cast_slice_mut(lines));
            }
        });
    }

    /// Number of rows.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Tiles of a row: lines of 64 bytes.
    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    /// Bytes from one row to the next.
    pub(super) fn stride(&self) -> usize {
        self.depth * 64
    }

    /// Row `row` and all after it.
    #[inline(always)]
    pub(super) fn rows_from(&self, row: usize) -> &[u8] {
        bytemuck::cast_slice(&self.lines[row * self.depth..self.rows * self.depth])
    }
}

/// One row, compiled for the instruction set; zeros after its end.
fn round_row(isa: Isa, x: &[f32], out: &mut [u16]) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn avx512(x: &[f32], out: &mut [u16]) {
            row(x, out);
        }
        if matches!(isa, Isa::Avx512Bf16 | Isa::Amx) {
            // SAFETY: `CpuExec::new`, where every level comes from, refuses what the machine lacks.
            return unsafe { avx512(x, out) };
        }
    }
    let _ = isa;
    row(x, out);
}

#[inline(always)]
fn row(x: &[f32], out: &mut [u16]) {
    for (o, x) in out.iter_mut().zip(x) {
        let bits = x.to_bits();
        let even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        // Rounding could make infinity of a NaN, so a NaN is only cut, and kept one.
        let nan = bits >> 16 | 0x40;
        *o = if bits & 0x7fff_ffff > 0x7f80_0000 { nan as u16 } else { even as u16 };
    }
    out[x.len()..].fill(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_as_the_half_crate_does_at_every_level() {
        let mut x: Vec<f32> =
            [0.0f32, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, 1e-40]
                .into_iter()
                .chain((0..2000u32).map(|i| f32::from_bits(i.wrapping_mul(0x9e37_79b9))))
                .chain([0x3f80_8000, 0x3f81_8000, 0x3f80_8001, 0x7fff_ffff].map(f32::from_bits))
                .collect();
        x.truncate(x.len() / 2 * 2 - 1);
        for &isa in Isa::available() {
            let mut out = vec![7u16; x.len().next_multiple_of(DEPTH)];
            round_row(isa, &x, &mut out);
            for (x, o) in x.iter().zip(&out) {
                assert_eq!(*o, half::bf16::from_f32(*x).to_bits(), "{isa}: {x} {:#x}", x.to_bits());
            }
            assert!(out[x.len()..].iter().all(|o| *o == 0));
        }
    }
}
