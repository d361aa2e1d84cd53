//! FlashAttention-3's paged attention out of vLLM's extension module: a schedule made once for all layers of a group, and
//! runs of it. The functions and the order of their arguments are those of [`VLLM`](crate::modules::extension::VLLM).
//!
//! What the kernels are given is checked here, so that nothing is left for them to refuse; what they throw all the same is
//! an error (`modules/extension/catch.rs`).

use super::{cache::CacheLayout, elements::heads};
use crate::{
    CudaExec,
    device::{CudaError, Doing, Result},
    modules::extension::{Extension, Place},
};
use headway_ffi_shim::torch::{Tensor as Described, dtype};
use headway_tensor::{DType, Exec, Tensor, TensorMut, TensorRef, View};
use std::{ffi::c_void, sync::Arc};

/// Places of the kernels' own tensors begin at multiples of so many bytes.
const ALIGNED: usize = 256;
/// Most requests of a batch whose keys are divided.
const MOST_DIVIDED: usize = 992;
/// Most parts of a request's keys.
pub const MOST_SPLITS: usize = 32;
/// Most query heads of a layer with sinks.
pub const MOST_HEADS_WITH_SINKS: usize = 64;

/// The heads of a group, and its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlashShape {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_size: usize,
    /// Tokens in a page.
    pub page_size: usize,
}

impl FlashShape {
    /// Query heads of a key/value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    /// Whether there are kernels for it.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> std::result::Result<(), String> {
        let Self { heads, kv_heads, head_size, page_size } = *self;
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(format!("{heads} query heads for {kv_heads} of keys and values"));
        }
        if head_size == 0 || head_size > 256 || !head_size.is_multiple_of(8) {
            return Err(format!("heads of {head_size}: multiples of 8 up to 256 are supported"));
        }
        if page_size == 0 || !page_size.is_multiple_of(16) {
            return Err(format!("pages of {page_size} tokens: multiples of 16 are supported"));
        }
        Ok(())
    }

    /// Bytes of partial results of so many tokens, by the number of parts, and of the sums of all rows.
    pub fn scratch_bytes(&self, tokens: usize, splits: usize) -> usize {
        let sums = (self.heads * tokens * 4).next_multiple_of(ALIGNED);
        let parts = self.heads * tokens * splits * 4;
        match splits {
            0 | 1 => sums,
            _ => sums + (parts * self.head_size).next_multiple_of(ALIGNED) + parts.next_multiple_of(ALIGNED),
        }
    }

    /// Numbers of a schedule of so many requests, at most.
    pub fn schedule_len(reqs: usize) -> usize {
        reqs.next_multiple_of(4) * 4 + 1
    }
}

/// What decides the form of a launch. Schedule and runs must have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    /// At least the new tokens of each request.
    pub q_bound: usize,
    /// At least the tokens of each request.
    pub k_bound: usize,
    /// Most parts of a request's keys.
    pub splits: usize,
    /// No key after a row's own position.
    pub causal: bool,
    /// Keys before a row's own that it sees; −1: all.
    pub window_left: i32,
}

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
    fn reqs(&self) -> usize {
        self.seq_lens.len()
    }

    /// What a kernel reads must be on the device: the block table too, where it is a run's.
    fn check(&self, cx: &CudaExec, form: &Form, page_size: usize, is_run: bool) -> Result<()> {
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
    form: Form,
    described: Described,
    _memory: Arc<Tensor>,
}

impl Schedule {
    /// Its form, and where it lies.
    pub fn frozen(&self) -> (Form, u64) {
        (self.form, self.described.data)
    }
}

fn ordinal(cx: &CudaExec) -> u32 {
    cx.device().index
}

fn stream(cx: &CudaExec) -> *mut c_void {
    cx.stream().cu_stream().cast()
}

/// The number of an element type; `None` for one that no kernel takes.
pub fn element(dtype: DType) -> Option<i32> {
    match dtype {
        DType::BF16 => Some(dtype::BF16),
        DType::F16 => Some(dtype::F16),
        _ => None,
    }
}

fn described(cx: &CudaExec, addr: u64, kind: i32, sizes: &[usize]) -> Result<Described> {
    let mut of = [0; 4];
    of.iter_mut().zip(sizes).for_each(|(to, &n)| *to = n as i64);
    Described::contiguous(addr, kind, ordinal(cx) as i32, &of[..sizes.len().min(4)])
        .ok_or_else(|| CudaError::Argument(format!("FlashAttention-3: a tensor of {sizes:?}")))
}

