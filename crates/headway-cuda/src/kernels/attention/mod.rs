//! Softmax attention over a paged cache: what a launch takes, checked.
//!
//! [`Planner`] cuts a step into tiles once for all layers; [`attend`] runs a layer over them.

mod plan;

pub use plan::{Causality, FEW_ROWS, INVARIANT_CHUNK, Kind, Planned, Planner, Request, Tile, USUAL_WAVES};

use super::{
    Kernel,
    cache::CacheLayout,
    elements::{heads, number},
    kernel_params,
};
use crate::{
    CudaExec, DeviceInfo, KernelSpec,
    device::{CudaError, Result},
};
use headway_tensor::{DType, Tensor, TensorMut, TensorRef, View};
use std::sync::Arc;

/// Threads of a block: four warps.
const THREADS: u32 = 128;
/// Warps of a block.
const WARPS: usize = 4;
/// Keys of a tile of many rows that are in shared memory together.
const KEYS: usize = 64;
/// Runs of 16 keys that a warp of a tile of few rows has in shared memory or under way: the least.
const LEAST_STAGES: usize = 2;
/// The largest head.
const MAX_HEAD: usize = 256;

/// A layer's heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_size: usize,
}

impl Shape {
    /// A shape that the kernel takes.
    ///
    /// # Errors
    /// Head sizes that are no multiple of 8 up to 256; query heads that the key/value heads don't divide.
    pub fn new(heads: usize, kv_heads: usize, head_size: usize) -> Result<Self, String> {
        if head_size == 0 || head_size > MAX_HEAD || !head_size.is_multiple_of(8) {
            return Err(format!("head size {head_size}: multiples of 8 up to {MAX_HEAD} are supported"));
        }
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(format!(
                "{heads} query heads over {kv_heads} key/value heads: the latter must divide the former"
            ));
        }
        Ok(Self { heads, kv_heads, head_size })
    }

    /// Query heads of a key/value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Rows of a tile of many.
    pub fn many_rows(&self) -> usize {
        WARPS * 16 * if self.head_size <= 128 { 2 } else { 1 }
    }

    /// Bytes that a row takes in shared memory.
    fn row_bytes(&self) -> usize {
        (self.head_size.div_ceil(16) * 2).div_ceil(8) * 128
    }

    /// Bytes of a stage of so many keys as they lie in the cache, and of them in 16 bits where that is not the same.
    fn key_bytes(&self, cache: DType, keys: usize) -> (usize, usize) {
        match cache.size() {
            1 => (keys * self.head_size, keys * self.row_bytes()),
            _ => (keys * self.row_bytes(), 0),
        }
    }

    /// Bytes that a tile of few rows takes.
    fn few_bytes(&self, cache: DType, stages: usize) -> usize {
        let (stage, wide) = self.key_bytes(cache, 16);
        let merged = WARPS * 16 * self.head_size * 4;
        16 * self.row_bytes() + (WARPS * 2 * (stages * stage + wide)).max(merged)
    }

    /// Stages of a tile of few rows (`FEW_STAGES`): what hides the memory's latency, or fewer where a block has no more
    /// than `shared_per_block` bytes.
    fn few_stages(&self, cache: DType, shared_per_block: usize) -> usize {
        let best = match self.head_size {
            ..=64 => 4,
            65..=128 => 3,
            _ => LEAST_STAGES,
        };
        let fits = |&n: &usize| self.few_bytes(cache, n) <= shared_per_block;
        (LEAST_STAGES..=best).rev().find(fits).unwrap_or(LEAST_STAGES)
    }

    /// Bytes of shared memory of a block, as `csrc/attention/attention.cu` lays it out where a block has
    /// `shared_per_block` bytes.
    pub fn shared_bytes(&self, cache: DType, shared_per_block: usize) -> usize {
        let (stage, wide) = self.key_bytes(cache, KEYS);
        let many = self.many_rows() * self.row_bytes() + 4 * stage + 2 * wide;
        self.few_bytes(cache, self.few_stages(cache, shared_per_block)).max(many)
    }

    /// That a block's shared memory is enough for these heads.
    ///
    /// # Errors
    /// It isn't; in words.
    pub fn check_shared(&self, cache: DType, shared_per_block: usize) -> Result<(), String> {
        let takes = self.shared_bytes(cache, shared_per_block);
        if takes <= shared_per_block {
            return Ok(());
        }
        Err(format!(
            "heads of {} with a KV cache of {cache}: a block takes {takes} bytes of shared memory, the device has \
             {shared_per_block}",
            self.head_size
        ))
    }

    /// Blocks that run at once on a device: what a launch has.
    pub fn slots(&self, device: &DeviceInfo) -> usize {
        // The system keeps 1 KiB a block. Two blocks' registers fill a multiprocessor.
        let block = self.shared_bytes(DType::BF16, device.shared_per_block as usize) + 1024;
        let each = (device.shared_per_multiprocessor as usize / block).clamp(1, 2);
        device.multiprocessors as usize * each
    }
}

