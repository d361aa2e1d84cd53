//! Linear layers on the CPU: dense weights stay as they lie in the file (memory-mapped, at any alignment),
//! block-quantised ones are packed for the kernels at load, and so are bfloat16 ones where the processor
//! multiplies bfloat16; activations are float32.
//!
//! [`CpuLinear`] lives as long as the model. A call splits output columns (and, for many tokens, rows)
//! over the threads. Every output element is summed in an order that depends only on the row length,
//! the format and the instruction set: results are batch-invariant always.
//!
//! Not for attention, and not for weights that are written to.

#[cfg(target_arch = "x86_64")]
mod bf16;
mod dense;
mod entry;
mod form;
mod int;
mod lines;
pub(crate) mod runs;
mod simd;

use crate::{CpuExec, Isa, kernels::elementwise::rows::Rows, pool::SharedMut};
use form::{Activations, Packed, with_activations};
use headway_tensor::{DType, Linear, LinearPart, Result, TensorError, Weight, WeightType};
use std::ops::Range;

/// A linear layer: one or more weights with the same input, stacked along the output.
pub struct CpuLinear {
    parts: Vec<Part>,
    k: usize,
    n: usize,
}

struct Part {
    /// The form of the file. Where there is a packed one, it is for single rows alone.
    weight: Weight,
    packed: Packed,
    bias: Option<Vec<f32>>,
    /// First output column.
    first: usize,
}

fn unsupported(text: String) -> TensorError {
    TensorError::Unsupported(text)
}

impl CpuLinear {
    /// Takes the parts in: block-quantised weights are packed, and bfloat16 ones at the levels that multiply
    /// them, unless they are to be computed in float32; of the rest nothing is copied but the biases.
    ///
    /// # Errors
    /// No parts, weights that are not matrices of one row length, biases of another length, a
    /// `compute` that is neither `None` nor float32.
    pub(crate) fn new(cx: &CpuExec, parts: Vec<LinearPart>, compute: Option<DType>) -> Result<Self> {
        if let Some(found) = compute.filter(|&c| c != DType::F32) {
            return Err(TensorError::WrongDType {
                what: "linear layer's arithmetic on the CPU",
                found,
                supported: "float32, or none for the weight's own form",
            });
        }
        let k = parts.first().map(|p| p.weight.cols());
        let k = k.ok_or_else(|| unsupported("a linear layer without weights".into()))?;
        let mut layer = Self { parts: Vec::new(), k, n: 0 };
        for LinearPart { weight, bias } in parts {
            if weight.shape().len() != 2 || weight.cols() != k {
                return Err(TensorError::WrongShape {
                    what: format!("weight '{}' of a linear layer", weight.name()),
                    found: weight.shape().to_vec(),
                    expected: format!("[out, {k}]"),
                });
            }
            if let Some(b) = bias.as_ref().filter(|b| b.elems() != weight.rows()) {
                return Err(TensorError::WrongShape {
                    what: format!("bias '{}' of a linear layer", b.name()),
                    found: b.shape().to_vec(),
                    expected: format!("[{}]", weight.rows()),
                });
            }
            let (first, bias) = (layer.n, bias.map(|b| b.to_f32()));
            layer.n += weight.rows();
            let packed = Packed::new(cx, &weight, compute);
            layer.parts.push(Part { weight, packed, bias, first });
        }
        Ok(layer)
    }

    /// A layer of one dense weight, as it lies.
    ///
    /// # Errors
    /// A block-quantised weight; one that is no matrix.
    pub(crate) fn dense(weight: Weight) -> Result<Self> {
        if matches!(weight.dtype(), WeightType::Quant(_)) || weight.shape().len() != 2 {
            return Err(unsupported(format!("weight '{}' as a dense matrix", weight.name())));
        }
        let (k, n) = (weight.cols(), weight.rows());
        Ok(Self { parts: vec![Part { weight, packed: Packed::No, bias: None, first: 0 }], k, n })
    }

