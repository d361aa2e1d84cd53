//! From a task to the kernel compiled for its weight type and the instruction set in force. The one
//! place where the `#[target_feature]` functions of the linear layers are called.
//!
//! Not for splitting work: tasks come from the parent module.

use super::{DIRECT_ROWS, Job, PACKED_ROWS, Vectors, dense, int, simd};
use crate::CpuExec;
use headway_tensor::{
    Weight, WeightType,
    quant::{BlockFormat, FormatVisitor, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, QuantFormat},
};
use int::{Activations, Layout, Packed};
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

/// Runs an expression with the type that belongs to a format.
macro_rules! with_layout {
    ($format:expr, $l:ident => $body:expr) => {
        with_layout!(@ $format, $l, $body, Q4_0 Q4_0, Q4_1 Q4_1, Q5_0 Q5_0, Q5_1 Q5_1, Q8_0 Q8_0,
            Q2_K Q2K, Q3_K Q3K, Q4_K Q4K, Q5_K Q5K, Q6_K Q6K)
    };
    (@ $format:expr, $l:ident, $body:expr, $($value:ident $type:ident),*) => {
        match $format {
            $(QuantFormat::$value => {
                type $l = $type;
                $body
            })*
        }
    };
}

/// A weight in the form that [`integers`] wants.
pub(super) fn pack(cx: &CpuExec, weight: &Weight, format: QuantFormat) -> Packed {
    with_layout!(format, L => Packed::new::<L>(cx, weight))
}

/// Weight rows `rows`, in float32, with the activation rows of `job`.
pub(super) fn floats(vectors: Vectors, job: &Job<'_>, weight: &Weight, rows: Range<usize>) {
    let call = Floats { vectors, job, bytes: weight.bytes().as_slice(), row_bytes: weight.row_bytes(), rows };
    match weight.dtype() {
        WeightType::F32 => call.rows::<dense::F32>(),
        WeightType::F16 => call.rows::<dense::F16>(),
        WeightType::BF16 => call.rows::<dense::BF16>(),
        WeightType::Quant(format) => format.visit(call),
    }
}

/// Weight rows `rows`, as integers, with the activation rows of `job`, which `x` holds quantised. `rows`
/// starts at a multiple of eight.
pub(super) fn integers(
    vectors: Vectors,
    job: &Job<'_>,
    x: &Activations,
    (weight, format): (&Packed, QuantFormat),
    rows: Range<usize>,
) {
    with_layout!(format, L => rows_of::<L>(vectors, job, x, weight, rows));
}

/// The arguments of a float32 kernel.
struct Floats<'a> {
    vectors: Vectors,
    job: &'a Job<'a>,
    bytes: &'a [u8],
    row_bytes: usize,
    rows: Range<usize>,
}

impl FormatVisitor for Floats<'_> {
    type Output = ();
    fn visit<F: BlockFormat>(self) {
        self.panels::<dense::Blocks<F>>();
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
                    Vectors::Avx2 => return unsafe { avx2$(::<$g>)?($($arg),*) },
                    // SAFETY: as above.
                    Vectors::Avx512 => return unsafe { avx512$(::<$g>)?($($arg),*) },
                    Vectors::Plain => {}
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
per_level!(few = int::few<Plain, Avx2, Vnni; L: Layout>(
    job: &Job<'_>, x: &Activations, weights: &Packed, rows: Range<usize>
));
per_level!(fill_integers = int::fill<Plain, Avx2, Vnni; L: Layout>(
    weights: &Packed, rows: Range<usize>, k0: usize, panel: &mut int::Panel
));
per_level!(tiles = int::tiles<Plain, Avx2, Vnni; K: int::Kind>(
    job: &Job<'_>, x: &Activations, rows: Range<usize>, k: Range<usize>, panel: &int::Panel
));

// SAFETY, for all calls below: a weight holds whole rows of k elements (its invariant), of which `rows`
// are some; a task alone writes its part of the output; a level is only made where it can run.
impl Floats<'_> {
    fn rows<W: dense::Element>(self) {
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
}

/// Integer products.
fn rows_of<L: Layout>(vectors: Vectors, job: &Job<'_>, x: &Activations, weight: &Packed, rows: Range<usize>) {
    if job.m.len() <= PACKED_ROWS {
        // SAFETY: as above.
        return unsafe { few::<L>(vectors, job, x, weight, rows) };
    }
    PANELS.with_borrow_mut(|Panels { bytes, .. }| {
        for first in rows.clone().step_by(int::PANEL_ROWS) {
            let rows = first..rows.end.min(first + int::PANEL_ROWS);
            for k0 in (0..job.k).step_by(int::K_BLOCK) {
                let k = k0..job.k.min(k0 + int::K_BLOCK);
                // SAFETY: as above.
                unsafe {
                    fill_integers::<L>(vectors, weight, rows.clone(), k0, bytes);
                    tiles::<L::Kind>(vectors, job, x, rows.clone(), k, bytes);
                }
            }
        }
    });
}