kernel_params! {
    struct Params {
        q: u64, out: u64, cache: u64, block_table: u64, query_start_loc: u64, seq_lens: u64, causal: u64, tiles: u64,
        part_out: u64, part_sum: u64, counters: u64, next: u64, sinks: u64, alibi_slopes: u64, lse: u64,
        q_token: i64, q_head: i64, out_token: i64, out_head: i64,
        block_stride: i64, token_stride: i64, head_stride: i64,
        v_offset: i32, block_size: i32, table_stride: i32, kv_heads: i32, group: i32, part_rows: i32,
        num_counters: i32, window: i32,
        scale: f32, soft_cap: f32, v_scale: f32, pad: i32,
    }
}

/// A step, as every layer of a group sees it: all on the device.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// The list of tiles, its head first.
    pub tiles: &'a View<Tile>,
    /// `[requests, table_stride]`.
    pub block_table: &'a View<i32>,
    /// Entries from one row to the next.
    pub table_stride: usize,
    /// `[requests + 1]`.
    pub query_start_loc: &'a View<i32>,
    /// `[requests]`.
    pub seq_lens: &'a View<i32>,
    /// `[requests]`: causal or not, where tiles say to look there.
    pub causal: Option<&'a View<u8>>,
    /// New tokens, padding included.
    pub num_tokens: usize,
    /// `[kv heads, part_rows, head size]`, float32.
    pub part_out: &'a Tensor,
    /// `[kv heads, part_rows, 2]`, float32.
    pub part_sum: &'a Tensor,
    /// `[kv heads, num_counters]`, int32, zeros.
    pub counters: &'a Tensor,
    /// `[2]`, int32, zeros.
    pub next: &'a Tensor,
    /// Rows of partial results of a head.
    pub part_rows: usize,
    /// Counters of a head.
    pub num_counters: usize,
    /// Blocks of the launch.
    pub grid: usize,
}

/// One layer's numbers.
#[derive(Clone, Copy, Debug)]
pub struct LayerNumbers<'a> {
    /// Factor on q·k, the stored keys' own scale in it.
    pub scale: f32,
    /// Keys that a row sees.
    pub window: Option<usize>,
    /// Cap of the scores.
    pub soft_cap: Option<f32>,
    /// Factor that turns stored values into values.
    pub v_scale: f32,
    /// `[heads]`, float32.
    pub sinks: Option<&'a View<f32>>,
    /// `[heads]`, float32.
    pub alibi_slopes: Option<&'a View<f32>>,
}

/// The kernel for these types; `plain`: no soft cap and no ALiBi.
///
/// # Errors
/// The compiler's.
pub fn kernel(cx: &CudaExec, shape: &Shape, dtype: DType, cache: DType, plain: bool) -> Result<Arc<Kernel>> {
    cx.kernel(&spec(shape, dtype, cache, plain, cx.info().shared_per_block as usize)?)
}

/// What [`kernel`] is compiled of for a device with so much shared memory a block.
///
/// # Errors
/// Types that no kernel reads.
pub fn spec(
    shape: &Shape,
    dtype: DType,
    cache: DType,
    plain: bool,
    shared_per_block: usize,
) -> Result<KernelSpec> {
    let defines = vec![
        ("HEAD", shape.head_size.to_string()),
        ("ACT", number(dtype)?),
        ("CACHE", number(cache)?),
        ("PLAIN", u8::from(plain).to_string()),
        ("FEW_STAGES", shape.few_stages(cache, shared_per_block).to_string()),
    ];
    Ok(KernelSpec { file: "attention/attention.cu", entry: "attention", defines })
}

