//! Lifetime: process. The rule book as data, and what a layer needs of a backend.
//!
//! A rule book is a value: it can be printed, serialised, compared and tested without a device. What
//! no field can say stands in [`crate::AttentionBackend::combination`].

mod capability;
mod need;
mod output;
mod validate;

pub use capability::{CapabilityRange, ComputeCapability};
pub use need::{AttnType, KvCacheDType, LatentDims, LayerNeed, StateSpaceMixer};

use crate::group::{graph::GraphSupport, kv::layout::KvCacheLayout};
use headway_tensor::{DType, RowQuantKind};
use serde::{Deserialize, Serialize};
use std::{borrow::Cow, fmt};

/// The three kinds of layer, as a value.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KindTag {
    /// Softmax attention over keys and values.
    Standard,
    /// Multi-head latent attention.
    Mla,
    /// A state-space mixer.
    StateSpace,
}

impl KindTag {
    /// As data files write it.
    pub const fn key(self) -> &'static str {
        match self {
            Self::Standard => "standard",
            Self::Mla => "mla",
            Self::StateSpace => "state_space",
        }
    }

    /// As users read it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Standard => "standard attention",
            Self::Mla => "MLA",
            Self::StateSpace => "state-space",
        }
    }
}

/// A kernel block size that a backend takes, in tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelBlockSize {
    /// Exactly this size.
    Exact(usize),
    /// Any multiple of this size.
    MultipleOf(usize),
}

impl KernelBlockSize {
    /// Whether a kernel can be given blocks of this size.
    pub fn accepts(self, block_size: usize) -> bool {
        match self {
            Self::Exact(n) => n == block_size,
            Self::MultipleOf(n) => block_size > 0 && block_size.is_multiple_of(n),
        }
    }
}

impl fmt::Display for KernelBlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(n) => write!(f, "{n}"),
            Self::MultipleOf(n) => write!(f, "MultipleOf({n})"),
        }
    }
}

/// Sizes in steps: `first`, `first + step`, … up to `last`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
pub struct SizeRange {
    /// The smallest.
    pub first: usize,
    /// The largest; not given in JSON: no limit.
    #[serde(default = "no_limit")]
    pub last: usize,
    /// The distance between two.
    pub step: usize,
}

fn no_limit() -> usize {
    usize::MAX
}

impl SizeRange {
    /// One size alone.
    pub const fn exactly(n: usize) -> Self {
        Self { first: n, last: n, step: 1 }
    }

    /// Whether the range holds `n`.
    pub fn contains(self, n: usize) -> bool {
        n >= self.first && n <= self.last && (n - self.first).is_multiple_of(self.step.max(1))
    }
}

impl fmt::Display for SizeRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self { first, last, .. } if first == last => write!(f, "{first}"),
            Self { first, last: usize::MAX, step } => write!(f, "{first} and more by {step}"),
            Self { first, last, step } => write!(f, "{first}-{last} by {step}"),
        }
    }
}

/// Why a backend doesn't fit a layer, in words that match the field's (`head_size not supported`).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Refusal(pub Cow<'static, str>);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&'static str> for Refusal {
    fn from(s: &'static str) -> Self {
        Self(Cow::Borrowed(s))
    }
}

impl From<String> for Refusal {
    fn from(s: String) -> Self {
        Self(Cow::Owned(s))
    }
}

