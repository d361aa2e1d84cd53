//! Paged attention over keys and values: a plan made once for all layers of a group, and runs of it.

use super::{Plan, PlanMemory, TABLES, bytes_of, check_requests, ordinal, stream};
use crate::{
    CudaExec,
    device::{CudaError, Doing, Result},
    kernels::{cache::CacheLayout, elements::heads},
    modules::{Arg, Kind, Module, TensorArg},
};
use headway_tensor::{DType, Exec, Tensor, TensorMut, TensorRef, View};
use std::sync::Arc;

/// Rows and query heads of a group that a block takes at most, in fa2.
const MOST_ROWS: usize = 128;
/// The least that it takes: a decode's.
const FEWEST_ROWS: usize = 16;
/// Rows that a block takes in fa3, at heads of 64 and at others.
const HOPPER_ROWS: [usize; 2] = [192, 128];
/// Arguments of fa3's plan.
const FA3_PLAN: usize = 16;
/// Arguments of a run that both kinds have, that are left out behind them in each, and all of fa2's.
const RUN: usize = 16;
const LEFT_OUT: [usize; 2] = [8, 4];
const FA2_RUN: usize = RUN + LEFT_OUT[0] + 5;

/// The heads of a group, and its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedShape {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_size: usize,
    /// Tokens in a page.
    pub page_size: usize,
}

impl PagedShape {
    /// Blocks that plans reckon with: two a multiprocessor.
    fn slots(multiprocessors: u32) -> usize {
        2 * multiprocessors as usize
    }

    /// Bytes of partial results: keys are split only where no more than two blocks a multiprocessor come out.
    pub fn float_bytes(&self, multiprocessors: u32) -> usize {
        let rows = Self::slots(multiprocessors) * MOST_ROWS + self.heads;
        rows * (self.head_size + 1) * size_of::<f32>() + TABLES
    }

    /// Bytes of the tables of a plan by a kind of kernels for so many requests with so many new tokens.
    pub fn table_bytes(&self, kind: Kind, multiprocessors: u32, reqs: usize, tokens: usize) -> usize {
        let int = size_of::<i32>();
        if kind == Kind::Fa3 {
            let rows = HOPPER_ROWS[usize::from(self.head_size != 64)];
            let works = (tokens.div_ceil(rows) + reqs) * self.heads;
            return works * 7 * int + (multiprocessors as usize + 1) * int + TABLES;
        }
        let group = self.heads / self.kv_heads.max(1);
        let tiles = reqs + (tokens * group).div_ceil(FEWEST_ROWS);
        let tiles = tiles.max(Self::slots(multiprocessors));
        // Three numbers and a flag a tile; partial results by request and by token.
        tiles * (3 * int + 1) + (reqs + tokens + 4) * int + TABLES
    }
}

/// A batch to plan, on the host.
#[derive(Clone, Copy, Debug)]
pub struct PlanInputs<'a> {
    /// `[reqs + 1]`, tokens.
    pub query_start_loc: &'a [i32],
    /// `[reqs + 1]`, pages.
    pub page_indptr: &'a [i32],
    /// `[reqs]`, tokens.
    pub seq_lens: &'a [i32],
    /// No key after a row's own position.
    pub causal: bool,
    /// Keys before a row's own that it sees; −1: all.
    pub window_left: i32,
    /// One new token a request, and the launch must be the same for all such batches of so many rows.
    pub decode_graph: bool,
}

