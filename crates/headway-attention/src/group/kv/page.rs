//! Lifetime: the model. Page arithmetic: bytes of a block, and how many blocks a request can need.

use super::spec::{AttentionSpec, KvCacheSpec, MambaCacheMode, MambaSpec, StrideAlignment};
use crate::{AttentionError, Result};

/// Limits that bear on what one request can need of a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestLimits {
    /// Most tokens of a request.
    pub max_model_len: usize,
    /// Most new tokens that can be under way at once.
    pub max_in_flight_tokens: usize,
    /// Most tokens of an encoder's input.
    pub max_encoder_tokens: usize,
    /// Ranks that share a request's tokens in decode context parallelism.
    pub dcp_size: usize,
}

impl AttentionSpec {
    /// Head slots of a page.
    pub fn num_heads(&self) -> usize {
        self.num_head_slots.unwrap_or(self.num_kv_heads)
    }

    /// Stored states of a block.
    pub fn num_states(&self) -> usize {
        self.tokens_per_state.states_of(self.block_size)
    }

    /// Bytes of one head slot of one state: key and value.
    pub fn state_content_size_bytes(&self) -> usize {
        self.state_content_bytes.unwrap_or((self.head_size + self.head_size_v) * self.dtype.size())
    }

    /// Bytes of one page before padding.
    pub fn unpadded_page_size_bytes(&self) -> usize {
        self.num_heads() * self.num_states() * self.state_content_size_bytes()
    }

    /// Bytes of one page.
    pub fn page_size_bytes(&self) -> usize {
        self.page_size_padded.unwrap_or_else(|| {
            let bytes = self.unpadded_page_size_bytes();
            self.alignment.map_or(bytes, |a| bytes.next_multiple_of(a.max(1)))
        })
    }

    /// What the distance between blocks must be a multiple of, in bytes.
    pub fn block_stride_alignment_bytes(&self) -> usize {
        match self.block_stride_alignment {
            None => 1,
            Some(StrideAlignment::Bytes(n)) => n.max(1),
            Some(StrideAlignment::Tokens(n)) => {
                let tokens = gcd(n, self.block_size).max(1);
                self.num_heads() * self.tokens_per_state.states_of(tokens) * self.state_content_size_bytes()
            }
        }
    }
}

pub(in crate::group) fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl MambaSpec {
    /// Bytes of a request's state tensors.
    pub fn state_bytes(&self) -> usize {
        self.shapes.iter().zip(&self.dtypes).map(|(s, d)| s.iter().product::<usize>() * d.size()).sum()
    }

    fn max_states(&self, limits: &RequestLimits) -> usize {
        match self.cache_mode {
            MambaCacheMode::None => 1 + self.num_speculative_blocks,
            MambaCacheMode::Align => 2 + self.num_speculative_blocks + self.num_prefill_checkpoint_blocks,
            MambaCacheMode::All => {
                limits.max_model_len.div_ceil(self.block_size.max(1)) + self.num_speculative_blocks
            }
        }
    }
}

impl KvCacheSpec {
    /// Bytes of one page, with its padding.
    pub fn page_size_bytes(&self) -> usize {
        match self {
            Self::Mamba(m) => m.page_size_padded.unwrap_or_else(|| m.state_bytes()),
            other => other.attention().map_or(0, AttentionSpec::page_size_bytes),
        }
    }

    /// Bytes of one page before padding.
    pub fn unpadded_page_size_bytes(&self) -> usize {
        match self {
            Self::Mamba(m) => m.state_bytes(),
            other => other.attention().map_or(0, AttentionSpec::unpadded_page_size_bytes),
        }
    }

    /// Whether the page's size is set rather than what it holds.
    pub fn is_padded(&self) -> bool {
        match self {
            Self::Mamba(m) => m.page_size_padded.is_some(),
            other => other.attention().is_some_and(|a| {
                a.page_size_padded.is_some() || a.page_size_bytes() != a.unpadded_page_size_bytes()
            }),
        }
    }

    /// The cache's logical axes for one layer and one block: head slots, states, bytes of a state.
    pub fn page_shape(&self) -> [usize; 3] {
        match self {
            Self::Mamba(m) => [1, 1, m.state_bytes()],
            other => other
                .attention()
                .map_or([0; 3], |a| [a.num_heads(), a.num_states(), a.state_content_size_bytes()]),
        }
    }