fn addr(x: &Tensor) -> u64 {
    x.view().device_addr().unwrap_or(0)
}

/// Attention of a step's rows: q `[tokens, heads, head size]` over the cache into `out` of the same shape and type;
/// `lse` `[tokens, heads]` gets the natural log of each row's denominator.
///
/// # Errors
/// Shapes, dtypes, devices, alignment; the driver's.
pub fn attend(
    cx: &CudaExec,
    kernel: &Kernel,
    shape: &Shape,
    batch: &Batch<'_>,
    numbers: &LayerNumbers<'_>,
    q: TensorRef<'_>,
    cache: &CacheLayout<'_>,
    out: TensorMut<'_>,
    lse: Option<TensorMut<'_>>,
) -> Result<()> {
    let at = cache.strides(cx)?;
    let (q_addr, [q_token, q_head]) = heads("queries", q.device_addr(), q, shape.heads, shape.head_size)?;
    let (out_addr, [out_token, out_head]) =
        heads("output", out.device_addr(), out.as_ref(), shape.heads, shape.head_size)?;
    if out.dtype() != q.dtype() || q.shape()[0] < batch.num_tokens || out.shape()[0] < batch.num_tokens {
        return Err(CudaError::Argument(format!(
            "attention of {} tokens: queries {:?} of {}, output {:?} of {}",
            batch.num_tokens,
            q.shape(),
            q.dtype(),
            out.shape(),
            out.dtype()
        )));
    }
    let lse = match &lse {
        None => 0,
        Some(l) => match (l.device_addr(), l.dtype(), l.shape(), l.strides()) {
            (Some(addr), DType::F32, &[n, h], &[s, 1])
                if n >= batch.num_tokens && h == shape.heads && s == h =>
            {
                addr
            }
            _ => {
                return Err(CudaError::Argument(format!(
                    "lse: {:?} of {} on {}, expected [{}, {}] of float32 on the device",
                    l.shape(),
                    l.dtype(),
                    l.device(),
                    batch.num_tokens,
                    shape.heads
                )));
            }
        },
    };
    let views = [batch.block_table, batch.query_start_loc, batch.seq_lens];
    if views.iter().any(|v| v.device_mem().is_none())
        || batch.tiles.device_mem().is_none()
        || batch.causal.is_some_and(|v| v.device_mem().is_none())
    {
        return Err(CudaError::Argument("attention: the step's metadata is on the host".into()));
    }
    let params = Params {
        q: q_addr,
        out: out_addr,
        cache: at.addr,
        block_table: batch.block_table.addr(),
        query_start_loc: batch.query_start_loc.addr(),
        seq_lens: batch.seq_lens.addr(),
        causal: batch.causal.map_or(0, View::addr),
        tiles: batch.tiles.addr(),
        part_out: addr(batch.part_out),
        part_sum: addr(batch.part_sum),
        counters: addr(batch.counters),
        next: addr(batch.next),
        sinks: numbers.sinks.map_or(0, View::addr),
        alibi_slopes: numbers.alibi_slopes.map_or(0, View::addr),
        lse,
        q_token,
        q_head,
        out_token,
        out_head,
        block_stride: at.block,
        token_stride: at.token,
        head_stride: at.head,
        v_offset: at.value,
        block_size: cache.block_size as i32,
        table_stride: batch.table_stride as i32,
        kv_heads: shape.kv_heads as i32,
        group: shape.group() as i32,
        part_rows: batch.part_rows as i32,
        num_counters: batch.num_counters as i32,
        window: numbers.window.map_or(0, |w| i32::try_from(w).unwrap_or(i32::MAX)),
        scale: numbers.scale,
        soft_cap: numbers.soft_cap.unwrap_or(0.0),
        v_scale: numbers.v_scale,
        pad: 0,
    };
    let shared = shape.shared_bytes(cache.dtype, cx.info().shared_per_block as usize) as u32;
    // SAFETY: shapes, strides and devices were checked; tiles are the planner's, within the step and its scratch;
    // blocks of the table are the cache manager's, within the cache.
    unsafe { kernel.launch(cx, [batch.grid as u32, 1, 1], THREADS, shared, &params) }
}