/// Plans a batch and queues the copy of its tables. `memory` keeps them for the plan's runs: the next plan in it
/// must come behind those in the stream.
///
/// # Errors
/// Lengths that contradict each other; a module of another kind; a capture under way; what the module raises.
pub fn plan(
    cx: &CudaExec,
    module: &Module,
    shape: &PagedShape,
    memory: &mut PlanMemory,
    floats: &Arc<Tensor>,
    x: &PlanInputs<'_>,
) -> Result<Plan> {
    cx.not_recording("a plan")?;
    let reqs = x.seq_lens.len();
    check_requests((x.query_start_loc, x.page_indptr, x.seq_lens), shape.page_size)?;
    let rows = x.query_start_loc[reqs] as i64;
    let kept = [Arc::clone(&memory.tables), Arc::clone(floats)];
    let (tables, floats) = (bytes_of(cx, &memory.tables)?, bytes_of(cx, floats)?);
    let [starts, pages, lens] = [x.query_start_loc, x.page_indptr, x.seq_lens].map(TensorArg::host);
    let len = memory.staging.len();
    let staged = TensorArg::host_bytes(memory.staging.next()?, len);
    let uniform = Arg::Bool(x.decode_graph);
    let args = [
        Arg::Tensor(&floats),
        Arg::Tensor(&tables),
        Arg::Tensor(&staged),
        Arg::Tensor(&starts),
        Arg::Tensor(&pages),
        Arg::Tensor(&lens),
        Arg::Int(rows),
        Arg::Int(reqs as i64),
        Arg::Int(shape.heads as i64),
        Arg::Int(shape.kv_heads as i64),
        Arg::Int(shape.page_size as i64),
        uniform,
        Arg::Int(shape.head_size as i64),
        Arg::Int(shape.head_size as i64),
        Arg::Bool(x.causal),
        Arg::Int(x.window_left.into()),
        // fa2's alone: no fixed pieces, keys may be split, no blocks set aside, new tokens of each request.
        Arg::Int(-1),
        Arg::Bool(false),
        Arg::Int(0),
        Arg::Int(x.decode_graph.into()),
        uniform,
    ];
    let args = if module.entry().kind == Kind::Fa2 { &args[..] } else { &args[..FA3_PLAN] };
    cx.context().bind_to_thread().doing("binding the context")?;
    // SAFETY: the arguments are the function's; host slices and staging outlive the call, and the copy that it queues
    // reads the staging half until the fence; the plan keeps the workspaces.
    let returned = unsafe { module.call("plan", ordinal(cx), stream(cx), args) };
    memory.staging.copied()?;
    let returned = returned?;
    let numbers =
        returned.ints().ok_or_else(|| module.unexpected("plan", &returned, "an array of numbers"))?;
    Ok(Plan { returned, numbers, tables, floats, _memory: kept })
}

/// Page lists and rows of a plan's requests, on the device.
#[derive(Clone, Debug)]
pub struct PagedBatch {
    /// `[reqs + 1]`, tokens.
    pub query_start_loc: View<i32>,
    /// `[reqs + 1]`, pages.
    pub page_indptr: View<i32>,
    /// `[pages]`.
    pub page_indices: View<i32>,
    /// `[reqs]`, tokens in the last page.
    pub last_page_len: View<i32>,
    /// One more than the highest page.
    pub pages_end: usize,
    /// New tokens.
    pub rows: usize,
}

/// A layer's numbers.
#[derive(Clone, Copy, Debug)]
pub struct PagedNumbers {
    /// Factor on the scores.
    pub scale: f32,
    /// Cap of the scores; 0: none.
    pub soft_cap: f32,
    /// Keys before a row's own that it sees; −1: all.
    pub window_left: i32,
    /// No key after a row's own position.
    pub causal: bool,
}

