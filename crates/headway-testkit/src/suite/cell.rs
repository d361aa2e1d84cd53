//! A cell of the grid that the suite walks: one value on each axis of a rule book. Prints as the name
//! that reproduces it.

use headway_attention::{
    LayerNeed, RuleBook,
    group::kv::layout::KvCacheLayout,
    process::rules::{AttnType, KvCacheDType, LatentDims},
};
use headway_tensor::DType;
use std::fmt;

/// What kinds of request a batch holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum Phase {
    /// Whole prompts, and later chunks of prompts.
    Prefill,
    /// One new token a request.
    Decode,
    /// Decodes first, then later chunks and whole prompts.
    Mixed,
}

impl Phase {
    /// All phases.
    pub const ALL: [Self; 3] = [Self::Prefill, Self::Decode, Self::Mixed];

    /// As reports show it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Mixed => "mixed",
        }
    }
}

/// Which requests see keys after their own position.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub enum NonCausal {
    /// None.
    #[default]
    No,
    /// All.
    All,
    /// Every second one: one flag a request.
    PerRequest,
}

/// The optional parts of attention.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Features {
    /// Sliding window in tokens.
    pub window: Option<usize>,
    /// Sinks.
    pub sinks: bool,
    /// Soft cap.
    pub soft_cap: Option<f32>,
    /// ALiBi.
    pub alibi: bool,
    /// Causality.
    pub non_causal: NonCausal,
    /// Ranges that see each other both ways (PrefixLM).
    pub spans: bool,
    /// R-SWA's window in tokens, beside a prefix of each request.
    pub rswa: Option<usize>,
    /// Queries and keys so large that scores reach ±10⁴.
    pub huge_scores: bool,
}

impl Features {
    /// The name under which the report counts it; sizes are left out.
    pub fn name(&self) -> String {
        let parts = [
            (self.window.is_some(), "window"),
            (self.sinks, "sinks"),
            (self.soft_cap.is_some(), "softcap"),
            (self.alibi, "alibi"),
            (self.non_causal == NonCausal::All, "noncausal"),
            (self.non_causal == NonCausal::PerRequest, "causal per request"),
            (self.spans, "mm-prefix"),
            (self.rswa.is_some(), "r-swa"),
            (self.huge_scores, "huge scores"),
        ];
        let on: Vec<_> = parts.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        if on.is_empty() { "plain".into() } else { on.join("+") }
    }
}

/// One value on each axis.
#[derive(Clone, PartialEq, Debug)]
pub struct Cell {
    /// Activations.
    pub dtype: DType,
    /// Cache, by its user-facing name.
    pub kv_cache_dtype: KvCacheDType,
    /// Elements of a key head.
    pub head_size: usize,
    /// Elements of a value head.
    pub head_size_v: usize,
    /// Dimensions of latent attention; heads then have the cache row's size, as needs say it.
    pub latent: Option<LatentDims>,
    /// Tokens drafted a step: decodes have one more.
    pub drafts: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Tokens in a manager's block.
    pub block_size: usize,
    /// Tokens in a kernel's block.
    pub kernel_block_size: usize,
    /// Order of the cache's axes; `None` where the rule book has no preference.
    pub layout: Option<KvCacheLayout>,
    /// Optional parts.
    pub features: Features,
    /// Kinds of request.
    pub phase: Phase,
    /// Ask for batch invariance, and check it.
    pub batch_invariant: bool,
}

impl Cell {
    /// The cache's element type; `None` for a name without one.
    pub fn kv_element(&self) -> Option<DType> {
        self.kv_cache_dtype.element(self.dtype)
    }

    /// Elements of a query head.
    pub fn q_head(&self) -> usize {
        self.latent.map_or(self.head_size, |l| l.qk_nope_head_dim + l.qk_rope_head_dim)
    }

    /// Elements of a head of the output.
    pub fn out_head(&self) -> usize {
        self.latent.map_or(self.head_size_v, |l| l.v_head_dim)
    }

    /// Elements that a token's key and value take in the cache; a latent row is both.
    pub fn kv_widths(&self) -> [usize; 2] {
        match self.latent {
            None => [self.num_kv_heads * self.head_size, self.num_kv_heads * self.head_size_v],
            Some(_) => [self.head_size, 0],
        }
    }

    /// The question that selection would put for this cell's layer.
    pub fn need(&self, rules: &RuleBook) -> LayerNeed {
        LayerNeed {
            kind: rules.kind,
            platform: rules.platform.clone(),
            compute_capability: rules.compute_capabilities.as_ref().and_then(|ranges| ranges.first()?.from),
            head_size: self.head_size,
            head_size_v: self.head_size_v,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            latent: self.latent,
            num_speculative_tokens: self.drafts,
            dtype: self.dtype,
            kv_cache_dtype: Some(self.kv_cache_dtype.clone()),
            block_size: Some(self.block_size),
            attn_type: AttnType::Decoder,
            sliding_window: self.features.window,
            has_sinks: self.features.sinks,
            has_logit_soft_cap: self.features.soft_cap.is_some(),
            has_alibi: self.features.alibi,
            use_non_causal: self.features.non_causal != NonCausal::No,
            use_mm_prefix: self.features.spans,
            use_rswa: self.features.rswa.is_some(),
            use_batch_invariant: self.batch_invariant,
            ..LayerNeed::default()
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} kv={} d={}/{} heads={}/{} block={}/{}",
            self.phase.name(),
            self.dtype,
            self.kv_cache_dtype,
            self.head_size,
            self.head_size_v,
            self.num_heads,
            self.num_kv_heads,
            self.block_size,
            self.kernel_block_size,
        )?;
        if let Some(l) = self.latent {
            let (nope, rope) = (l.qk_nope_head_dim, l.qk_rope_head_dim);
            write!(f, " latent={nope}+{rope}/{}/{}", l.kv_lora_rank, l.v_head_dim)?;
        }
        if self.drafts > 0 {
            write!(f, " drafts={}", self.drafts)?;
        }
        if let Some(layout) = self.layout {
            write!(f, " layout={layout}")?;
        }
        write!(f, " {}", self.features.name())?;
        if let Some(w) = self.features.window.or(self.features.rswa) {
            write!(f, " W={w}")?;
        }
        if self.batch_invariant {
            write!(f, " batch-invariant")?;
        }
        Ok(())
    }
}
