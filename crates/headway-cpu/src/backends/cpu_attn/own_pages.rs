//! Lifetime: the model, one a builder. Pages for layers without a cache: an encoder's keys and values live for
//! one layer of one step, in pages of the builder's own, so that the same kernel reads them.

use super::rules::NAME;
use crate::{
    CpuExec,
    backends::common::refuse,
    kernels::attention::{CacheLayout, Request, Shape, write_kv},
};
use headway_attention::{AttentionError, Qkv, Result};
use headway_tensor::{DType, HostBuf, View};
use std::sync::{Arc, Mutex};

/// Tokens in a page: what every level of the kernel takes.
const PAGE_TOKENS: usize = 64;

/// The pages. Layers of a group run one after another, so one set serves them all.
#[derive(Debug)]
pub(super) struct OwnPages {
    bytes: Mutex<HostBuf>,
    layout: CacheLayout,
}

/// Where a step's rows lie in them.
#[derive(Clone, Debug)]
pub(super) struct OwnRows {
    pages: Arc<OwnPages>,
    /// `[requests, stride]`.
    pub table: View<i32>,
    pub stride: usize,
    slots: View<i64>,
}

impl OwnPages {
    /// Pages for the largest step.
    pub fn num_pages(max_num_reqs: usize, max_num_tokens: usize) -> usize {
        max_num_tokens.div_ceil(PAGE_TOKENS) + max_num_reqs.min(max_num_tokens)
    }

    /// Bytes of a page: activations stay in float32.
    pub fn page_bytes(shape: &Shape) -> usize {
        PAGE_TOKENS * shape.num_kv_heads * (shape.head_size + shape.head_size_v) * DType::F32.size()
    }

    /// Tokens in a page.
    pub fn block_size() -> usize {
        PAGE_TOKENS
    }

    /// Room for steps of these limits.
    ///
    /// # Errors
    /// No memory.
    pub fn new(shape: &Shape, max_num_reqs: usize, max_num_tokens: usize) -> Result<Self> {
        let (num_blocks, block_stride) =
            (Self::num_pages(max_num_reqs, max_num_tokens), Self::page_bytes(shape));
        let bytes = Mutex::new(HostBuf::zeroed(num_blocks * block_stride)?);
        let (block_size, dtype) = (PAGE_TOKENS, DType::F32);
        Ok(Self { bytes, layout: CacheLayout { offset: 0, block_stride, num_blocks, block_size, dtype } })
    }

    /// Gives each request pages of its own.
    ///
    /// # Errors
    /// A request of which a part was computed before: an encoder sees all of its input at once.
    pub fn rows(self: &Arc<Self>, requests: &[Request]) -> Result<OwnRows> {
        let stride = requests.iter().map(|r| r.q_len.div_ceil(PAGE_TOKENS)).max().unwrap_or(0).max(1);
        let (mut table, mut slots, mut next) = (vec![0; requests.len() * stride], vec![], 0);
        for (r, row) in requests.iter().zip(table.chunks_exact_mut(stride)) {
            if r.q_len != r.seq_len {
                return Err(refuse(
                    NAME,
                    format!("an encoder's input of {} tokens in parts ({} now)", r.seq_len, r.q_len),
                    "give the whole input in one step",
                ));
            }
            let pages = r.q_len.div_ceil(PAGE_TOKENS);
            row.iter_mut().zip(next..next + pages).for_each(|(o, page)| *o = page as i32);
            slots.extend((0..r.q_len).map(|t| (next * PAGE_TOKENS + t) as i64));
            next += pages;
        }
        if next > self.layout.num_blocks {
            return Err(AttentionError::Inputs(format!(
                "the step needs {next} pages of an encoder's keys and values; the group was built for {}",
                self.layout.num_blocks
            )));
        }
        Ok(OwnRows {
            pages: Arc::clone(self),
            table: View::from_vec(table),
            stride,
            slots: View::from_vec(slots),
        })
    }
}

impl OwnRows {
    /// Writes a layer's keys and values, and runs `attend` on the pages while nobody else may.
    ///
    /// # Errors
    /// Shapes, dtypes; what `attend` says.
    pub fn with<R>(
        &self,
        cx: &CpuExec,
        shape: &Shape,
        x: &Qkv<'_>,
        attend: impl FnOnce(&CacheLayout, &[u8]) -> Result<R>,
    ) -> Result<R> {
        let failed = |_| AttentionError::Inputs("an earlier call of this group panicked".into());
        let mut bytes = self.pages.bytes.lock().map_err(failed)?;
        let (slots, layout) = (self.slots.host().unwrap_or(&[]), &self.pages.layout);
        write_kv(
            (cx.pool(), cx.attention_isa()),
            shape,
            (x.k, 1.0),
            (x.v, 1.0),
            slots,
            layout,
            bytes.as_bytes_mut(),
        )?;
        attend(layout, bytes.as_bytes())
    }
}
