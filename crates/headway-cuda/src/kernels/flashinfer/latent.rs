//! Latent attention over pages of latents: keys of `rank + rope` elements whose first `rank` are the values too. All heads
//! of a request lie in the tiles of a persistent launch, as many blocks as multiprocessors, with the merge of divided keys
//! in it; what each block does is in the plan's tables, so that the launch is the same for every batch of alike requests.
//! Such plans do not copy their tables to the device.

use super::{Plan, PlanMemory, TABLES, bytes_of, check_requests, ordinal, stream};
use crate::{
    CudaExec,
    device::{CudaError, Doing, Result},
    kernels::{
        elements::heads,
        mla::{Dims, LatentCache, room},
    },
    modules::{Arg, Module, TensorArg},
};
use headway_tensor::{DType, DeviceMem, Exec, Tensor, TensorRef, View};
use std::sync::Arc;

/// Packed rows of a block.
const ROWS: usize = 64;
/// Pieces of work that the tables hold. FlashInfer does not check it.
const MOST_WORKS: usize = 16384;
/// Tables of so many pieces; and of as many numbers as multiprocessors.
const LARGE_TABLES: usize = 9;
const SMALL_TABLES: usize = 5;

/// The layers of a group, and its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentShape {
    /// The layers' dimensions.
    pub dims: Dims,
    /// Tokens in a page.
    pub page_size: usize,
}

impl LatentShape {
    /// Bytes of partial results: outputs in 16 bits and a sum for two waves of blocks.
    pub fn float_bytes(&self, multiprocessors: u32) -> usize {
        2 * multiprocessors as usize * ROWS * (self.dims.rank * 2 + size_of::<f32>()) + TABLES
    }

    /// Bytes of the tables of a plan, whatever it is for.
    pub fn table_bytes(multiprocessors: u32) -> usize {
        let small = (multiprocessors as usize * size_of::<i32>()).next_multiple_of(16);
        LARGE_TABLES * MOST_WORKS * size_of::<i32>() + SMALL_TABLES * small + TABLES
    }

    /// Tiles of requests with these new tokens: two blocks share one where requests have more than [`ROWS`] rows in the
    /// mean.
    fn tiles(&self, query_start_loc: &[i32]) -> usize {
        let packed = |w: &[i32]| (w[1] - w[0]) as usize * self.dims.heads;
        let reqs = query_start_loc.len().saturating_sub(1).max(1);
        let all: usize = query_start_loc.windows(2).map(packed).sum();
        let rows = if all / reqs > ROWS { 2 * ROWS } else { ROWS };
        query_start_loc.windows(2).map(|w| packed(w).div_ceil(rows)).sum()
    }

    /// Most new tokens of decodes that a plan's tables have room for.
    pub fn most_tokens(&self, multiprocessors: u32) -> usize {
        // More than 64 heads are more than 64 rows in the mean.
        let tiles = if self.dims.heads > ROWS { self.dims.heads.div_ceil(2 * ROWS) } else { 1 };
        MOST_WORKS.saturating_sub(multiprocessors as usize) / tiles
    }
}

/// A batch to plan, on the host.
#[derive(Clone, Copy, Debug)]
pub struct LatentInputs<'a> {
    /// `[reqs + 1]`, tokens.
    pub query_start_loc: &'a [i32],
    /// `[reqs + 1]`, pages.
    pub page_indptr: &'a [i32],
    /// `[reqs]`, tokens.
    pub seq_lens: &'a [i32],
    /// No key after a row's own position: of several new tokens a request.
    pub causal: bool,
}

/// Whether tiles end where tokens do, as the kernels reckon with where a mask is: the newest key of a token that lies in
/// two tiles would be left out.
pub fn divides_tiles(heads: usize) -> bool {
    heads > 0 && (2 * ROWS).is_multiple_of(heads)
}

