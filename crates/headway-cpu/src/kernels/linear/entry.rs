//! From a task to the kernel compiled for its weight type and the instruction set in force. The one
//! place where the `#[target_feature]` functions of the linear layers are called.
//!
//! Not for splitting work: tasks come from the parent module.

use super::{DIRECT_ROWS, Job, Vectors, dense, int, simd};
use headway_tensor::{
    Weight, WeightType,
    quant::{BlockFormat, FormatVisitor, QuantFormat},
};
use int::{Activations, Like, Rows8};
use std::{cell::RefCell, ops::Range};

/// A worker's panels: kept, so that a step allocates nothing.
struct Panels {
    floats: Vec<f32>,
    bytes: int::Panel,
}

thread_local! {
    static PANELS: RefCell<Panels> =
        RefCell::new(Panels { floats: vec![0f32; dense::PANEL_ELEMS], bytes: int::Panel::new() });
}

/// Weight rows `rows` with the activation rows of `job`; `quantised` holds all activation rows where the
/// weight is to be multiplied as integers.
pub(super) fn run(
    vectors: Vectors,
    job: &Job<'_>,
    quantised: Option<&Activations>,
    weight: &Weight,
    rows: Range<usize>,
) {
    let bytes = weight.bytes().as_slice();
    let call = Call { vectors, job, quantised, bytes, row_bytes: weight.row_bytes(), rows };
    match weight.dtype() {
        WeightType::F32 => call.floats::<dense::F32>(),
        WeightType::F16 => call.floats::<dense::F16>(),
        WeightType::BF16 => call.floats::<dense::BF16>(),
        WeightType::Quant(format) => format.visit(call),
    }
}

/// The arguments of a kernel.
struct Call<'a> {
    vectors: Vectors,
    job: &'a Job<'a>,
    quantised: Option<&'a Activations>,
    bytes: &'a [u8],
    row_bytes: usize,
    rows: Range<usize>,
}

impl FormatVisitor for Call<'_> {
    type Output = ();
    fn visit<F: BlockFormat>(self) {
        let Some(x) = self.quantised else { return self.panels::<dense::Blocks<F>>() };
        let weights = Rows8::new(self.bytes, self.row_bytes, int::unpacker::<F>(self.vectors.isa()));
        // Each arm's constants are the format's: tested below for all formats.
        match F::FORMAT {
            QuantFormat::Q4_0 | QuantFormat::Q4_1 | QuantFormat::Q4_K => {
                self.integers::<Like<32, false, 8>>(x, &weights);
            }
            QuantFormat::Q5_0 | QuantFormat::Q5_1 | QuantFormat::Q5_K => {
                self.integers::<Like<32, false, 4>>(x, &weights);
            }
            QuantFormat::Q8_0 => self.integers::<Like<32, true, 1>>(x, &weights),
            QuantFormat::Q2_K | QuantFormat::Q3_K => self.integers::<Like<16, false, 8>>(x, &weights),
            QuantFormat::Q6_K => self.integers::<Like<16, false, 2>>(x, &weights),
        }
    }
}

/// A function that runs `MODULE::BODY` with the vectors of the level, compiled for it.
macro_rules! per_level {
    ($name:ident = $module:ident::$body:ident<$plain:ident, $avx2:ident, $avx512:ident $(; $g:ident: $bound:path)?>
        ($($arg:ident: $type:ty),*)) => {
        /// # Safety
        /// As the body's; the processor has the instruction set.
        unsafe fn $name$(<$g: $bound>)?(vectors: Vectors, $($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c")]
                unsafe fn avx2$(<$g: $bound>)?($($arg: $type),*) {
                    // SAFETY: the caller's; compiled for what the vectors need.
                    unsafe { $module::$body::<per_level!(@vectors $module $avx2) $(, $g)?>($($arg),*) }
                }
                #[target_feature(
                    enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"
                )]
                unsafe fn avx512$(<$g: $bound>)?($($arg: $type),*) {
                    // SAFETY: the caller's; compiled for what the vectors need.
                    unsafe { $module::$body::<per_level!(@vectors $module $avx512) $(, $g)?>($($arg),*) }
                }
                match vectors {
                    // SAFETY: the caller's: a level is only made where the processor has its features.
                    Vectors::Avx2(_) => return unsafe { avx2$(::<$g>)?($($arg),*) },
                    // SAFETY: as above.
                    Vectors::Avx512(_) => return unsafe { avx512$(::<$g>)?($($arg),*) },
                    Vectors::Plain(_) => {}
                }
            }
            let _ = vectors;
            // SAFETY: the caller's; plain Rust needs no feature.
            unsafe { $module::$body::<per_level!(@vectors $module $plain) $(, $g)?>($($arg),*) }
        }
    };
    (@vectors dense $v:ident) => { simd::$v };
    (@vectors int $v:ident) => { int::$v };
}