    /// Output columns as a dense weight of their own, `[columns, in_features]`: in the type of the file, sharing its
    /// bytes, or in float32 where that is block-quantised or the columns lie in several parts.
    ///
    /// # Errors
    /// Columns past the end; a layer with biases.
    pub(crate) fn columns(&self, columns: Range<usize>) -> Result<Weight> {
        let wrong = |e: headway_tensor::weight::WeightError| unsupported(e.to_string());
        if self.parts.iter().any(|p| p.bias.is_some()) || columns.end > self.n {
            return Err(unsupported(format!(
                "columns {columns:?} of a layer of {} or one with biases",
                self.n
            )));
        }
        let part = self.parts.iter().rev().find(|p| p.first <= columns.start);
        if let Some(p) = part
            && columns.end <= p.first + p.weight.rows()
            && !matches!(p.weight.dtype(), WeightType::Quant(_))
        {
            return p.weight.slice_rows(columns.start - p.first..columns.end - p.first).map_err(wrong);
        }
        let mut values = vec![0.0; columns.len() * self.k];
        for (row, out) in columns.clone().zip(values.chunks_exact_mut(self.k)) {
            self.row(row, out);
        }
        Weight::from_f32("columns of a stacked weight", vec![columns.len(), self.k], &values).map_err(wrong)
    }

    /// Output column `row` as float32: for embeddings. `out` has `in_features` elements.
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        let part = self.parts.iter().rev().find(|p| p.first <= row);
        if let Some(part) = part
            && let Err(e) = part.weight.dequantize_row(row - part.first, out)
        {
            unreachable!("row and width were checked: {e}");
        }
    }

    /// `out = x · wᵀ + bias`. The callers have checked widths and counts.
    pub(crate) fn forward(&self, cx: &CpuExec, x: &[f32], xs: &Rows, out: &mut [f32], outs: &Rows) {
        let m = xs.count();
        assert!(outs.count() == m && xs.width() == self.k && outs.width() == self.n);
        if m == 0 {
            return;
        }
        let pool = cx.pool();
        let plan = Plan::new(self, m, pool.threads());
        let out = SharedMut::new(out);
        with_activations(cx, self.packed(), x, xs, |converted| {
            let call = Call { vectors: Vectors::of(cx.isa()), x, xs, out, outs, converted };
            pool.run(plan.tasks(), &|task, _| plan.run(self, &call, 0, task));
        });
    }

    /// What the parts keep of their weights.
    fn packed(&self) -> impl Iterator<Item = &Packed> {
        self.parts.iter().map(|p| &p.packed)
    }
}

/// What all tasks of a call share.
struct Call<'a> {
    vectors: Vectors,
    x: &'a [f32],
    xs: &'a Rows,
    out: SharedMut<'a, f32>,
    outs: &'a Rows,
    converted: &'a Activations,
}

/// The vectors of the kernels.
#[derive(Clone, Copy)]
enum Vectors {
    Plain,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// With VNNI, which every processor with [`Isa::Avx512`]'s features but the very first has; there
    /// it is [`Vectors::Avx2`].
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Vectors {
    fn of(isa: Isa) -> Self {
        #[cfg(target_arch = "x86_64")]
        match isa {
            Isa::Avx2 => return Self::Avx2,
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx if is_x86_feature_detected!("avx512vnni") => {
                return Self::Avx512;
            }
            Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => return Self::Avx2,
            _ => {}
        }
        let _ = isa;
        Self::Plain
    }
}

impl Linear for CpuLinear {
    fn in_features(&self) -> usize {
        self.k
    }

    fn out_features(&self) -> usize {
        self.n
    }

