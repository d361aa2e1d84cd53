//! Mamba-2 layers (Dao and Gu, 2024, arXiv 2405.21060): causal convolution with a state, a scan in chunks for prefills,
//! single steps for decodes, whose cost is that of the state whatever the context.
//!
//! [`Lists`] describes a step once for all layers; [`mix`] runs a layer over them.

mod kernels;
mod lists;
mod shape;

pub use kernels::{LayerKernels, layer_specs, specs};
pub use lists::{Bounds, Chunk, Lists, Request, Segment};
pub use shape::{CHUNK, MAX_CONV_KERNEL, MAX_STATE, StatePage};

use self::{
    kernels::{CONV_BLOCK, Form, STEP_BLOCK, STEP_ROWS},
    shape::SCAN_THREADS,
};
use super::{kernel_params, ops::rows::Rows};
use crate::{
    CudaExec,
    device::{CudaError, Result},
};
use headway_tensor::{DType, DeviceMem, Exec, Tensor, TensorError, TensorMut, TensorRef, View};
use std::sync::Arc;

kernel_params! {
    struct Params {
        x: u64, out: u64, cache: u64, rows: u64,
        conv_weight: u64, conv_bias: u64, a: u64, d: u64, dt_bias: u64,
        requests: u64, chunks: u64, segments: u64, parts: u64, decays: u64,
        x_row: i64, out_row: i64, rows_row: i64, block_stride: i64, ssm_offset: i64,
        first_request: i32, count: i32, conv_dim: i32, heads: i32, heads_per_group: i32, pairs: i32,
        dt_least: f32, dt_most: f32,
    }
}

/// One layer's numbers, float32, on the device.
#[derive(Clone, Debug)]
pub struct Numbers {
    /// `[conv_kernel, conv_dim]`: tap after tap.
    pub conv_weight: Arc<dyn DeviceMem>,
    /// `[conv_dim]`.
    pub conv_bias: Option<Arc<dyn DeviceMem>>,
    /// `[heads]`: decay, below 0.
    pub a: Arc<dyn DeviceMem>,
    /// `[heads]`: skip weights.
    pub d: Arc<dyn DeviceMem>,
    /// `[heads]`.
    pub dt_bias: Arc<dyn DeviceMem>,
    /// Least and most of dt after its softplus.
    pub dt_limit: (f32, f32),
}

/// A layer's states: block b begins `offset + b * block_stride` bytes into the cache.
#[derive(Clone, Copy, Debug)]
pub struct StateCache<'a> {
    /// The buffer that it lies in.
    pub memory: &'a Arc<dyn DeviceMem>,
    /// Bytes before block 0.
    pub offset: usize,
    /// Bytes from one block to the next.
    pub block_stride: usize,
    /// Blocks.
    pub num_blocks: usize,
    /// What a block holds.
    pub page: StatePage,
}

/// What the kernels of a group leave for one another in one call; layers run one after another.
#[derive(Debug)]
pub struct Workspace {
    /// `[max_num_tokens, row]`, of two-byte elements: the convolution's output. Its padding is zero.
    rows: Tensor,
    /// `[slots, part]`, float32.
    parts: Tensor,
    /// `[slots, heads]`, float32.
    decays: Tensor,
    page: StatePage,
}

impl Workspace {
    /// Memory for steps within these bounds.
    ///
    /// # Errors
    /// No memory.
    pub fn new(cx: &CudaExec, page: &StatePage, bounds: &Bounds) -> Result<Self> {
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(cx, dtype, shape);
        Ok(Self {
            rows: zeros(DType::BF16, &[bounds.max_num_tokens, page.row()])?,
            parts: zeros(DType::F32, &[bounds.slots(), page.part()])?,
            decays: zeros(DType::F32, &[bounds.slots(), page.dims.heads])?,
            page: *page,
        })
    }

    /// Bytes that [`Workspace::new`] asks for.
    pub fn bytes(page: &StatePage, bounds: &Bounds) -> usize {
        2 * bounds.max_num_tokens * page.row() + 4 * bounds.slots() * (page.part() + page.dims.heads)
    }

    /// Where it lies, for fingerprints.
    pub fn addr(&self) -> u64 {
        addr(&self.rows)
    }
}

