//! A layer's launch.

use super::{
    super::{cache::CacheLayout, elements::heads},
    arguments::{bytes_of, described, ints, ordinal, stream, strided},
    schedule::{FlashBatch, Schedule, window_right},
    shape::{FlashShape, Form, MOST_HEADS_WITH_SINKS, operand, output},
};
use crate::{
    CudaExec,
    device::{CudaError, Doing, Result},
    modules::extension::{Extension, Place},
};
use headway_ffi_shim::torch::{Tensor as Described, dtype};
use headway_tensor::{DType, DeviceMem, Exec, Tensor, TensorMut, TensorRef, View};
use std::sync::Arc;

/// A layer's numbers.
#[derive(Clone, Copy, Debug)]
pub struct FlashNumbers<'a> {
    /// Factor on the scores.
    pub scale: f32,
    /// Cap of the scores; 0: none.
    pub soft_cap: f32,
    /// Sink of each query head, bfloat16.
    pub sinks: Option<&'a View<u16>>,
    /// Factors that turn 8-bit queries, keys and values into numbers, on the device. Taken where the cache is in 8 bits.
    pub scales: Option<&'a View<f32>>,
}

/// A layer's queries.
#[derive(Clone, Copy)]
pub enum Queries<'a> {
    /// Of the cache's type.
    Rows(TensorRef<'a>),
    /// e4m3, without gaps.
    Codes(&'a Arc<dyn DeviceMem>),
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
    q: Queries<'_>,
    cache: &CacheLayout<'_>,
    out: TensorMut<'_>,
    scratch: &Tensor,
    lse: Option<TensorMut<'_>>,
) -> Result<()> {
    let wrong = |why: String| CudaError::Argument(format!("FlashAttention-3: {why}"));
    shape.check(cache.dtype).map_err(wrong)?;
    batch.check(cx, form, shape.page_size, true)?;
    let at = cache.strides(cx)?;
    let found = (cache.kv_heads, cache.head_size, cache.block_size);
    if found != (shape.kv_heads, shape.head_size, shape.page_size) || batch.pages_end > cache.num_blocks {
        return Err(wrong(format!(
            "{shape:?} and pages up to {} over a cache of {} pages with heads, head size and page size {found:?}",
            batch.pages_end, cache.num_blocks
        )));
    }
    let rows = batch.rows;
    let (q, q_type) = queries(cx, shape, q, rows)?;
    let (out_addr, [out_row, out_head]) =
        heads("output", out.device_addr(), out.as_ref(), shape.heads, shape.head_size)?;
    let kind = operand(q_type).filter(|_| q_type == cache.dtype && out.dtype() == output(q_type));
    let kind = kind.ok_or_else(|| {
        let all = [q_type, cache.dtype, out.dtype()];
        wrong(format!(
            "queries, cache and output of {all:?}: bfloat16 and float16 are supported, of one type, and e4m3 with outputs \
             of bfloat16"
        ))
    })?;
    if out.shape()[0] != rows {
        return Err(wrong(format!("{} outputs for {rows} rows", out.shape()[0])));
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
    let scales = numbers.scales.filter(|_| cache.dtype == DType::F8E4M3);
    if (cache.dtype == DType::F8E4M3) != scales.is_some()
        || scales.is_some_and(|s| s.len() != 3 || s.device_mem().map(|m| m.device()) != Some(cx.device()))
    {
        return Err(wrong("an 8-bit cache without three scales on the step's device".into()));
    }
    let size = cache.dtype.size();
    let (page, token, head) = (at.block as usize / size, at.token as usize / size, at.head as usize / size);
    let sizes = [rows, shape.heads, shape.head_size];
    let out_kind = operand(out.dtype()).unwrap_or(kind);
    let out = strided(described(cx, out_addr, out_kind, &sizes)?, &[out_row as usize, out_head as usize, 1]);
    let pages = [cache.num_blocks, shape.page_size, shape.kv_heads, shape.head_size];
    let paged =
        |addr| Ok::<_, CudaError>(strided(described(cx, addr, kind, &pages)?, &[page, token, head, 1]));
    let (k, v) = (paged(at.addr)?, paged(at.addr + at.value as u64)?);
    let reqs = batch.reqs();
    let starts = ints(cx, &batch.query_start_loc, &[reqs + 1])?;
    let lens = ints(cx, &batch.seq_lens, &[reqs])?;
    let table = ints(cx, &batch.block_table, &[reqs, batch.table_stride])?;
    let sinks = sinks.map(|(s, _)| described(cx, s.addr(), dtype::BF16, &[shape.heads])).transpose()?;
    // One number each for all requests and heads: strides of 0.
    let scale = |i: usize| {
        let of = |s: &View<f32>| {
            let all = described(cx, s.addr() + 4 * i as u64, dtype::F32, &[reqs, shape.kv_heads])?;
            Ok::<_, CudaError>(strided(all, &[0, 0]))
        };
        scales.map(of).transpose()
    };
    let scales = [scale(0)?, scale(1)?, scale(2)?];
    let mut a = module.arguments();
    a.tensor(&q).tensor(&k).tensor(&v);
    // New keys and values, queries of a latent part.
    a.none(3).tensor_or(Some(&out)).tensor_or(Some(&starts));
    // Bounds of keys that are not paged, of new keys; lengths of queries.
    a.none(3).tensor_or(Some(&lens)).some_int(form.q_bound as i64).some_int(form.k_bound as i64);
    a.tensor_or(Some(&table));
    // Batch indices, padding on the left, three of rotary positions.
    a.none(5);
    for scale in &scales {
        a.tensor_or(scale.as_ref());
    }
    a.float(numbers.scale).int(form.causal).int(form.window_left).int(window_right(form));
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

/// Queries as the library gets them, and their type.
fn queries(cx: &CudaExec, shape: &FlashShape, q: Queries<'_>, rows: usize) -> Result<(Described, DType)> {
    let wrong = |why: String| CudaError::Argument(format!("FlashAttention-3: {why}"));
    let sizes = [rows, shape.heads, shape.head_size];
    match q {
        Queries::Rows(q) => {
            let (addr, [row, head]) = heads("queries", q.device_addr(), q, shape.heads, shape.head_size)?;
            if q.shape()[0] != rows {
                return Err(wrong(format!("{} queries for {rows} rows", q.shape()[0])));
            }
            // A type that there are no kernels for is refused with the others.
            let kind = operand(q.dtype()).unwrap_or(dtype::U8);
            Ok((strided(described(cx, addr, kind, &sizes)?, &[row as usize, head as usize, 1]), q.dtype()))
        }
        Queries::Codes(codes) => {
            if codes.device() != cx.device() || codes.bytes() < sizes.iter().product() {
                return Err(wrong(format!("{} bytes of codes for queries {sizes:?}", codes.bytes())));
            }
            Ok((described(cx, codes.addr(), dtype::F8E4M3, &sizes)?, DType::F8E4M3))
        }
    }
}
