//! Activation rows as signed bytes: a scale and a sum for every 16 elements. Half of the block of the
//! formats: what an outlier costs its neighbours in precision, it costs half as many of them.
//!
//! Made at the start of a call, for all tasks; the buffers are kept for the next one. Not for weights.

use crate::{
    Isa,
    kernels::elementwise::rows::Rows,
    pool::{Pool, SharedMut},
};

/// Rows of quantised activations.
#[derive(Default)]
pub(in super::super) struct Activations {
    k: usize,
    q: Vec<i8>,
    d: Vec<f32>,
    /// Sums times scales.
    s: Vec<f32>,
}

/// A quantised row, 32 elements an entry.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    /// The bytes.
    pub(super) q: &'a [[i8; 32]],
    /// Scales of the two halves.
    pub(super) d: &'a [[f32; 2]],
    /// Sums of the two halves, times the scales.
    pub(super) s: &'a [[f32; 2]],
}

/// Rows that one task quantises.
const TASK_ROWS: usize = 8;

impl Activations {
    /// Quantises all rows of `x`, whose length is a multiple of 32.
    pub(in super::super) fn fill(&mut self, pool: &Pool, isa: Isa, x: &[f32], xs: &Rows) {
        let (rows, k) = (xs.count(), xs.width());
        self.k = k;
        // Growing keeps the capacity for later calls; every element is written below.
        self.q.resize(rows * k, 0);
        self.d.resize(rows * (k / 16), 0.0);
        self.s.resize(rows * (k / 16), 0.0);
        let q = SharedMut::new(&mut self.q);
        let (d, s) = (SharedMut::new(&mut self.d), SharedMut::new(&mut self.s));
        pool.run(rows.div_ceil(TASK_ROWS), &|task, _| {
            for row in task * TASK_ROWS..rows.min((task + 1) * TASK_ROWS) {
                // SAFETY: a row's parts meet no other row's, and each row is visited by one task.
                let (q, d, s) = unsafe {
                    (
                        q.slice_mut(row * k..(row + 1) * k),
                        d.slice_mut(row * (k / 16)..(row + 1) * (k / 16)),
                        s.slice_mut(row * (k / 16)..(row + 1) * (k / 16)),
                    )
                };
                quantise_row(isa, xs.of(x, row), q, d, s);
            }
        });
    }

    /// Row `row`.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> Row<'_> {
        let (k, scales) = (self.k, self.k / 16);
        Row {
            q: self.q[row * k..(row + 1) * k].as_chunks().0,
            d: self.d[row * scales..(row + 1) * scales].as_chunks().0,
            s: self.s[row * scales..(row + 1) * scales].as_chunks().0,
        }
    }
}

/// One row, compiled for the instruction set.
fn quantise_row(isa: Isa, x: &[f32], q: &mut [i8], d: &mut [f32], s: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn avx2(x: &[f32], q: &mut [i8], d: &mut [f32], s: &mut [f32]) {
            row(x, q, d, s);
        }
        if matches!(isa, Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx) {
            // SAFETY: an `Isa` of this level is only made where the processor has its features.
            return unsafe { avx2(x, q, d, s) };
        }
    }
    let _ = isa;
    row(x, q, d, s);
}

#[inline(always)]
fn row(x: &[f32], q: &mut [i8], d: &mut [f32], s: &mut [f32]) {
    let blocks = x.as_chunks::<16>().0.iter().zip(q.as_chunks_mut::<16>().0);
    for ((x, q), (d, s)) in blocks.zip(d.iter_mut().zip(s)) {
        *d = block(x, q);
        *s = q.iter().map(|&q| i32::from(q)).sum::<i32>() as f32 * *d;
    }
}

/// Quantises 16 elements by their largest magnitude and returns the scale: NaN where an element is, so
/// that it is not lost.
#[inline(always)]
fn block(x: &[f32; 16], q: &mut [i8; 16]) -> f32 {
    // Of non-negative floats the order of bits is the order of values, with NaN above all.
    let largest = x.iter().fold(0, |a, v| a.max((v.to_bits() & 0x7fff_ffff).cast_signed()));
    let largest = f32::from_bits(largest.cast_unsigned());
    // Below this the inverse would overflow, and the values add nothing to a float32 sum.
    let inverse = if largest < 1e-30 { 0.0 } else { 127.0 / largest };
    // Adding 1.5 · 2^23 rounds to nearest, ties to even, and leaves the integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    for (q, x) in q.iter_mut().zip(x) {
        *q = (x * inverse + ROUND).to_bits() as i8;
    }
    if largest < 1e-30 { 0.0 } else { largest / 127.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantised(isa: Isa, x: &[f32]) -> (Vec<i8>, Vec<f32>, Vec<f32>) {
        let (mut q, mut d, mut s) = (vec![0; x.len()], vec![0.0; x.len() / 16], vec![0.0; x.len() / 16]);
        quantise_row(isa, x, &mut q, &mut d, &mut s);
        (q, d, s)
    }

    #[test]
    fn values_come_back_within_half_a_step() {
        let x: Vec<f32> = (0..96).map(|i| ((i * 29 % 64) as f32 - 31.5) * 0.37f32.powi(i / 32)).collect();
        let portable = quantised(Isa::Portable, &x);
        for &isa in Isa::available() {
            assert_eq!(quantised(isa, &x), portable);
        }
        let (q, d, s) = portable;
        for (i, (&x, &q)) in x.iter().zip(&q).enumerate() {
            assert!((x - d[i / 16] * f32::from(q)).abs() <= d[i / 16] * 0.5001, "{i}");
            assert!(q > -128);
        }
        for (i, q) in q.chunks(16).enumerate() {
            assert_eq!(s[i], q.iter().map(|&q| f32::from(q)).sum::<f32>() * d[i]);
        }
    }

    #[test]
    fn extremes() {
        let mut x = [0f32; 16];
        assert_eq!(quantised(Isa::Portable, &x), (vec![0; 16], vec![0.0], vec![0.0]));
        x[3] = f32::MAX;
        x[4] = -f32::MAX;
        let (q, d, _) = quantised(Isa::Portable, &x);
        assert_eq!((q[3], q[4], q[5], d[0]), (127, -127, 0, f32::MAX / 127.0));
        x[9] = 1e-42;
        assert_eq!(quantised(Isa::Portable, &[1e-42; 16]).1, [0.0]);
        x[9] = f32::NAN;
        assert!(quantised(Isa::Portable, &x).1[0].is_nan());
    }
}