/// A step, as every layer of a group sees it.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// The lists on the host.
    pub lists: &'a Lists,
    /// `lists.requests()` with this group's blocks.
    pub requests: &'a View<Request>,
    /// `lists.chunks()`.
    pub chunks: &'a View<Chunk>,
    /// `lists.segments()`.
    pub segments: &'a View<Segment>,
    /// At least the largest block of these requests.
    pub largest_block: usize,
    /// Prefills advance token by token, as decodes do.
    pub stepwise: bool,
    /// Memory.
    pub workspace: &'a Workspace,
}

fn addr(x: &Tensor) -> u64 {
    x.view().device_addr().unwrap_or(0)
}

fn wrong(what: &'static str, found: &[usize], expected: [usize; 2]) -> CudaError {
    TensorError::WrongShape { what: what.into(), found: found.to_vec(), expected: format!("{expected:?}") }
        .into()
}

/// How a cache may be accessed.
struct Alignment {
    addr: u64,
    block_stride: i64,
    /// All parts of a page begin at multiples of so many bytes, up to 16.
    bytes: usize,
}

impl StateCache<'_> {
    fn check(&self, cx: &CudaExec, largest_block: usize) -> Result<Alignment> {
        if self.memory.device() != cx.device() {
            let (found, expected) = (self.memory.device(), cx.device());
            return Err(TensorError::WrongDevice { what: "states", found, expected }.into());
        }
        if largest_block >= self.num_blocks.max(1) {
            return Err(CudaError::Argument(format!(
                "a state in block {largest_block}; the cache has {}",
                self.num_blocks
            )));
        }
        let last = self.block_stride.checked_mul(self.num_blocks.saturating_sub(1));
        let needed = last.and_then(|l| l.checked_add(self.offset + self.page.bytes()));
        let apart = self.num_blocks <= 1 || self.block_stride >= self.page.bytes();
        if needed.is_none_or(|n| n > self.memory.bytes()) || !apart {
            return Err(CudaError::Argument(format!(
                "{} states of {} bytes, {} apart, don't fit a cache of {} bytes",
                self.num_blocks,
                self.page.bytes(),
                self.block_stride,
                self.memory.bytes()
            )));
        }
        let addr = self.memory.addr() + self.offset as u64;
        let places = addr as usize | self.block_stride | self.page.ssm_offset() | 16;
        let bytes = 1 << places.trailing_zeros();
        let least = self.page.conv.size().max(self.page.ssm.size());
        if bytes < least {
            return Err(CudaError::Argument(format!(
                "states from byte {} on, {} apart, the scan's {} bytes into each: elements of {least} bytes would lie \
                 across their alignment",
                self.offset,
                self.block_stride,
                self.page.ssm_offset()
            )));
        }
        Ok(Alignment { addr, block_stride: self.block_stride as i64, bytes })
    }
}

