//! Lifetime: the model. What a layer's cache holds: the kinds of KV cache. Page sizes and the other
//! arithmetic stand in `page`, how specs combine in `merge`.

use headway_tensor::DType;
use serde::{Deserialize, Serialize};

/// How a cache is quantised, where that changes what a page holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum KvQuantMode {
    /// Elements of the cache's dtype, no scales.
    #[default]
    None,
    /// 8-bit floats with one scale a tensor.
    Fp8PerTensor,
    /// 8-bit integers with a scale a token and head.
    Int8PerTokenHead,
    /// 8-bit floats with a scale a token and head.
    Fp8PerTokenHead,
    /// 4-bit floats with block scales.
    Nvfp4,
}

/// How many tokens one stored state stands for, as a fraction (4/1: four tokens are compressed into
/// one state; 1/2: two states a token).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
pub struct TokensPerState {
    /// Numerator.
    pub num: usize,
    /// Denominator.
    pub den: usize,
}

impl TokensPerState {
    /// One state a token.
    pub const ONE: Self = Self { num: 1, den: 1 };

    /// States of a block of so many tokens.
    pub fn states_of(self, tokens: usize) -> usize {
        tokens * self.den / self.num.max(1)
    }
}

/// What the distance from one block to the next must be a multiple of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StrideAlignment {
    /// Bytes.
    Bytes(usize),
    /// The bytes of so many tokens of one block.
    Tokens(usize),
}

/// Keys and values of one layer: heads, sizes, dtype. Build it with [`AttentionSpec::new`] and struct
/// update, so that a new field breaks nobody:
///
/// ```
/// use headway_attention::group::kv::spec::AttentionSpec;
/// use headway_tensor::DType;
/// let spec = AttentionSpec { head_size_v: 64, ..AttentionSpec::new(16, 2, 128, DType::BF16) };
/// assert_eq!(spec.page_size_bytes(), 16 * 2 * (128 + 64) * 2);
/// ```
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
    /// Quantisation.
    pub quant: KvQuantMode,
    /// Head slots of a page, where packing makes them other than one a key/value head.
    pub num_head_slots: Option<usize>,
    /// Bytes of one head slot of one state, where they are other than dense key and value.
    pub state_content_bytes: Option<usize>,
    /// Tokens of one stored state.
    pub tokens_per_state: TokensPerState,
    /// Bytes that the page's size is padded up to a multiple of.
    pub alignment: Option<usize>,
    /// What the distance between blocks must be a multiple of.
    pub block_stride_alignment: Option<StrideAlignment>,
    /// Whether decode context parallelism spreads the tokens over ranks.
    pub dcp_sharded: bool,
    /// Window of layers that look back only so far although all tokens are kept.
    pub sliding_window_mask: Option<usize>,
    /// Chunk of layers that look only at their chunk although all tokens are kept.
    pub chunk_mask: Option<usize>,
    /// The layer attends in both directions; bears on scheduling, not on the cache.
    pub non_causal: bool,
    /// Tokens below a sliding window that are kept for drafting.
    pub extra_retained_tokens: usize,
    /// Name of a packed MLA format (`fp8_ds_mla`), where it is one.
    pub cache_format: Option<String>,
    /// Version of the model family's cache format, where it has several.
    pub model_version: Option<String>,
    /// The window is recomputed rather than cached across requests.
    pub bounded_replay: bool,
}

impl AttentionSpec {
    /// Keys and values of equal size, unquantised and unpadded.
    pub fn new(block_size: usize, num_kv_heads: usize, head_size: usize, dtype: DType) -> Self {
        Self {
            block_size,
            num_kv_heads,
            head_size,
            head_size_v: head_size,
            dtype,
            page_size_padded: None,
            quant: KvQuantMode::None,
            num_head_slots: None,
            state_content_bytes: None,
            tokens_per_state: TokensPerState::ONE,
            alignment: None,
            block_stride_alignment: None,
            dcp_sharded: true,
            sliding_window_mask: None,
            chunk_mask: None,
            non_causal: false,
            extra_retained_tokens: 0,
            cache_format: None,
            model_version: None,
            bounded_replay: false,
        }
    }
}

/// How state-space caches keep states along a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MambaCacheMode {
    /// The running state alone.
    #[default]
    None,
    /// A state at each block's end.
    All,
    /// The running state, and one at the last block boundary.
    Align,
}

