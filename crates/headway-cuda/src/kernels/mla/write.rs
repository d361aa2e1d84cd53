//! The cache write: rows of latents by slot.

use super::{LatentCache, types};
use crate::{
    CudaExec, Kernel, KernelSpec,
    device::{CudaError, Result},
    kernels::kernel_params,
};
use headway_tensor::{DType, TensorRef, View};
use std::sync::Arc;

/// Threads of a block.
const THREADS: usize = 256;

kernel_params! {
    struct Params {
        rows: u64, slots: u64, cache: u64,
        row_stride: i64, block_stride: i64, num_slots: i64,
        block_size: i32, tokens: i32,
        scale: f32, pad: i32,
    }
}

/// The kernel that writes rows of these types.
///
/// # Errors
/// The compiler's.
pub fn write_latent_kernel(cx: &CudaExec, width: usize, dtype: DType, cache: DType) -> Result<Arc<Kernel>> {
    cx.kernel(&write_latent_spec(width, dtype, cache)?)
}

/// What [`write_latent_kernel`] is compiled of.
///
/// # Errors
/// Types that no kernel reads.
pub fn write_latent_spec(width: usize, dtype: DType, cache: DType) -> Result<KernelSpec> {
    let mut defines = vec![("WIDTH", width.to_string())];
    defines.extend(types(dtype, cache)?);
    Ok(KernelSpec { file: "cache/write_latent.cu", entry: "write_latent", defines })
}

/// Address and row stride, in elements, of `[tokens, width]` rows that 16-byte accesses can read.
pub(super) fn rows(what: &str, x: TensorRef<'_>, width: usize) -> Result<(u64, usize)> {
    let (&[_, w], &[row, 1]) = (x.shape(), x.strides()) else {
        return Err(CudaError::Argument(format!(
            "{what}: shape {:?} with strides {:?}, expected [tokens, {width}] with contiguous rows",
            x.shape(),
            x.strides()
        )));
    };
    match x.device_addr() {
        Some(at) if w == width && at.is_multiple_of(16) && (row * x.dtype().size()).is_multiple_of(16) => {
            Ok((at, row))
        }
        Some(at) => Err(CudaError::Argument(format!(
            "{what}: {:?} at {at:#x}, {row} elements apart; expected [tokens, {width}], rows at multiples of 16 bytes",
            x.shape()
        ))),
        None => Err(CudaError::Argument(format!("{what}: on {}, not on a CUDA device", x.device()))),
    }
}

/// Scatters rows `[tokens, width]` by slot; −1 is skipped, and so is a slot outside the cache. What is stored in 8 bits
/// is the value over `scale`.
///
/// # Errors
/// Shapes, dtypes, devices, alignment; the driver's.
pub fn write_latent(
    cx: &CudaExec,
    kernel: &Kernel,
    x: TensorRef<'_>,
    scale: f32,
    slots: &View<i64>,
    cache: &LatentCache<'_>,
) -> Result<()> {
    let (at, row) = rows("new latents", x, cache.width)?;
    let tokens = x.shape()[0].min(slots.len());
    if slots.device_mem().is_none() {
        return Err(CudaError::Argument("slots of new latents on the host".into()));
    }
    let params = Params {
        rows: at,
        slots: slots.addr(),
        cache: cache.addr(cx)?,
        row_stride: row as i64,
        block_stride: cache.block_stride as i64,
        num_slots: (cache.num_blocks * cache.block_size) as i64,
        block_size: cache.block_size as i32,
        tokens: tokens as i32,
        scale,
        pad: 0,
    };
    let threads = tokens * (cache.width / 8);
    let grid = threads.div_ceil(THREADS).min(cx.info().multiprocessors as usize * 16) as u32;
    // SAFETY: the shapes and the cache's bounds were checked; the kernel skips slots outside of the cache.
    unsafe { kernel.launch(cx, [grid, 1, 1], THREADS as u32, 0, &params) }
}