/// Convolution and scan of a layer: x is `[tokens, conv_dim + heads]` (xBC, then dt), out `[tokens, inner]`, both of the
/// kernels' type. States are read and written; rows of no request become zero.
///
/// # Errors
/// Shapes, types and devices that don't fit the layer; states outside the cache; a step larger than the workspace.
pub fn mix(
    cx: &CudaExec,
    kernels: &LayerKernels,
    batch: &Batch<'_>,
    numbers: &Numbers,
    x: TensorRef<'_>,
    cache: &StateCache<'_>,
    mut out: TensorMut<'_>,
) -> Result<()> {
    let (page, lists, w) = (cache.page, batch.lists, batch.workspace);
    let d = page.dims;
    let tokens = x.shape().first().copied().unwrap_or(0);
    let xs = Rows::of(cx, "state-space input", x)?;
    let ys = Rows::of_mut(cx, "state-space output", &out)?;
    for (what, rows, width) in
        [("state-space input", &xs, d.conv_dim() + d.heads), ("state-space output", &ys, d.inner())]
    {
        if rows.dtype != kernels.dtype() {
            let (found, supported) = (rows.dtype, kernels.dtype().name());
            return Err(TensorError::WrongDType { what, found, supported }.into());
        }
        if [rows.tokens, rows.heads, rows.width] != [tokens, 1, width] {
            return Err(wrong(what, &[rows.tokens, rows.heads, rows.width], [tokens, width]));
        }
    }
    if w.page != page || *kernels.page() != page {
        return Err(CudaError::Argument("metadata of a group with other layers".into()));
    }
    let room = w.rows.shape()[0];
    if lists.covered() > tokens || lists.covered() > room {
        return Err(CudaError::Argument(format!(
            "requests of {} tokens; the input has {tokens}, the workspace room for {room}",
            lists.covered()
        )));
    }
    let on_device = batch.requests.device_mem().is_some()
        && batch.chunks.device_mem().is_some()
        && batch.segments.device_mem().is_some();
    let counts = [batch.requests.len(), batch.chunks.len(), batch.segments.len()];
    if !on_device || counts != [lists.requests().len(), lists.chunks().len(), lists.segments().len()] {
        return Err(CudaError::Argument("a step's requests are not its lists', on the device".into()));
    }
    let at = cache.check(cx, batch.largest_block)?;
    let memory = |m: &Arc<dyn DeviceMem>| m.addr();
    let fits = |n: usize| at.bytes.is_multiple_of(n.min(16));
    let pairs = d.state.is_multiple_of(2) && fits(2 * page.ssm.size()) && ys.aligned(4);
    let params = Params {
        x: xs.arg.at,
        out: ys.arg.at,
        cache: at.addr,
        rows: addr(&w.rows),
        conv_weight: memory(&numbers.conv_weight),
        conv_bias: numbers.conv_bias.as_ref().map_or(0, memory),
        a: memory(&numbers.a),
        d: memory(&numbers.d),
        dt_bias: memory(&numbers.dt_bias),
        requests: batch.requests.addr(),
        chunks: batch.chunks.addr(),
        segments: batch.segments.addr(),
        parts: addr(&w.parts),
        decays: addr(&w.decays),
        x_row: xs.arg.row,
        out_row: ys.arg.row,
        rows_row: 2 * page.row() as i64,
        block_stride: at.block_stride,
        ssm_offset: page.ssm_offset() as i64,
        first_request: 0,
        count: 0,
        conv_dim: d.conv_dim() as i32,
        heads: d.heads as i32,
        heads_per_group: d.heads_per_group() as i32,
        pairs: i32::from(pairs),
        dt_least: numbers.dt_limit.0,
        dt_most: numbers.dt_limit.1,
    };
    let (decodes, all) = (lists.decodes(), lists.requests().len());
    let wide = d.head_dim.is_multiple_of(8) && d.state.is_multiple_of(8) && xs.aligned(16) && fits(16);
    let lanes = if wide { 4 } else { 1 };
    let channels = |threads: usize| d.conv_dim().div_ceil(threads * lanes) as u32;
    let launch = |form: Form, wide: bool, grid: [u32; 3], block: usize, shared: usize, params: &Params| {
        let kernel = kernels.get(form, wide);
        // SAFETY: shapes, types, devices and bounds were checked; the lists keep requests' rows and blocks apart;
        // alignment as `wide` and `pairs` say.
        unsafe { kernel.launch(cx, grid, block as u32, shared as u32, params) }
    };
    if decodes > 0 {
        let threads = decodes * d.conv_dim() / lanes;
        let grid = [threads.div_ceil(CONV_BLOCK) as u32, 1, 1];
        launch(Form::Token, wide, grid, CONV_BLOCK, 0, &Params { count: decodes as i32, ..params })?;
    }
    if !lists.chunks().is_empty() {
        let grid = [channels(32), lists.chunks().len() as u32, 1];
        launch(Form::Chunks, wide, grid, CONV_BLOCK, 0, &params)?;
        let grid = [channels(CONV_BLOCK), (all - decodes) as u32, 1];
        launch(Form::Keep, wide, grid, CONV_BLOCK, 0, &Params { first_request: decodes as i32, ..params })?;
    }
    let steps = if batch.stepwise { all } else { decodes };
    if steps > 0 {
        let whole = d.state * page.ssm.size();
        let grid = [d.heads as u32, steps as u32, d.head_dim.div_ceil(STEP_ROWS) as u32];
        launch(Form::Step, fits(16) && whole.is_multiple_of(16), grid, STEP_BLOCK, 0, &params)?;
    }
    if !batch.stepwise && !lists.segments().is_empty() {
        let grid = [(d.heads * page.tiles()) as u32, lists.segments().len() as u32, 1];
        let shared = page.shared_bytes(cx.info().shared_per_block as usize);
        if lists.segmented() {
            launch(Form::States, true, grid, SCAN_THREADS, shared, &params)?;
        }
        launch(Form::Rows, true, grid, SCAN_THREADS, shared, &params)?;
    }
    if lists.covered() < tokens {
        cx.fill_zero(&mut out.reborrow().rows(lists.covered()..tokens)?)?;
    }
    Ok(())
}