/// What a backend supports. Build it with struct update from the default, so that a new field breaks
/// no backend:
///
/// ```
/// use headway_attention::process::rules::{KernelBlockSize, RuleBook, SizeRange};
/// let rules = RuleBook {
///     name: "MY_ATTN".into(),
///     head_sizes: vec![SizeRange { first: 64, last: 256, step: 64 }],
///     kernel_block_sizes: vec![KernelBlockSize::MultipleOf(16)],
///     ..RuleBook::default()
/// };
/// assert!(rules.supports_head_size(128) && !rules.supports_head_size(96));
/// ```
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RuleBook {
    /// The name that users select; the identity.
    pub name: Cow<'static, str>,
    /// The kind of layer that it implements.
    pub kind: KindTag,
    /// `cpu`, `cuda`, …: [`headway_tensor::Device::kind`].
    pub platform: Cow<'static, str>,
    /// Activation dtypes.
    pub dtypes: Vec<DType>,
    /// KV cache dtypes by their user-facing names.
    pub kv_cache_dtypes: Vec<KvCacheDType>,
    /// Head sizes; empty: any.
    pub head_sizes: Vec<SizeRange>,
    /// Whether value heads may have another size than key heads.
    pub supports_different_v_head_size: bool,
    /// Sizes of the blocks that a kernel takes, in tokens; empty: any.
    pub kernel_block_sizes: Vec<KernelBlockSize>,
    /// Manager blocks are not cut: a multiple of an exact kernel block size is no block size.
    pub whole_blocks_only: bool,
    /// The block size that it works best with, in tokens; `None`: the default of the engine.
    pub preferred_block_size: Option<usize>,
    /// The block size where no kernel takes the engine's default; `None`: the smallest that a kernel takes.
    pub fallback_block_size: Option<usize>,
    /// KV cache layouts, most preferred first; empty: any, no preference.
    pub kv_cache_layouts: Vec<KvCacheLayout>,
    /// Kinds of attention.
    pub attn_types: Vec<AttnType>,
    /// Compute capabilities, where the platform has such; `None`: any.
    pub compute_capabilities: Option<Vec<CapabilityRange>>,
    /// Sliding windows.
    pub supports_sliding_window: bool,
    /// Attention sinks.
    pub supports_sinks: bool,
    /// A cap on the logits.
    pub supports_logit_soft_cap: bool,
    /// ALiBi slopes.
    pub supports_alibi: bool,
    /// Non-causal attention over a cache, per request.
    pub supports_non_causal: bool,
    /// Ranges of a request's tokens that see each other in both directions, whatever causality and the window
    /// say (PrefixLM: the tokens of an image): `StepInputs::mm_prefix_ranges`.
    pub supports_mm_prefix: bool,
    /// Square-root ALiBi.
    pub supports_alibi_sqrt: bool,
    /// Scales per head for a quantised cache.
    pub supports_per_head_quant_scales: bool,
    /// Reference sliding-window attention (R-SWA): a window that leaves a request's prefix, its prompt, visible
    /// (`KvCacheSpec::Rswa`, `StepInputs::rswa_prefix_lens`).
    pub supports_rswa: bool,
    /// Chunked local attention: a token sees those of its own chunk alone (`KvCacheSpec::ChunkedLocal`).
    pub supports_chunked_local: bool,
    /// Sparse attention by an index of keys.
    pub is_sparse: bool,
    /// A request's answer is bitwise the same whatever else is in the batch, when asked for.
    pub supports_batch_invariance: bool,
    /// Transfer of the cache by a KV connector.
    pub supports_kv_connector: bool,
    /// Decode context parallelism.
    pub supports_dcp: bool,
    /// Non-causal attention together with decode context parallelism.
    pub supports_non_causal_dcp: bool,
    /// Host query lengths that are only an upper bound of the device's (adaptive verification).
    pub supports_inexact_query_lens: bool,
    /// A KV cache dtype that is not set at all.
    pub supports_unset_kv_cache_dtype: bool,
    /// Prefill context parallelism.
    pub supports_pcp: bool,
    /// `forward` writes new keys and values itself; [`crate::AttentionImpl::FORWARD_WRITES_KV_CACHE`] says
    /// the same.
    pub forward_includes_kv_cache_update: bool,
    /// A fused operation may have written the cache already.
    pub supports_kv_cache_update_bypass: bool,
    /// What `forward_quantised` writes: outputs as 8-bit codes, in the kernel's last step.
    pub output_quants: Vec<RowQuantKind>,
    /// The least that any configuration of its builder supports of CUDA graphs; the builder's plan
    /// decides.
    pub graph_support: GraphSupport,
    /// Most new tokens of a request in a full graph of decodes of mixed lengths; `None`: no such graph.
    pub varlen_graph_max_query_len: Option<usize>,
    /// Requests with at most this many new tokens are decodes that must come first in the batch.
    pub reorder_batch_threshold: Option<usize>,
}

impl Default for RuleBook {
    fn default() -> Self {
        Self {
            name: Cow::Borrowed(""),
            kind: KindTag::Standard,
            platform: Cow::Borrowed("cpu"),
            dtypes: vec![DType::F16, DType::BF16],
            kv_cache_dtypes: vec![KvCacheDType::AUTO],
            head_sizes: vec![],
            supports_different_v_head_size: false,
            kernel_block_sizes: vec![KernelBlockSize::MultipleOf(1)],
            whole_blocks_only: false,
            preferred_block_size: None,
            fallback_block_size: None,
            kv_cache_layouts: vec![],
            attn_types: vec![AttnType::Decoder],
            compute_capabilities: None,
            supports_sliding_window: true,
            supports_sinks: false,
            supports_logit_soft_cap: true,
            supports_alibi: true,
            supports_non_causal: false,
            supports_mm_prefix: false,
            supports_alibi_sqrt: false,
            supports_per_head_quant_scales: false,
            supports_rswa: false,
            supports_chunked_local: false,
            is_sparse: false,
            supports_batch_invariance: false,
            supports_kv_connector: true,
            supports_dcp: false,
            supports_non_causal_dcp: false,
            supports_inexact_query_lens: false,
            supports_unset_kv_cache_dtype: true,
            supports_pcp: false,
            forward_includes_kv_cache_update: false,
            supports_kv_cache_update_bypass: false,
            output_quants: vec![],
            graph_support: GraphSupport::Never,
            varlen_graph_max_query_len: None,
            reorder_batch_threshold: None,
        }
    }
}