    /// The spec and the number of blocks as kernels see them that take blocks of `kernel_block_size`.
    ///
    /// # Errors
    /// A size that doesn't divide the block size; padded pages.
    pub fn kernel_block_view(
        &self,
        kernel_block_size: Option<usize>,
        num_blocks: usize,
    ) -> Result<(Self, usize)> {
        let (block, kernel) = (self.block_size(), kernel_block_size.unwrap_or(self.block_size()));
        if kernel == 0 || !block.is_multiple_of(kernel) {
            return Err(AttentionError::KvCache(format!(
                "Kernel block size {kernel} must divide KV cache block size {block}."
            )));
        }
        if kernel != block && self.is_padded() {
            return Err(AttentionError::KvCache(
                "Padded KV pages do not support kernel block splitting.".into(),
            ));
        }
        let mut view = self.clone().with_block_size(kernel);
        if let Some(a) = view.attention_mut().filter(|_| kernel != block) {
            // The alignment is of whole pages, and this page's size is aligned as it is.
            a.alignment = None;
        }
        Ok((view, num_blocks * (block / kernel)))
    }

    /// Whether a request's blocks can serve a later request with the same beginning.
    pub fn prefix_cacheable(&self) -> bool {
        !self.attention().is_some_and(|a| a.bounded_replay)
    }

    /// Whether new tokens have slots in the cache (all kinds do; a layer without cache has no handle).
    pub fn uses_slot_mapping(&self) -> bool {
        true
    }

    /// What a block table's reach is rounded up to, in tokens; `None` where tables aren't by token.
    pub fn block_table_token_alignment(&self) -> Option<usize> {
        (!matches!(self, Self::Mamba(_))).then_some(128)
    }

    /// Whether all tokens of a request stay.
    pub fn is_full_attention(&self) -> bool {
        matches!(self, Self::Full(_) | Self::Mla(_) | Self::Sink { .. } | Self::Rswa { .. })
    }

    /// Whether decode context parallelism spreads the tokens over ranks.
    pub fn dcp_sharded(&self) -> bool {
        self.attention().is_some_and(|a| a.dcp_sharded)
    }

    /// Most pages that one request holds at a time.
    ///
    /// # Errors
    /// A sliding window under decode context parallelism.
    pub fn max_pages_per_request(&self, limits: &RequestLimits) -> Result<usize> {
        let block = self.block_size().max(1);
        let in_window = |kept: usize| (kept + limits.max_in_flight_tokens).min(limits.max_model_len);
        Ok(match self {
            Self::Mamba(m) => m.max_states(limits),
            Self::EncoderOnly(_) => 0,
            Self::Cross(_) => limits.max_encoder_tokens.div_ceil(block),
            Self::ChunkedLocal { attention_chunk_size, .. } => {
                in_window(*attention_chunk_size).div_ceil(block)
            }
            Self::SlidingWindow { attention, sliding_window }
            | Self::SlidingWindowMla { attention, sliding_window } => {
                if limits.dcp_size > 1 {
                    return Err(AttentionError::KvCache("DCP not support sliding window.".into()));
                }
                // One more, since a window need not begin at a block's begin.
                in_window(sliding_window.saturating_sub(1) + attention.extra_retained_tokens).div_ceil(block)
                    + 1
            }
            Self::Full(_) | Self::Mla(_) | Self::Sink { .. } | Self::Rswa { .. } => {
                limits.max_model_len.div_ceil(limits.dcp_size.max(1)).div_ceil(block)
            }
        })
    }

    /// Entries of a request's row in the block table for sequences of up to `max_len` tokens.
    pub fn max_blocks_per_request(&self, limits: &RequestLimits, max_len: usize) -> usize {
        let block = self.block_size().max(1);
        match self {
            // Rows go by position although only the last states are resident.
            Self::Mamba(m) if m.cache_mode == MambaCacheMode::Align => {
                max_len.div_ceil(block) + m.num_speculative_blocks
            }
            Self::Mamba(m) => m.max_states(limits),
            other => {
                let ranks = if other.dcp_sharded() { limits.dcp_size.max(1) } else { 1 };
                max_len.div_ceil(block * ranks)
            }
        }
    }
}