/// Plans a batch and queues the copy of its tables. `memory` keeps them for the plan's runs: the next plan in it
/// must come behind those in the stream.
///
/// # Errors
/// Lengths that contradict each other; more work than the tables hold; a mask over heads that do not divide tiles; a
/// capture under way; what the module raises.
pub fn plan_latent(
    cx: &CudaExec,
    module: &Module,
    shape: &LatentShape,
    memory: &mut PlanMemory,
    floats: &Arc<Tensor>,
    x: &LatentInputs<'_>,
) -> Result<Plan> {
    cx.not_recording("a plan")?;
    check_requests((x.query_start_loc, x.page_indptr, x.seq_lens), shape.page_size)?;
    let works = shape.tiles(x.query_start_loc) + cx.info().multiprocessors as usize;
    if works > MOST_WORKS {
        return Err(CudaError::Argument(format!(
            "decodes of up to {works} pieces; FlashInfer's tables hold {MOST_WORKS}"
        )));
    }
    let heads = shape.dims.heads;
    if x.causal && !divides_tiles(heads) {
        return Err(CudaError::Argument(format!("several new tokens a request of {heads} heads")));
    }
    let kept = [Arc::clone(&memory.tables), Arc::clone(floats)];
    let (tables, floats) = (bytes_of(cx, &memory.tables)?, bytes_of(cx, floats)?);
    let [starts, pages, lens] = [x.query_start_loc, x.page_indptr, x.seq_lens].map(TensorArg::host);
    let len = memory.staging.len();
    let staged = TensorArg::host_bytes(memory.staging.next()?, len);
    let args = [
        Arg::Tensor(&floats),
        Arg::Tensor(&tables),
        Arg::Tensor(&staged),
        Arg::Tensor(&starts),
        Arg::Tensor(&pages),
        Arg::Tensor(&lens),
        Arg::Int(heads as i64),
        Arg::Int(shape.dims.rank as i64),
        Arg::Bool(x.causal),
    ];
    cx.context().bind_to_thread().doing("binding the context")?;
    // SAFETY: the arguments are the function's; host slices and staging outlive the call, which queues nothing; its tables
    // have room for the work; the plan keeps the workspaces.
    let returned = unsafe { module.call("plan", ordinal(cx), stream(cx), &args) }?;
    let (numbers, staged) = match returned.ints_and_int() {
        Some((numbers, staged)) if usize::try_from(staged).is_ok_and(|n| n <= memory.tables.bytes()) => {
            (numbers, staged as usize)
        }
        _ => {
            return Err(module
                .unexpected("plan", &returned, "an array of numbers and a number of bytes")
                .into());
        }
    };
    // SAFETY: the tables have room for so many bytes, and the plan keeps them.
    unsafe { memory.staging.copy(tables.addr(), staged) }?;
    Ok(Plan { returned, numbers, tables, floats, _memory: kept })
}

/// Page lists and rows of a plan's requests.
#[derive(Clone, Debug)]
pub struct LatentBatch {
    /// `[pages]`, on the device.
    pub page_indices: View<i32>,
    /// One more than the highest page.
    pub pages_end: usize,
    /// New tokens.
    pub rows: usize,
    /// As planned.
    pub causal: bool,
}