/// A state of fixed size a request.
#[derive(Clone, PartialEq, Eq, Debug, Hash, Serialize)]
pub struct MambaSpec {
    /// Tokens that one page stands for.
    pub block_size: usize,
    /// Shapes of the state tensors of a request.
    pub shapes: Vec<Vec<usize>>,
    /// Their dtypes.
    pub dtypes: Vec<DType>,
    /// Bytes that a page is padded to.
    pub page_size_padded: Option<usize>,
    /// Extra states for drafted tokens.
    pub num_speculative_blocks: usize,
    /// Extra states at chunk ends of a prefill.
    pub num_prefill_checkpoint_blocks: usize,
    /// Which states are kept.
    pub cache_mode: MambaCacheMode,
    /// Tokens in a chunk of the layers' scan, where they scan: metadata depends on it.
    pub chunk_size: Option<usize>,
}

impl MambaSpec {
    /// The running state of these tensors, unpadded.
    pub fn new(block_size: usize, shapes: Vec<Vec<usize>>, dtypes: Vec<DType>) -> Self {
        Self {
            block_size,
            shapes,
            dtypes,
            page_size_padded: None,
            num_speculative_blocks: 0,
            num_prefill_checkpoint_blocks: 0,
            cache_mode: MambaCacheMode::None,
            chunk_size: None,
        }
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
    Mamba(MambaSpec),
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
    /// The prompt, and the last `rswa_window` generated tokens.
    Rswa {
        /// Heads and sizes.
        attention: AttentionSpec,
        /// Generated tokens that stay.
        rswa_window: usize,
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
            | Self::Rswa { attention, .. }
            | Self::Sink { attention, .. } => Some(attention),
            Self::Mamba(_) => None,
        }
    }

    /// Heads and sizes to change, for all kinds but Mamba.
    pub fn attention_mut(&mut self) -> Option<&mut AttentionSpec> {
        match self {
            Self::Full(a) | Self::Mla(a) | Self::Cross(a) | Self::EncoderOnly(a) => Some(a),
            Self::SlidingWindow { attention, .. }
            | Self::ChunkedLocal { attention, .. }
            | Self::SlidingWindowMla { attention, .. }
            | Self::Rswa { attention, .. }
            | Self::Sink { attention, .. } => Some(attention),
            Self::Mamba(_) => None,
        }
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        match self {
            Self::Mamba(m) => m.block_size,
            other => other.attention().map_or(0, |a| a.block_size),
        }
    }

    /// The same spec with blocks of another size.
    #[must_use]
    pub fn with_block_size(mut self, block_size: usize) -> Self {
        match &mut self {
            Self::Mamba(m) => m.block_size = block_size,
            other => {
                if let Some(a) = other.attention_mut() {
                    a.block_size = block_size;
                }
            }
        }
        self
    }

    /// The same spec with pages padded to so many bytes.
    #[must_use]
    pub fn with_padded_page(mut self, bytes: usize) -> Self {
        match &mut self {
            Self::Mamba(m) => m.page_size_padded = Some(bytes),
            other => {
                if let Some(a) = other.attention_mut() {
                    a.page_size_padded = Some(bytes);
                }
            }
        }
        self
    }

    /// The same spec with another mode of keeping states; other kinds stay as they are.
    #[must_use]
    pub fn with_cache_mode(mut self, mode: MambaCacheMode) -> Self {
        if let Self::Mamba(m) = &mut self {
            m.cache_mode = mode;
        }
        self
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

    /// Element type of the cache; raw bytes for state-space layers.
    pub fn dtype(&self) -> DType {
        self.attention().map_or(DType::U8, |a| a.dtype)
    }

    /// The kind's name (`full_attention`, `sliding_window`, …).
    pub fn kind_name(&self) -> &'static str {
        match self {
            Self::Full(_) | Self::Rswa { .. } => "full_attention",
            Self::SlidingWindow { .. } => "sliding_window",
            Self::ChunkedLocal { .. } => "chunked_local_attention",
            Self::Mla(_) => "mla_attention",
            Self::SlidingWindowMla { .. } => "sliding_window_mla",
            Self::Mamba(_) => "mamba",
            Self::Cross(_) => "cross_attention",
            Self::EncoderOnly(_) => "encoder_only_attention",
            Self::Sink { .. } => "sink_full_attention",
        }
    }
}