/// Runs a plan on a layer: `q` and `out` are `[rows, heads, head size]`, `out` without gaps.
///
/// # Errors
/// Shapes, devices, alignment; pages past the cache; what the module raises.
pub fn run(
    cx: &CudaExec,
    module: &Module,
    shape: &PagedShape,
    plan: &Plan,
    batch: &PagedBatch,
    numbers: &PagedNumbers,
    q: TensorRef<'_>,
    cache: &CacheLayout<'_>,
    out: TensorMut<'_>,
) -> Result<()> {
    let wrong = |why: String| Err(CudaError::Argument(why));
    let at = cache.strides(cx)?;
    let found = (cache.kv_heads, cache.head_size, cache.block_size);
    if found != (shape.kv_heads, shape.head_size, shape.page_size) || batch.pages_end > cache.num_blocks {
        return wrong(format!(
            "a plan for {shape:?} and pages up to {} over a cache of {} pages with heads, head size and page size {found:?}",
            batch.pages_end, cache.num_blocks
        ));
    }
    let (q_addr, [q_row, q_head]) = heads("queries", q.device_addr(), q, shape.heads, shape.head_size)?;
    let (out_addr, out_strides) =
        heads("output", out.device_addr(), out.as_ref(), shape.heads, shape.head_size)?;
    let width = shape.heads * shape.head_size;
    if out_strides != [width as i64, shape.head_size as i64] {
        return wrong(format!("output with strides {out_strides:?}: FlashInfer writes rows without gaps"));
    }
    let dtypes = [q.dtype(), out.dtype(), cache.dtype];
    if dtypes.iter().any(|&d| crate::modules::module_dtype(d) != Some(module.entry().dtype.as_str())) {
        return wrong(format!(
            "queries, output and cache of {dtypes:?} for a module of {}",
            module.entry().dtype
        ));
    }
    if q.shape()[0] != batch.rows || out.shape()[0] != batch.rows {
        return wrong(format!(
            "{} queries and {} outputs for {} rows",
            q.shape()[0],
            out.shape()[0],
            batch.rows
        ));
    }
    let device = ordinal(cx);
    let (rows, h, d, size) = (batch.rows, shape.heads, shape.head_size, q.dtype().size());
    let page = at.block as usize / size;
    if u32::try_from(page).is_err() {
        return wrong(format!("blocks {page} elements apart: FlashInfer counts them in 32 bits"));
    }
    let (token, head) = (at.token as usize / size, at.head as usize / size);
    let (outer, inner, kv_strides) = match cache.heads_outside {
        true => (shape.kv_heads, cache.block_size, [page, head, token, 1]),
        false => (cache.block_size, shape.kv_heads, [page, token, head, 1]),
    };
    let kv_shape = [cache.num_blocks, outer, inner, d];
    let tensor =
        |addr, shape: &[usize], strides: &[usize]| TensorArg::device(device, addr, q.dtype(), shape, strides);
    let q = tensor(q_addr, &[rows, h, d], &[q_row as usize, q_head as usize, 1]);
    let out = tensor(out_addr, &[rows, h, d], &[width, d, 1]);
    let k = tensor(at.addr, &kv_shape, &kv_strides);
    let v = tensor(at.addr + at.value as u64, &kv_shape, &kv_strides);
    let views = [&batch.query_start_loc, &batch.page_indptr, &batch.page_indices, &batch.last_page_len];
    if views.iter().any(|v| v.device_mem().is_none_or(|m| m.device() != cx.device())) {
        return wrong("page lists that are not on the step's device".into());
    }
    let [starts, indptr, indices, last] =
        views.map(|v| TensorArg::row(device, v.addr(), DType::I32, v.len()));
    let common = [
        Arg::Tensor(&plan.floats),
        Arg::Tensor(&plan.tables),
        Arg::Object(&plan.returned),
        Arg::Tensor(&q),
        Arg::Tensor(&k),
        Arg::Tensor(&v),
        Arg::Tensor(&starts),
        Arg::Tensor(&indptr),
        Arg::Tensor(&indices),
        Arg::Tensor(&last),
        Arg::Tensor(&out),
        // No log-sum-exp.
        Arg::None,
        Arg::Int(numbers.causal.into()),
        Arg::Int(cache.heads_outside.into()),
        Arg::Int(numbers.window_left.into()),
        // On Hopper and later kernels begin while the one in front ends, and wait for it before they read.
        Arg::Bool(cx.info().capability.0 >= 9),
    ];
    let (cap, scale) = (Arg::Float(numbers.soft_cap.into()), Arg::Float(numbers.scale.into()));
    let mut args = [Arg::None; FA2_RUN];
    args[..RUN].copy_from_slice(&common);
    let one = Arg::Float(1.0);
    let args = match module.entry().kind {
        Kind::Fa3 => {
            let (from, to) = (RUN + LEFT_OUT[1], RUN + LEFT_OUT[1] + 4);
            // The values' scale.
            args[from..to].copy_from_slice(&[cap, scale, one, Arg::Int(0)]);
            &args[..to]
        }
        _ => {
            // Rotary positions are not its business: factors of 1.
            args[RUN + LEFT_OUT[0]..].copy_from_slice(&[cap, scale, one, one, Arg::Int(0)]);
            &args[..]
        }
    };
    cx.context().bind_to_thread().doing("binding the context")?;
    // SAFETY: the arguments are the function's; shapes, types, devices and bounds were checked, the page numbers on the
    // host when the plan was made; the plan keeps the workspaces, the views their lists.
    unsafe { module.call("paged_run", device, stream(cx), args) }?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workspaces_hold_what_plans_ask_for() {
        let shape = PagedShape { heads: 32, kv_heads: 8, head_size: 128, page_size: 16 };
        // 264 tiles of 128 rows of 128 and a sum, float32.
        assert_eq!(shape.float_bytes(132), (264 * 128 + 32) * 129 * 4 + 256);
        // Decodes: a tile each.
        assert!(shape.table_bytes(Kind::Fa2, 132, 256, 256) >= 320 * 13);
        // fa3: every tile of 128 rows and every head is a piece of work of 7 numbers.
        assert!(shape.table_bytes(Kind::Fa3, 132, 4, 8192) >= (64 + 3) * 32 * 28);
    }
}
