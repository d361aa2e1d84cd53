//! The cache write, and where a layer's cache lies.

use super::{
    Kernel,
    elements::{heads, number},
    kernel_params,
};
use crate::{
    CudaExec, KernelSpec,
    device::{CudaError, Result},
};
use headway_tensor::{DType, DeviceMem, TensorRef, View};
use std::sync::Arc;

/// Threads of a block.
const THREADS: usize = 256;

/// Where a layer's blocks lie in a buffer, in bytes.
pub(crate) struct Pages<'a> {
    pub memory: &'a Arc<dyn DeviceMem>,
    pub offset: usize,
    pub block_stride: usize,
    pub num_blocks: usize,
}

impl Pages<'_> {
    /// Address of block 0, where blocks have `page` bytes.
    ///
    /// # Errors
    /// Another device; blocks that reach past the buffer; a place that is no multiple of 16 bytes.
    pub fn addr(&self, cx: &CudaExec, page: usize) -> Result<u64> {
        use headway_tensor::Exec;
        if self.memory.device() != cx.device() {
            return Err(CudaError::Argument(format!(
                "the KV cache is on {}, the step runs on {}",
                self.memory.device(),
                cx.device()
            )));
        }
        let end = self.block_stride.checked_mul(self.num_blocks.saturating_sub(1));
        let end = end.and_then(|e| e.checked_add(self.offset + page));
        if self.num_blocks > 0 && end.is_none_or(|e| e > self.memory.bytes()) {
            return Err(CudaError::Argument(format!(
                "{} blocks of {page} bytes, {} apart, from byte {} on, in a KV cache of {} bytes",
                self.num_blocks,
                self.block_stride,
                self.offset,
                self.memory.bytes()
            )));
        }
        let addr = self.memory.addr() + self.offset as u64;
        if !addr.is_multiple_of(16) || !self.block_stride.is_multiple_of(16) {
            return Err(CudaError::Argument(format!(
                "a KV cache at {addr:#x} with blocks {} bytes apart: both must be multiples of 16",
                self.block_stride
            )));
        }
        Ok(addr)
    }
}

/// A layer's cache on a device.
#[derive(Clone, Copy, Debug)]
pub struct CacheLayout<'a> {
    /// The buffer that it lies in.
    pub memory: &'a Arc<dyn DeviceMem>,
    /// Bytes before block 0.
    pub offset: usize,
    /// Bytes from one block to the next.
    pub block_stride: usize,
    /// Blocks.
    pub num_blocks: usize,
    /// Tokens in a block.
    pub block_size: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a key and of a value.
    pub head_size: usize,
    /// Element type.
    pub dtype: DType,
    /// A block holds one head after another (HND), not one token after another (NHD).
    pub heads_outside: bool,
}

/// Strides of a cache, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheStrides {
    pub addr: u64,
    pub block: i64,
    pub token: i64,
    pub head: i64,
    /// From a head's key to its value.
    pub value: i32,
}

impl CacheLayout<'_> {
    /// Address and strides, checked against the buffer.
    ///
    /// # Errors
    /// Another device; blocks that reach past the buffer; a place that is no multiple of 16 bytes.
    pub(crate) fn strides(&self, cx: &CudaExec) -> Result<CacheStrides> {
        let value = self.head_size * self.dtype.size();
        let cell = 2 * value;
        let pages = Pages {
            memory: self.memory,
            offset: self.offset,
            block_stride: self.block_stride,
            num_blocks: self.num_blocks,
        };
        let addr = pages.addr(cx, cell * self.kv_heads * self.block_size)?;
        let (token, head) = match self.heads_outside {
            true => (cell, cell * self.block_size),
            false => (cell * self.kv_heads, cell),
        };
        Ok(CacheStrides {
            addr,
            block: self.block_stride as i64,
            token: token as i64,
            head: head as i64,
            value: value as i32,
        })
    }
}

kernel_params! {
    struct Params {
        k: u64, v: u64, slots: u64, cache: u64,
        k_token: i64, k_head: i64, v_token: i64, v_head: i64,
        block_stride: i64, token_stride: i64, head_stride: i64,
        v_offset: i32, block_size: i32, tokens: i32, kv_heads: i32,
        k_scale: f32, v_scale: f32,
        num_slots: i64,
    }
}

/// The kernel that writes keys and values of these types.
///
/// # Errors
/// The compiler's.
pub fn write_kernel(cx: &CudaExec, head_size: usize, dtype: DType, cache: DType) -> Result<Arc<Kernel>> {
    cx.kernel(&write_spec(head_size, dtype, cache)?)
}

/// What [`write_kernel`] is compiled of.
///
/// # Errors
/// Types that no kernel reads.
pub fn write_spec(head_size: usize, dtype: DType, cache: DType) -> Result<KernelSpec> {
    let defines = vec![("HEAD", head_size.to_string()), ("ACT", number(dtype)?), ("CACHE", number(cache)?)];
    Ok(KernelSpec { file: "cache/write.cu", entry: "write_kv", defines })
}

/// Scatters keys and values `[tokens, kv heads, head size]` by slot; −1 is skipped, and so is a slot outside the
/// cache. `scales`: what is stored in 8 bits is the value over it.
///
/// # Errors
/// Shapes, devices, alignment; the driver's.
pub fn write_kv(
    cx: &CudaExec,
    kernel: &Kernel,
    k: TensorRef<'_>,
    v: TensorRef<'_>,
    scales: (f32, f32),
    slots: &View<i64>,
    cache: &CacheLayout<'_>,
) -> Result<()> {
    let at = cache.strides(cx)?;
    let (k_addr, [k_token, k_head]) = heads("keys", k.device_addr(), k, cache.kv_heads, cache.head_size)?;
    let (v_addr, [v_token, v_head]) = heads("values", v.device_addr(), v, cache.kv_heads, cache.head_size)?;
    let tokens = k.shape()[0].min(slots.len());
    if v.shape()[0] < tokens || slots.device_mem().is_none() {
        return Err(CudaError::Argument(format!(
            "{} values and {} slots{} for {tokens} keys",
            v.shape()[0],
            slots.len(),
            if slots.device_mem().is_none() { " on the host" } else { "" }
        )));
    }
    let params = Params {
        k: k_addr,
        v: v_addr,
        slots: slots.addr(),
        cache: at.addr,
        k_token,
        k_head,
        v_token,
        v_head,
        block_stride: at.block,
        token_stride: at.token,
        head_stride: at.head,
        v_offset: at.value,
        block_size: cache.block_size as i32,
        tokens: tokens as i32,
        kv_heads: cache.kv_heads as i32,
        k_scale: scales.0,
        v_scale: scales.1,
        num_slots: (cache.num_blocks * cache.block_size) as i64,
    };
    let threads = tokens * cache.kv_heads * (cache.head_size / 8);
    let most = cx.info().multiprocessors as usize * 16;
    let grid = threads.div_ceil(THREADS).min(most) as u32;
    // SAFETY: the shapes and the cache's bounds were checked; the kernel skips slots outside of the cache.
    unsafe { kernel.launch(cx, [grid, 1, 1], THREADS as u32, 0, &params) }
}
