//! From a task to the kernel compiled for its weight type and the instruction set in force. The one
//! place where `#[target_feature]` functions of the linear layers are called.
//!
//! Not for splitting work: tasks come from the parent module.

use super::{DIRECT_ROWS, Job, dense, simd};
use crate::Isa;
use headway_tensor::{
    Weight, WeightType,
    quant::{BlockFormat, FormatVisitor},
};
use std::{cell::RefCell, ops::Range};

thread_local! {
    /// A worker's panel: kept, so that a step allocates nothing.
    static PANEL: RefCell<Box<[f32; dense::PANEL_ELEMS]>> =
        RefCell::new(vec![0f32; dense::PANEL_ELEMS].try_into().unwrap_or_else(|_| unreachable!("as long")));
}

/// Weight rows `rows` with the activation rows of `job`.
pub(super) fn run(isa: Isa, job: &Job<'_>, weight: &Weight, rows: Range<usize>) {
    let call = Call { isa, job, bytes: weight.bytes().as_slice(), row_bytes: weight.row_bytes(), rows };
    match weight.dtype() {
        WeightType::F32 => call.floats::<dense::F32>(),
        WeightType::F16 => call.floats::<dense::F16>(),
        WeightType::BF16 => call.floats::<dense::BF16>(),
        WeightType::Quant(format) => format.visit(call),
    }
}

/// The arguments of a kernel.
struct Call<'a> {
    isa: Isa,
    job: &'a Job<'a>,
    bytes: &'a [u8],
    row_bytes: usize,
    rows: Range<usize>,
}

impl FormatVisitor for Call<'_> {
    type Output = ();
    fn visit<F: BlockFormat>(self) {
        self.panels::<dense::Blocks<F>>();
    }
}

/// A function that runs `dense::BODY` with the vectors of the instruction set, compiled for it.
macro_rules! per_isa {
    ($body:ident<$bound:ident>($($arg:ident: $type:ty),*)) => {
        /// # Safety
        /// As the body's; the processor has the instruction set.
        unsafe fn $body<G: dense::$bound>(isa: Isa, $($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c")]
                unsafe fn avx2<G: dense::$bound>($($arg: $type),*) {
                    // SAFETY: the caller's; compiled for what the vectors need.
                    unsafe { dense::$body::<simd::Avx2, G>($($arg),*) }
                }
                #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
                unsafe fn avx512<G: dense::$bound>($($arg: $type),*) {
                    // SAFETY: the caller's; compiled for what the vectors need.
                    unsafe { dense::$body::<simd::Avx512, G>($($arg),*) }
                }
                match isa {
                    // SAFETY: the caller's: an `Isa` is only made where the processor has its features.
                    Isa::Avx2 => return unsafe { avx2::<G>($($arg),*) },
                    // SAFETY: as above.
                    Isa::Avx512 | Isa::Avx512Bf16 => return unsafe { avx512::<G>($($arg),*) },
                    _ => {}
                }
            }
            let _ = isa;
            // SAFETY: the caller's; plain Rust needs no feature.
            unsafe { dense::$body::<simd::Plain, G>($($arg),*) }
        }
    };
}

per_isa!(direct<Element>(job: &Job<'_>, bytes: &[u8], rows: Range<usize>));
per_isa!(panel<RowSource>(
    job: &Job<'_>,
    bytes: &[u8],
    row_bytes: usize,
    rows: Range<usize>,
    panel: &mut [f32; dense::PANEL_ELEMS]
));

impl Call<'_> {
    fn floats<W: dense::Element>(self) {
        if self.job.m.len() <= DIRECT_ROWS {
            // SAFETY: the weight holds whole rows of k elements (its invariant), of which `rows` are some;
            // the task alone writes its output; `Isa` values are only made where they can run.
            unsafe { direct::<W>(self.isa, self.job, self.bytes, self.rows) }
        } else {
            self.panels::<dense::Floats<W>>();
        }
    }

    fn panels<R: dense::RowSource>(self) {
        PANEL.with_borrow_mut(|buffer| {
            for first in self.rows.clone().step_by(dense::PANEL_ROWS) {
                let rows = first..self.rows.end.min(first + dense::PANEL_ROWS);
                // SAFETY: as in `floats`.
                unsafe { panel::<R>(self.isa, self.job, self.bytes, self.row_bytes, rows, buffer) };
            }
        });
    }
}
