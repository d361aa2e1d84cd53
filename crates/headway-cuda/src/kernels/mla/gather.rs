//! A pass's latents side by side: out of the cache's pages, or of the step's new rows.

use super::{Dims, LatentCache, room, types, write::rows};
use crate::{
    CudaExec, Kernel, KernelSpec,
    device::{CudaError, Result},
    kernels::kernel_params,
};
use bytemuck::{Pod, Zeroable};
use headway_tensor::{DType, DeviceMem, TensorRef, View};
use std::sync::Arc;

/// Rows that a block copies, as `csrc/mla/gather.cu` says.
const ROWS: usize = 32;

/// Tokens of one request, as the kernel reads them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Run {
    /// Row of the block table; −1: new rows.
    pub request: i32,
    /// First token; of new rows the first.
    pub start: i32,
    /// How many.
    pub len: i32,
    /// Where the first one goes.
    pub slot: i32,
}

kernel_params! {
    struct Params {
        runs: u64, cache: u64, block_table: u64, fresh: u64, out: u64,
        fresh_stride: i64, block_stride: i64, num_blocks: i64,
        block_size: i32, table_stride: i32,
        scale: f32, pad: i32,
    }
}

/// The kernel for these types.
///
/// # Errors
/// The compiler's.
pub fn gather_kernel(cx: &CudaExec, dims: &Dims, dtype: DType, cache: DType) -> Result<Arc<Kernel>> {
    cx.kernel(&gather_spec(dims, dtype, cache)?)
}

/// What [`gather_kernel`] is compiled of.
///
/// # Errors
/// Types that no kernel reads.
pub fn gather_spec(dims: &Dims, dtype: DType, cache: DType) -> Result<KernelSpec> {
    let mut defines = vec![("WIDTH", dims.latent().to_string())];
    defines.extend(types(dtype, cache)?);
    Ok(KernelSpec { file: "mla/gather.cu", entry: "mla_gather", defines })
}

/// Copies runs of latents, the longest of `longest` tokens, to their slots below `slots` of `out`, `[slots, width]` of
/// `fresh`'s type. Cached ones are times `scale` where they are of 8 bits; `fresh` is `[rows, width]`.
///
/// # Errors
/// Shapes, devices, alignment; the driver's.
pub fn gather(
    cx: &CudaExec,
    kernel: &Kernel,
    (runs, longest, slots): (&View<Run>, usize, usize),
    (cache, scale): (&LatentCache<'_>, f32),
    (table, table_stride): (&View<i32>, usize),
    fresh: TensorRef<'_>,
    out: &Arc<dyn DeviceMem>,
) -> Result<()> {
    let (at, row) = rows("new latents", fresh, cache.width)?;
    if runs.device_mem().is_none() || table.device_mem().is_none() {
        return Err(CudaError::Argument("gathering latents: the step's metadata is on the host".into()));
    }
    let params = Params {
        runs: runs.addr(),
        cache: cache.addr(cx)?,
        block_table: table.addr(),
        fresh: at,
        out: room(cx, "gathered latents", out, slots * cache.width * fresh.dtype().size())?,
        fresh_stride: row as i64,
        block_stride: cache.block_stride as i64,
        num_blocks: cache.num_blocks as i64,
        block_size: cache.block_size as i32,
        table_stride: table_stride as i32,
        scale,
        pad: 0,
    };
    let grid = [longest.div_ceil(ROWS) as u32, runs.len() as u32, 1];
    // SAFETY: runs are the builder's, within the step's rows, the block table and the slots; the kernel reads no block
    // outside of the cache.
    unsafe { kernel.launch(cx, grid, 256, 0, &params) }
}