    fn bytes(&self) -> usize {
        let of_part = |p: &Part| p.packed.bytes() + p.bias.as_ref().map_or(0, |b| size_of_val(&b[..]));
        self.parts.iter().map(of_part).sum()
    }
}

/// Up to this many activation rows, floating-point weights are converted in registers.
const DIRECT_ROWS: usize = 3;
/// Up to this many, packed weights are unpacked in registers.
const PACKED_ROWS: usize = 4;

/// Bytes ahead of where weights are read that memory is asked for them, at least: rows are worked on
/// several at a time, which the processor's own prefetching does not follow well.
const AHEAD: usize = 4096;

/// Asks memory for the cache line of `p`, which may be any address.
#[inline(always)]
fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64, and a prefetch of any address is harmless.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// How a call for one layer is split: steps of weight rows within each part, times steps of activation rows.
struct Plan {
    row_step: usize,
    m_step: usize,
    m: usize,
    row_tasks: usize,
}

impl Plan {
    fn new(layer: &CpuLinear, m: usize, threads: usize) -> Self {
        let bytes: usize = layer.parts.iter().map(|p| p.weight.bytes().len()).sum();
        let row_bytes = (bytes / layer.n).max(1);
        let row_step = if m <= PACKED_ROWS {
            // Tasks of 64 KiB or more: less is over before another thread has begun.
            layer.n.div_ceil(threads * 8).max((64 << 10) / row_bytes)
        } else {
            layer.n.div_ceil(threads * 4).clamp(16, dense::PANEL_ROWS)
        };
        // Packed weights are in groups of 8 and of 16 rows.
        let row_step = row_step.next_multiple_of(16);
        let row_tasks: usize = layer.parts.iter().map(|p| p.weight.rows().div_ceil(row_step)).sum();
        let m_tasks = (threads * 4).div_ceil(row_tasks).min(m / 48).max(1);
        let m_step = m.div_ceil(m_tasks);
        Self { row_step, m_step, m, row_tasks }
    }

    fn tasks(&self) -> usize {
        self.row_tasks * self.m.div_ceil(self.m_step)
    }

    /// Runs a task of a layer whose activation rows begin at `first`.
    fn run(&self, layer: &CpuLinear, call: &Call<'_>, first: usize, task: usize) {
        let Some((part, rows, m)) = self.task(layer, task) else { return };
        let Call { vectors, x, xs, out, outs, converted } = *call;
        let m = first + m.start..first + m.end;
        let job = Job { x, xs, out, outs, k: layer.k, m, column: part.first, bias: part.bias.as_deref() };
        match &part.packed {
            Packed::Integers(w, format) => {
                entry::integers(vectors, &job, &converted.integers, (w, *format), rows);
            }
            #[cfg(target_arch = "x86_64")]
            Packed::Bf16(w, products) => bf16::multiply(*products, &job, &converted.bf16, w, rows),
            Packed::No => entry::floats(vectors, &job, &part.weight, rows),
        }
    }

    /// Part, weight rows of it, activation rows.
    fn task<'a>(&self, layer: &'a CpuLinear, task: usize) -> Option<(&'a Part, Range<usize>, Range<usize>)> {
        let m = task / self.row_tasks * self.m_step;
        let m = m..self.m.min(m + self.m_step);
        let mut task = task % self.row_tasks;
        for part in &layer.parts {
            let tasks = part.weight.rows().div_ceil(self.row_step);
            if task < tasks {
                let rows = task * self.row_step..part.weight.rows().min((task + 1) * self.row_step);
                return Some((part, rows, m));
            }
            task -= tasks;
        }
        None
    }
}

/// One task's view of a call: activations, output, and which of their rows and columns.
struct Job<'a> {
    x: &'a [f32],
    xs: &'a Rows,
    out: SharedMut<'a, f32>,
    outs: &'a Rows,
    k: usize,
    /// Activation rows of this task.
    m: Range<usize>,
    /// Output column of weight row 0 of the part.
    column: usize,
    bias: Option<&'a [f32]>,
}

impl Job<'_> {
    /// Activation row `m`: exactly k elements.
    #[inline(always)]
    fn x_row(&self, m: usize) -> &[f32] {
        &self.x[self.xs.range(m)][..self.k]
    }

    /// Sums of weight rows `n..` for activation row `m`: put there when they are the first block of
    /// K, added otherwise; after the last block the bias is added.
    ///
    /// # Safety
    /// No other task writes these elements at the same time.
    #[inline(always)]
    unsafe fn put(&self, m: usize, n: usize, sums: &[f32], first: bool, last: bool) {
        let start = self.outs.range(m).start + self.column + n;
        // SAFETY: the caller's.
        let out = unsafe { self.out.slice_mut(start..start + sums.len()) };
        let bias = self.bias.filter(|_| last).map(|b| &b[n..n + sums.len()]);
        for (i, (o, s)) in out.iter_mut().zip(sums).enumerate() {
            let sum = if first { *s } else { *o + s };
            *o = bias.map_or(sum, |b| sum + b[i]);
        }
    }
}

#[cfg(test)]
mod tests;
