//! A batch, and the schedule that is made for it once: how many parts each request's keys are divided into.

use super::{
    arguments::{bytes_of, ints, ordinal, stream},
    shape::{FlashShape, Form, MOST_SPLITS, operand},
};
use crate::{
    CudaExec,
    device::{CudaError, Doing, Result},
    modules::extension::{Extension, Place},
};
use headway_ffi_shim::torch::Tensor as Described;
use headway_tensor::{DType, Exec, Tensor, View};
use std::sync::Arc;

/// A batch on the device.
#[derive(Clone, Debug)]
pub struct FlashBatch {
    /// `[reqs + 1]`, tokens.
    pub query_start_loc: View<i32>,
    /// `[reqs]`, tokens.
    pub seq_lens: View<i32>,
    /// `[reqs, table_stride]`, pages.
    pub block_table: View<i32>,
    /// Entries from one row to the next.
    pub table_stride: usize,
    /// One more than the highest page that a request has.
    pub pages_end: usize,
    /// Rows of queries.
    pub rows: usize,
}

impl FlashBatch {
    pub(super) fn reqs(&self) -> usize {
        self.seq_lens.len()
    }

    /// What a kernel reads must be on the device: the block table too, where it is a run's.
    pub(super) fn check(&self, cx: &CudaExec, form: &Form, page_size: usize, is_run: bool) -> Result<()> {
        let reqs = self.reqs();
        let views = [&self.query_start_loc, &self.seq_lens, &self.block_table];
        let wrong = |why: String| Err(CudaError::Argument(format!("FlashAttention-3: {why}")));
        let read = if is_run { &views[..] } else { &views[..2] };
        if read.iter().any(|v| v.device_mem().is_none_or(|m| m.device() != cx.device())) {
            return wrong("a batch that is not on the step's device".into());
        }
        if reqs == 0
            || self.query_start_loc.len() != reqs + 1
            || self.block_table.len() != reqs * self.table_stride
            || self.table_stride == 0
        {
            return wrong(format!(
                "{reqs} requests with {} bounds and a block table of {} entries, {} a row",
                self.query_start_loc.len(),
                self.block_table.len(),
                self.table_stride
            ));
        }
        let tokens = self.table_stride * page_size;
        let counted =
            [form.q_bound, form.k_bound, self.rows, tokens].iter().all(|&n| i32::try_from(n).is_ok());
        if form.k_bound > tokens || form.q_bound == 0 || form.k_bound == 0 || !counted {
            return wrong(format!(
                "up to {} new tokens and {} in {tokens} of a row of pages",
                form.q_bound, form.k_bound
            ));
        }
        if !(1..=MOST_SPLITS).contains(&form.splits) || form.window_left < -1 {
            return wrong(format!("{} parts, a window of {}", form.splits, form.window_left));
        }
        Ok(())
    }
}

/// A schedule: on the device, for every run with its form.
#[derive(Clone, Debug)]
pub struct Schedule {
    pub(super) form: Form,
    pub(super) described: Described,
    _memory: Arc<Tensor>,
}

impl Schedule {
    /// Its form, and where it lies.
    pub fn frozen(&self) -> (Form, u64) {
        (self.form, self.described.data)
    }
}

/// Queues the making of a schedule for keys and values of type `kind`, in memory that the runs before are done with when
/// this is.
///
/// # Errors
/// A batch or form that can't be; memory that is too small; a capture under way; what the kernel throws.
pub fn schedule(
    cx: &CudaExec,
    module: &Extension,
    shape: &FlashShape,
    kind: DType,
    form: Form,
    batch: &FlashBatch,
    memory: &Arc<Tensor>,
) -> Result<Schedule> {
    cx.not_recording("a schedule")?;
    let wrong = |why: String| CudaError::Argument(format!("FlashAttention-3: {why}"));
    shape.check(kind).map_err(wrong)?;
    batch.check(cx, &form, shape.page_size, false)?;
    let kind = operand(kind).ok_or_else(|| wrong(format!("a schedule for {kind}")))?;
    let reqs = batch.reqs();
    let lens = ints(cx, &batch.seq_lens, &[reqs])?;
    let starts = ints(cx, &batch.query_start_loc, &[reqs + 1])?;
    let mut a = module.arguments();
    a.int(reqs as i64).int(form.q_bound as i64).int(form.k_bound as i64);
    a.int(shape.heads as i64)
        .int(shape.kv_heads as i64)
        .int(shape.head_size as i64)
        .int(shape.head_size as i64);
    a.int(kind).tensor(&lens).tensor_or(Some(&starts));
    // Bounds of keys that are not paged, of new keys, lengths of queries, padding on the left.
    a.none(4);
    a.some_int(shape.page_size as i64).int(0).int(form.causal);
    a.int(form.window_left).int(window_right(&form));
    // A soft cap changes no tile; no choice of packed heads, no multiprocessors set aside.
    a.int(false).int(form.splits as i64).none(1).int(0);
    let (addr, bytes) = bytes_of(memory)?;
    let place =
        Place { device: ordinal(cx), stream: stream(cx), first: Some((addr, bytes)), scratch: (addr, 0) };
    cx.context().bind_to_thread().doing("binding the context")?;
    // SAFETY: the arguments are the function's; the lists are the batch's, and the schedule keeps its memory.
    let results = unsafe { module.call("get_scheduler_metadata", &place, a) }?;
    match results[..] {
        [described] if described.data == addr => {
            Ok(Schedule { form, described, _memory: Arc::clone(memory) })
        }
        _ => Err(wrong(format!("{}: a schedule that is {results:?}", module.path().display()))),
    }
}

/// Keys after a row's own that it sees where a window is given; −1: all.
pub(super) fn window_right(form: &Form) -> i32 {
    match form.causal {
        true => 0,
        false => form.window_left,
    }
}
