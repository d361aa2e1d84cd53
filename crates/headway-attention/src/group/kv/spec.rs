//! What a layer's cache holds: the kinds of KV cache and the sizes of their pages.

use headway_tensor::DType;
use serde::Serialize;

/// Keys and values of one layer: heads, sizes, dtype.
#[derive(Clone, PartialEq, Eq, Debug, Hash, Serialize)]
pub struct AttentionSpec {
    /// Tokens in a block.
    pub block_size: usize,
    /// Key/value heads on this rank.
    pub num_kv_heads: usize,
    /// Elements of a key head.
    pub head_size: usize,
    /// Elements of a value head (0 where keys and values are one, as in MLA).
    pub head_size_v: usize,
    /// Element type of the cache.
    pub dtype: DType,
    /// Bytes that a page is padded to, where other groups' pages are larger.
    pub page_size_padded: Option<usize>,
}

impl AttentionSpec {
    /// Bytes of one page before padding: `block_size · heads · (head_size + head_size_v) · element`.
    pub fn unpadded_page_size_bytes(&self) -> usize {
        self.block_size * self.num_kv_heads * (self.head_size + self.head_size_v) * self.dtype.size()
    }

    /// Bytes of one page.
    pub fn page_size_bytes(&self) -> usize {
        self.page_size_padded.unwrap_or_else(|| self.unpadded_page_size_bytes())
    }
}

/// The kinds of KV cache.
#[derive(Clone, PartialEq, Eq, Debug, Hash, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum KvCacheSpec {
    /// All tokens so far.
    Full(AttentionSpec),
    /// The last `sliding_window` tokens.
    SlidingWindow {
        /// Heads and sizes.
        attention: AttentionSpec,
        /// Tokens, with the query's own.
        sliding_window: usize,
    },
    /// The tokens of the query's own chunk.
    ChunkedLocal {
        /// Heads and sizes.
        attention: AttentionSpec,
        /// Tokens in a chunk.
        attention_chunk_size: usize,
    },
    /// One latent row a token.
    Mla(AttentionSpec),
    /// One latent row a token, the last `sliding_window` tokens.
    SlidingWindowMla {
        /// Heads and sizes.
        attention: AttentionSpec,
        /// Tokens, with the query's own.
        sliding_window: usize,
    },
    /// A state of fixed size a request.
    Mamba {
        /// Tokens that one page stands for.
        block_size: usize,
        /// Shapes of the state tensors of a request.
        shapes: Vec<Vec<usize>>,
        /// Their dtypes.
        dtypes: Vec<DType>,
        /// Bytes that a page is padded to.
        page_size_padded: Option<usize>,
        /// Extra states for drafted tokens.
        num_speculative_blocks: usize,
    },
    /// An encoder's output, read by cross-attention.
    Cross(AttentionSpec),
    /// No cache: an encoder attends within the step.
    EncoderOnly(AttentionSpec),
    /// The first `sink_len` tokens and the last ones.
    Sink {
        /// Heads and sizes.
        attention: AttentionSpec,
        /// Tokens that are never dropped.
        sink_len: usize,
    },
}

impl KvCacheSpec {
    /// Heads and sizes, for all kinds but Mamba.
    pub fn attention(&self) -> Option<&AttentionSpec> {
        match self {
            Self::Full(a) | Self::Mla(a) | Self::Cross(a) | Self::EncoderOnly(a) => Some(a),
            Self::SlidingWindow { attention, .. }
            | Self::ChunkedLocal { attention, .. }
            | Self::SlidingWindowMla { attention, .. }
            | Self::Sink { attention, .. } => Some(attention),
            Self::Mamba { .. } => None,
        }
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        match self {
            Self::Mamba { block_size, .. } => *block_size,
            other => other.attention().map_or(0, |a| a.block_size),
        }
    }

    /// Bytes of one page, with its padding.
    pub fn page_size_bytes(&self) -> usize {
        match self {
            Self::Mamba { shapes, dtypes, page_size_padded, .. } => page_size_padded.unwrap_or_else(|| {
                shapes.iter().zip(dtypes).map(|(s, d)| s.iter().product::<usize>() * d.size()).sum()
            }),
            other => other.attention().map_or(0, AttentionSpec::page_size_bytes),
        }
    }

    /// The window in tokens, for kinds that drop what fell out of it.
    pub fn sliding_window(&self) -> Option<usize> {
        match self {
            Self::SlidingWindow { sliding_window, .. } | Self::SlidingWindowMla { sliding_window, .. } => {
                Some(*sliding_window)
            }
            _ => None,
        }
    }
}
