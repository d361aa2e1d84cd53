//! What a layer needs of a backend: the question that selection puts to every rule book.

use super::{ComputeCapability, KindTag};
use headway_tensor::DType;
use serde::{Deserialize, Serialize};
use std::{borrow::Cow, fmt};

/// The kind of attention by what attends to what.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttnType {
    /// Causal self-attention over a KV cache.
    Decoder,
    /// Self-attention of an encoder in an encoder-decoder model.
    Encoder,
    /// Self-attention of an encoder-only model; no cache.
    EncoderOnly,
    /// Cross-attention of a decoder over an encoder's output.
    EncoderDecoder,
}

impl AttnType {
    /// The field's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Decoder => "decoder",
            Self::Encoder => "encoder",
            Self::EncoderOnly => "encoder_only",
            Self::EncoderDecoder => "encoder_decoder",
        }
    }
}

/// A KV cache dtype by its user-facing name (`auto`, `bfloat16`, `fp8`, `fp8_e4m3`, …).
#[derive(Clone, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct KvCacheDType(pub Cow<'static, str>);

impl KvCacheDType {
    /// The activations' type.
    pub const AUTO: Self = Self(Cow::Borrowed("auto"));

    /// The name as a dtype; `compute` is what `auto` means. `None` for a name without an element
    /// type of its own.
    pub fn element(&self, compute: DType) -> Option<DType> {
        Some(match self.0.as_ref() {
            "auto" => compute,
            "float32" | "f32" => DType::F32,
            "float16" | "f16" => DType::F16,
            "bfloat16" | "bf16" => DType::BF16,
            "fp8" | "fp8_e4m3" => DType::F8E4M3,
            "fp8_e5m2" => DType::F8E5M2,
            _ => return None,
        })
    }
}

impl From<&'static str> for KvCacheDType {
    fn from(s: &'static str) -> Self {
        Self(Cow::Borrowed(s))
    }
}

impl From<String> for KvCacheDType {
    fn from(s: String) -> Self {
        Self(Cow::Owned(s))
    }
}

impl fmt::Display for KvCacheDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// The kinds of state-space and linear mixer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateSpaceMixer {
    /// Mamba-1.
    Mamba1,
    /// Mamba-2.
    Mamba2,
    /// A short convolution alone.
    ShortConv,
    /// Linear attention.
    Linear,
    /// Gated delta net.
    Gdn,
}

impl StateSpaceMixer {
    /// All mixers.
    pub const ALL: [Self; 5] = [Self::Mamba1, Self::Mamba2, Self::ShortConv, Self::Linear, Self::Gdn];

    /// As data files write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mamba1 => "mamba1",
            Self::Mamba2 => "mamba2",
            Self::ShortConv => "short_conv",
            Self::Linear => "linear",
            Self::Gdn => "gdn",
        }
    }
}

/// The dimensions of multi-head latent attention, as `config.json` names them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize)]
pub struct LatentDims {
    /// Elements of a query head without a position.
    pub qk_nope_head_dim: usize,
    /// Elements of a query head that are rotated; 0: the model has no positions.
    pub qk_rope_head_dim: usize,
    /// Elements of the latent.
    pub kv_lora_rank: usize,
    /// Elements of a value head.
    pub v_head_dim: usize,
    /// Keys that sparse attention keeps; `None`: the model has no index.
    pub index_topk: Option<usize>,
}

/// What one layer needs, with the run-wide options that bear on the choice.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct LayerNeed {
    /// The kind of layer.
    pub kind: KindTag,
    /// Device kind that the layer runs on (`cpu`, `cuda`).
    pub platform: Cow<'static, str>,
    /// The device's compute capability, where it has one.
    pub compute_capability: Option<ComputeCapability>,
    /// Elements of a key head.
    pub head_size: usize,
    /// Elements of a value head.
    pub head_size_v: usize,
    /// The head size in the model's config, which some rules read instead of the layer's; `None`: no model is
    /// known.
    pub model_head_size: Option<usize>,
    /// The model's latent dimensions.
    pub latent: Option<LatentDims>,
    /// Which mixer a state-space layer has.
    pub state_space: Option<StateSpaceMixer>,
    /// Query heads on this rank; 0: not known.
    pub num_heads: usize,
    /// Key/value heads on this rank.
    pub num_kv_heads: usize,
    /// Activation dtype.
    pub dtype: DType,
    /// KV cache dtype; `None`: unset.
    pub kv_cache_dtype: Option<KvCacheDType>,
    /// The user's block size in tokens; `None`: not given.
    pub block_size: Option<usize>,
    /// Whether the layer has a KV cache; rules that concern the cache are not asked otherwise.
    pub has_cache: bool,
    /// What attends to what.
    pub attn_type: AttnType,
    /// A sliding window, in tokens.
    pub sliding_window: Option<usize>,
    /// Attention sinks.
    pub has_sinks: bool,
    /// A cap on the logits.
    pub has_logit_soft_cap: bool,
    /// ALiBi slopes.
    pub has_alibi: bool,
    /// Sparse attention.
    pub use_sparse: bool,
    /// Bidirectional multimodal prefixes.
    pub use_mm_prefix: bool,
    /// Scales per head for a quantised cache.
    pub use_per_head_quant_scales: bool,
    /// Non-causal attention.
    pub use_non_causal: bool,
    /// `--batch-invariant`.
    pub use_batch_invariant: bool,
    /// A KV connector.
    pub use_kv_connector: bool,
    /// Decode context parallelism.
    pub use_dcp: bool,
    /// Prefill context parallelism.
    pub use_pcp: bool,
    /// Reference sliding-window attention (R-SWA).
    pub use_rswa: bool,
    /// Chunked local attention: a token sees those of its own chunk alone (`KvCacheSpec::ChunkedLocal`).
    pub use_chunked_local: bool,
    /// Adaptive verification of drafts.
    pub use_adaptive_verification: bool,
    /// Tokens drafted a step; 0: no speculation.
    pub num_speculative_tokens: usize,
    /// The host's processor has AMX.
    pub cpu_has_amx: bool,
}

impl Default for LayerNeed {
    fn default() -> Self {
        Self {
            kind: KindTag::Standard,
            platform: Cow::Borrowed("cpu"),
            compute_capability: None,
            head_size: 128,
            head_size_v: 128,
            model_head_size: None,
            latent: None,
            state_space: None,
            num_heads: 1,
            num_kv_heads: 1,
            dtype: DType::BF16,
            kv_cache_dtype: None,
            block_size: None,
            has_cache: true,
            attn_type: AttnType::Decoder,
            sliding_window: None,
            has_sinks: false,
            has_logit_soft_cap: false,
            has_alibi: false,
            use_sparse: false,
            use_mm_prefix: false,
            use_per_head_quant_scales: false,
            use_non_causal: false,
            use_batch_invariant: false,
            use_kv_connector: false,
            use_dcp: false,
            use_pcp: false,
            use_rswa: false,
            use_chunked_local: false,
            use_adaptive_verification: false,
            num_speculative_tokens: 0,
            cpu_has_amx: false,
        }
    }
}