/// Runs a plan on a layer: weighted latents into `out`, `[rows, heads, rank]`, of queries in the latent space `q_latent`
/// of the same shape and rotated parts that lie in `q`, `[rows, heads, nope + rope]`.
///
/// # Errors
/// Shapes, types, devices, alignment; pages past the cache; what the module raises.
pub fn run_latent(
    cx: &CudaExec,
    module: &Module,
    (shape, plan, batch): (&LatentShape, &Plan, &LatentBatch),
    scale: f32,
    (q_latent, q): (&Arc<dyn DeviceMem>, TensorRef<'_>),
    cache: &LatentCache<'_>,
    out: &Arc<dyn DeviceMem>,
) -> Result<()> {
    let wrong = |why: String| Err(CudaError::Argument(why));
    let (d, size, entry) = (&shape.dims, q.dtype().size(), module.entry());
    if (d.rank, d.latent(), shape.page_size) != (entry.head_size, cache.width, cache.block_size)
        || batch.pages_end > cache.num_blocks
    {
        return wrong(format!(
            "a plan for {shape:?} and pages up to {} by a module for latents of {} over a cache of {} pages of {} rows of {}",
            batch.pages_end, entry.head_size, cache.num_blocks, cache.block_size, cache.width
        ));
    }
    if [q.dtype(), cache.dtype].iter().any(|&t| crate::modules::module_dtype(t) != Some(&entry.dtype)) {
        return wrong(format!(
            "queries of {} and a cache of {} for a module of {}",
            q.dtype(),
            cache.dtype,
            entry.dtype
        ));
    }
    let (q_addr, [q_token, q_head]) = heads("queries", q.device_addr(), q, d.heads, d.qk())?;
    if q.shape()[0] < batch.rows {
        return wrong(format!("{} queries for {} rows", q.shape()[0], batch.rows));
    }
    let pages = &batch.page_indices;
    if pages.device_mem().is_none_or(|m| m.device() != cx.device()) {
        return wrong("a page list that is not on the step's device".into());
    }
    let page = cache.block_stride / size;
    if u32::try_from(page).is_err() || !cache.block_stride.is_multiple_of(16) {
        return wrong(format!(
            "blocks {} bytes apart: FlashInfer counts elements in 32 bits and reads 16 bytes at once",
            cache.block_stride
        ));
    }
    let device = ordinal(cx);
    let latents = batch.rows * d.heads * d.rank * size;
    let tensor = |addr: u64, shape: [usize; 3], [a, b]: [usize; 2]| {
        TensorArg::device(device, addr, q.dtype(), &shape, &[a, b, 1])
    };
    let rows = |width| [batch.rows, d.heads, width];
    let of_cache = |width| [cache.num_blocks, cache.block_size, width];
    let (packed, row) = ([d.heads * d.rank, d.rank], [page, cache.width]);
    let q_at = room(cx, "queries in the latent space", q_latent, latents)?;
    let out_at = room(cx, "weighted latents", out, latents)?;
    let at = cache.addr(cx)?;
    let q_nope = tensor(q_at, rows(d.rank), packed);
    let q_rope = tensor(q_addr + (d.nope * size) as u64, rows(d.rope), [q_token as usize, q_head as usize]);
    let ckv = tensor(at, of_cache(d.rank), row);
    let kpe = tensor(at + (d.rank * size) as u64, of_cache(d.rope), row);
    let out = tensor(out_at, rows(d.rank), packed);
    let indices = TensorArg::row(device, pages.addr(), DType::I32, pages.len());
    let args = [
        Arg::Tensor(&plan.floats),
        Arg::Tensor(&plan.tables),
        Arg::Item(&plan.returned, 0),
        Arg::Tensor(&q_nope),
        Arg::Tensor(&q_rope),
        Arg::Tensor(&ckv),
        Arg::Tensor(&kpe),
        Arg::Tensor(&indices),
        Arg::Tensor(&out),
        // No log-sum-exp, so no base of it.
        Arg::None,
        Arg::Int(batch.causal.into()),
        Arg::Int(d.heads as i64),
        Arg::Int(shape.page_size as i64),
        Arg::Float(scale.into()),
        Arg::Bool(false),
        // Scales of caches in 8 bits.
        Arg::Float(1.0),
        Arg::Float(1.0),
        Arg::None,
    ];
    cx.context().bind_to_thread().doing("binding the context")?;
    // SAFETY: the arguments are the function's; shapes, types, devices and bounds were checked, the page numbers on the
    // host when the plan was made; the plan keeps the workspaces, the views their lists.
    unsafe { module.call("run", device, stream(cx), &args) }?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(heads: usize) -> LatentShape {
        LatentShape { dims: Dims { heads, nope: 128, rope: 64, rank: 512, v: 128 }, page_size: 16 }
    }

    #[test]
    fn workspaces_hold_what_plans_ask_for() {
        // Nine tables of 16384 numbers, five of a number a multiprocessor.
        assert_eq!(LatentShape::table_bytes(132), 9 * 65536 + 5 * 528 + 256);
        // Two waves of 66 pairs of blocks, 128 rows each: 512 outputs of 16 bits and a sum.
        assert_eq!(shape(128).float_bytes(132), 2 * 66 * 128 * (1024 + 4) + 256);
    }

    #[test]
    fn tiles_are_of_64_rows_or_of_128_where_requests_have_more() {
        assert_eq!(shape(16).tiles(&[0, 1, 2, 3]), 3);
        assert_eq!(shape(128).tiles(&[0, 1, 2, 3]), 3);
        assert_eq!(shape(16).tiles(&[0, 4, 8]), 2);
        // 80 and 16 rows: 48 in the mean.
        assert_eq!(shape(16).tiles(&[0, 5, 6]), 3);
        assert_eq!(shape(16).tiles(&[0, 9, 18]), 4);
        assert_eq!(shape(256).tiles(&[0, 1]), 2);
        assert_eq!([16, 64, 128, 256].map(|h| shape(h).most_tokens(132)), [16252, 16252, 16252, 8126]);
    }

    #[test]
    fn heads_that_tiles_are_divided_by() {
        let of: Vec<usize> = (0..=256).filter(|&h| divides_tiles(h)).collect();
        assert_eq!(of, [1, 2, 4, 8, 16, 32, 64, 128]);
    }
}
