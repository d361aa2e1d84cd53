//! Lifetime: the model. The pool of KV cache memory: raw pages that groups read in their own ways.

use super::layout::KvCacheLayout;
use crate::{AttentionError, AttnLayer, Result};
use headway_tensor::{DType, DeviceMem, HostBuf};
use std::sync::Arc;

/// Memory of a KV cache: host bytes, or a device allocation.
#[derive(Debug)]
pub enum KvBuf {
    /// On the host; kernels of the CPU read it in place.
    Host(HostBuf),
    /// On a device.
    Dev(Arc<dyn DeviceMem>),
}

/// Where a layer's cache lies in the pool, and how to read it. Block `b` of the layer begins at
/// `offset + b * block_stride` bytes and is `page_bytes` long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvHandle {
    /// Which buffer of the pool.
    pub buf: usize,
    /// Bytes before block 0.
    pub offset: usize,
    /// Bytes from one block to the next.
    pub block_stride: usize,
    /// Bytes of one block of this layer.
    pub page_bytes: usize,
    /// Blocks in the pool, as the kernel counts them.
    pub num_blocks: usize,
    /// Tokens in a block, as the kernel counts them.
    pub block_size: usize,
    /// Element type.
    pub dtype: DType,
    /// The order of the axes, inside a page too: N before H or after.
    pub layout: KvCacheLayout,
    /// The layer reads another layer's cache and must not write it.
    pub shared: bool,
}

impl KvHandle {
    /// The layer's cache inside its buffer.
    pub fn on<'a>(&self, buf: &'a mut KvBuf) -> KvMut<'a> {
        KvMut {
            buf,
            offset: self.offset,
            block_stride: self.block_stride,
            page_bytes: self.page_bytes,
            num_blocks: self.num_blocks,
            block_size: self.block_size,
            dtype: self.dtype,
            layout: self.layout,
            shared: self.shared,
        }
    }
}

/// One layer's cache, for writing.
pub struct KvMut<'a> {
    /// The whole buffer; several layers may lie in it.
    pub buf: &'a mut KvBuf,
    /// Bytes before block 0.
    pub offset: usize,
    /// Bytes from one block to the next.
    pub block_stride: usize,
    /// Bytes of one block of this layer.
    pub page_bytes: usize,
    /// Blocks, as the kernel counts them.
    pub num_blocks: usize,
    /// Tokens in a block, as the kernel counts them.
    pub block_size: usize,
    /// Element type.
    pub dtype: DType,
    /// The order of the axes, inside a page too: N before H or after.
    pub layout: KvCacheLayout,
    /// The layer reads another layer's cache and must not write it.
    pub shared: bool,
}

impl KvMut<'_> {
    /// The host bytes, where the cache lies there.
    ///
    /// # Errors
    /// A cache on a device.
    pub fn host_bytes(&mut self) -> Result<&mut [u8]> {
        match &mut *self.buf {
            KvBuf::Host(b) => Ok(b.as_bytes_mut()),
            KvBuf::Dev(d) => {
                Err(AttentionError::KvCache(format!("the KV cache is on {}, not on the host", d.device())))
            }
        }
    }
}

/// All KV cache memory of a model.
#[derive(Debug, Default)]
pub struct KvPool {
    bufs: Vec<KvBuf>,
    by_layer: Vec<KvHandle>,
}

impl KvPool {
    /// Memory and where each layer's cache lies in it, indexed by [`AttnLayer`].
    ///
    /// # Errors
    /// A layer that reaches past its buffer.
    pub fn new(bufs: Vec<KvBuf>, by_layer: Vec<KvHandle>) -> Result<Self> {
        for (i, h) in by_layer.iter().enumerate() {
            let len = match bufs.get(h.buf) {
                Some(KvBuf::Host(b)) => b.len(),
                Some(KvBuf::Dev(d)) => d.bytes(),
                None => 0,
            };
            let last = h.num_blocks.saturating_sub(1);
            let end = h.block_stride.checked_mul(last).and_then(|x| x.checked_add(h.offset + h.page_bytes));
            if h.num_blocks > 0 && end.is_none_or(|e| e > len) {
                return Err(AttentionError::KvCache(format!(
                    "the cache of attention layer {i} ends past its buffer of {len} bytes"
                )));
            }
        }
        Ok(Self { bufs, by_layer })
    }

    /// A layer's cache.
    ///
    /// # Errors
    /// A layer without a cache.
    pub fn layer(&mut self, layer: AttnLayer) -> Result<KvMut<'_>> {
        let missing = || AttentionError::KvCache(format!("attention layer {} has no cache", layer.0));
        let h = self.by_layer.get(layer.0 as usize).ok_or_else(missing)?;
        let buf = self.bufs.get_mut(h.buf).ok_or_else(missing)?;
        Ok(h.on(buf))
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> usize {
        self.bufs
            .iter()
            .map(|b| match b {
                KvBuf::Host(h) => h.len(),
                KvBuf::Dev(d) => d.bytes(),
            })
            .sum()
    }
}