fn ints(cx: &CudaExec, x: &View<i32>, sizes: &[usize]) -> Result<Described> {
    described(cx, x.addr(), dtype::I32, sizes)
}

/// With other strides, in elements.
fn strided(mut x: Described, strides: &[usize]) -> Described {
    x.strides.iter_mut().zip(strides).for_each(|(to, &s)| *to = s as i64);
    x
}

fn bytes_of(x: &Tensor) -> Result<(u64, u64)> {
    let addr = x.view().device_addr().ok_or_else(|| CudaError::Argument("a workspace on the host".into()))?;
    Ok((addr, x.bytes() as u64))
}

/// Queues the making of a schedule, in memory that the runs before are done with when this is.
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
    shape.check().map_err(wrong)?;
    batch.check(cx, &form, shape.page_size, false)?;
    let kind = element(kind).ok_or_else(|| wrong(format!("a schedule for {kind}")))?;
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
fn window_right(form: &Form) -> i32 {
    match form.causal {
        true => 0,
        false => form.window_left,
    }
}

/// A layer's numbers.
#[derive(Clone, Copy, Debug)]
pub struct FlashNumbers<'a> {
    /// Factor on the scores.
    pub scale: f32,
    /// Cap of the scores; 0: none.
    pub soft_cap: f32,
    /// Sink of each query head, bfloat16.
    pub sinks: Option<&'a View<u16>>,
}

/// Runs a layer: `q` and `out` are `[rows, heads, head size]`. `lse`, `[heads, rows]` of float32 without gaps, gets the
/// natural log of each row's softmax denominator. `scratch` is for this run: the next may have the same.
///
/// # Errors
/// Shapes, devices, types, alignment; pages past the cache; too little scratch memory; what the kernel throws.
pub fn run(
    cx: &CudaExec,
    module: &Extension,
    shape: &FlashShape,
    form: &Form,
    batch: &FlashBatch,
    schedule: Option<&Schedule>,
    numbers: &FlashNumbers<'_>,
    q: TensorRef<'_>,
    cache: &CacheLayout<'_>,
    out: TensorMut<'_>,
    scratch: &Tensor,
    lse: Option<TensorMut<'_>>,
) -> Result<()> {
    let wrong = |why: String| CudaError::Argument(format!("FlashAttention-3: {why}"));
    shape.check().map_err(wrong)?;
    batch.check(cx, form, shape.page_size, true)?;
    let at = cache.strides(cx)?;
    let found = (cache.kv_heads, cache.head_size, cache.block_size);
    if found != (shape.kv_heads, shape.head_size, shape.page_size) || batch.pages_end > cache.num_blocks {
        return Err(wrong(format!(
            "{shape:?} and pages up to {} over a cache of {} pages with heads, head size and page size {found:?}",
            batch.pages_end, cache.num_blocks
        )));
    }
    let (q_addr, [q_row, q_head]) = heads("queries", q.device_addr(), q, shape.heads, shape.head_size)?;
    let (out_addr, [out_row, out_head]) =
        heads("output", out.device_addr(), out.as_ref(), shape.heads, shape.head_size)?;
    let kind = element(q.dtype()).filter(|_| q.dtype() == out.dtype() && q.dtype() == cache.dtype);
    let kind = kind.ok_or_else(|| {
        let all = [q.dtype(), out.dtype(), cache.dtype];
        wrong(format!(
            "queries, output and cache of {all:?}: bfloat16 and float16 are supported, of one type"
        ))
    })?;
    let rows = batch.rows;
    if q.shape()[0] != rows || out.shape()[0] != rows {
        return Err(wrong(format!(
            "{} queries and {} outputs for {rows} rows",
            q.shape()[0],
            out.shape()[0]
        )));
    }
    if rows == 0 {
        return Ok(());
    }
    if schedule.is_some_and(|s| s.form != *form) {
        return Err(wrong(format!("a schedule for {:?} in a run with {form:?}", schedule.map(|s| s.form))));
    }
    let sinks = numbers.sinks.map(|s| (s, s.device_mem().map(|m| m.device())));
    if let Some((s, on)) = sinks
        && (s.len() != shape.heads || on != Some(cx.device()) || shape.heads > MOST_HEADS_WITH_SINKS)
    {
        return Err(wrong(format!(
            "{} sinks on {on:?} for {} heads: one for each on the step's device, {MOST_HEADS_WITH_SINKS} at most",
            s.len(),
            shape.heads
        )));
    }
    let lse = lse.map(|l| {
        match (l.device_addr(), l.dtype(), l.shape() == [shape.heads, rows], l.strides() == [rows, 1]) {
            (Some(addr), DType::F32, true, true) => Ok((addr, (shape.heads * rows * 4) as u64)),
            _ => Err(wrong(format!(
                "sums {:?} of {}, expected [{}, {rows}] of float32",
                l.shape(),
                l.dtype(),
                shape.heads
            ))),
        }
    });
    let lse = lse.transpose()?;
    let size = q.dtype().size();
    let (page, token, head) = (at.block as usize / size, at.token as usize / size, at.head as usize / size);
    let sizes = [rows, shape.heads, shape.head_size];
    let q = strided(described(cx, q_addr, kind, &sizes)?, &[q_row as usize, q_head as usize, 1]);
    let out = strided(described(cx, out_addr, kind, &sizes)?, &[out_row as usize, out_head as usize, 1]);
    let pages = [cache.num_blocks, shape.page_size, shape.kv_heads, shape.head_size];
    let paged =
        |addr| Ok::<_, CudaError>(strided(described(cx, addr, kind, &pages)?, &[page, token, head, 1]));
    let (k, v) = (paged(at.addr)?, paged(at.addr + at.value as u64)?);
    let reqs = batch.reqs();
    let starts = ints(cx, &batch.query_start_loc, &[reqs + 1])?;
    let lens = ints(cx, &batch.seq_lens, &[reqs])?;
    let table = ints(cx, &batch.block_table, &[reqs, batch.table_stride])?;
    let sinks = sinks.map(|(s, _)| described(cx, s.addr(), dtype::BF16, &[shape.heads])).transpose()?;
    let mut a = module.arguments();
    a.tensor(&q).tensor(&k).tensor(&v);
    // New keys and values, queries of a latent part.
    a.none(3).tensor_or(Some(&out)).tensor_or(Some(&starts));
    // Bounds of keys that are not paged, of new keys; lengths of queries.
    a.none(3).tensor_or(Some(&lens)).some_int(form.q_bound as i64).some_int(form.k_bound as i64);
    a.tensor_or(Some(&table));
    // Batch indices, padding on the left, three of rotary positions, three scales of 8-bit floats.
    a.none(8).float(numbers.scale).int(form.causal).int(form.window_left).int(window_right(form));
    a.float(numbers.soft_cap).int(true).tensor_or(schedule.map(|s| &s.described));
    a.int(form.splits as i64).none(1).int(0).tensor_or(sinks.as_ref());
    // One rank of context parallelism.
    a.int(1).int(0).none(1);
    let place = Place { device: ordinal(cx), stream: stream(cx), first: lse, scratch: bytes_of(scratch)? };
    cx.context().bind_to_thread().doing("binding the context")?;
    // SAFETY: the arguments are the function's; shapes, types, devices and bounds were checked, the page numbers on the
    // host when the metadata was made; views and tensors keep what is named, and the stream orders who uses it.
    unsafe { module.call("fwd", &place, a) }?;
    Ok(())
}