per_level!(direct = dense::direct<Plain, Avx2, Avx512; W: dense::Element>(
    job: &Job<'_>, bytes: &[u8], rows: Range<usize>
));
per_level!(fill = dense::fill<Plain, Avx2, Avx512; R: dense::RowSource>(
    block: &dense::Block, bytes: &[u8], row_bytes: usize, panel: &mut [f32]
));
per_level!(multiply = dense::multiply<Plain, Avx2, Avx512>(job: &Job<'_>, block: &dense::Block, panel: &[f32]));
per_level!(few = int::few<Plain, Avx2, Vnni; K: int::Kind>(
    job: &Job<'_>, x: &Activations, weights: &Rows8<'_>, rows: Range<usize>
));
per_level!(int_panel = int::panel<Plain, Avx2, Vnni; K: int::Kind>(
    job: &Job<'_>, x: &Activations, weights: &Rows8<'_>, rows: Range<usize>, panel: &mut int::Panel
));

// SAFETY, for all calls below: a weight holds whole rows of k elements (its invariant), of which `rows`
// are some; a task alone writes its part of the output; a level is only made where it can run.
impl Call<'_> {
    fn floats<W: dense::Element>(self) {
        if self.job.m.len() <= DIRECT_ROWS {
            // SAFETY: as above.
            unsafe { direct::<W>(self.vectors, self.job, self.bytes, self.rows) }
        } else {
            self.panels::<dense::Floats<W>>();
        }
    }

    /// Rows made float32 a panel at a time.
    fn panels<R: dense::RowSource>(self) {
        let k = self.job.k;
        let k_block = dense::k_block(k, R::ALIGN);
        PANELS.with_borrow_mut(|Panels { floats, .. }| {
            for first in self.rows.clone().step_by(dense::PANEL_ROWS) {
                let count = dense::PANEL_ROWS.min(self.rows.end - first);
                for k0 in (0..k).step_by(k_block) {
                    let len = k_block.min(k - k0);
                    let block = dense::Block { k0, len, first, count, last: k0 + len == k };
                    // SAFETY: as above.
                    unsafe {
                        fill::<R>(self.vectors, &block, self.bytes, self.row_bytes, floats);
                        multiply(self.vectors, self.job, &block, floats);
                    }
                }
            }
        });
    }

    /// Integer products.
    fn integers<K: int::Kind>(self, x: &Activations, weights: &Rows8<'_>) {
        if self.job.m.len() <= DIRECT_ROWS {
            // SAFETY: as above.
            return unsafe { few::<K>(self.vectors, self.job, x, weights, self.rows) };
        }
        PANELS.with_borrow_mut(|Panels { bytes, .. }| {
            for first in self.rows.clone().step_by(int::PANEL_ROWS) {
                let rows = first..self.rows.end.min(first + int::PANEL_ROWS);
                // SAFETY: as above.
                unsafe { int_panel::<K>(self.vectors, self.job, x, weights, rows, bytes) };
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use int::Kind;

    #[test]
    fn every_kind_fits_its_formats() {
        fn fits<K: Kind>(formats: &[QuantFormat]) -> usize {
            for f in formats {
                assert_eq!((K::SUB_BLOCK, K::SIGNED), (f.sub_block(), f.signed()), "{f}");
                assert!(K::PAIRS <= int::pairs_before_overflow(f.max_q()), "{f}");
                assert_eq!(K::SIGNED, !f.has_min(), "{f}");
            }
            formats.len()
        }
        use QuantFormat::{Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
        let all = fits::<Like<32, false, 8>>(&[Q4_0, Q4_1, Q4_K])
            + fits::<Like<32, false, 4>>(&[Q5_0, Q5_1, Q5_K])
            + fits::<Like<32, true, 1>>(&[Q8_0])
            + fits::<Like<16, false, 8>>(&[Q2_K, Q3_K])
            + fits::<Like<16, false, 2>>(&[Q6_K]);
        assert_eq!(all, QuantFormat::ALL.len());
    }
}