/// Most parts of a request's keys in batches of so many requests.
pub fn most_splits(multiprocessors: u32, shape: &FlashShape, reqs: usize) -> usize {
    match reqs > MOST_DIVIDED {
        true => 1,
        false => (multiprocessors as usize / shape.kv_heads.max(1)).clamp(1, MOST_SPLITS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: FlashShape = FlashShape { heads: 32, kv_heads: 8, head_size: 128, page_size: 16 };

    #[test]
    fn scratch_holds_sums_and_parts() {
        assert_eq!(SHAPE.scratch_bytes(256, 1), 32 * 256 * 4);
        assert_eq!(SHAPE.scratch_bytes(256, 16), 32 * 256 * 4 * (1 + 16 + 16 * 128));
        assert_eq!((FlashShape::schedule_len(1), FlashShape::schedule_len(256)), (17, 1025));
        let splits = [1, 8, 64, 256].map(|kv_heads| most_splits(132, &FlashShape { kv_heads, ..SHAPE }, 4));
        assert_eq!(splits, [32, 16, 2, 1]);
        assert_eq!(most_splits(132, &SHAPE, 993), 1);
    }

    #[test]
    fn shapes_without_kernels_are_refused() {
        assert_eq!(SHAPE.check(), Ok(()));
        for wrong in [
            FlashShape { head_size: 264, ..SHAPE },
            FlashShape { head_size: 100, ..SHAPE },
            FlashShape { page_size: 8, ..SHAPE },
            FlashShape { heads: 30, ..SHAPE },
            FlashShape { kv_heads: 0, ..SHAPE },
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
    }
}
