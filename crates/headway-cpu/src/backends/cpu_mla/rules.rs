//! Lifetime: process. Class 1 of 3: the rule book of `CPU_MLA`, and its settings.

use super::{CpuMlaBuilder, CpuMlaLayer};
use crate::{CpuExec, backends::common, kernels::attention::GROUP};
use headway_attention::{
    AttentionBackend, AttentionError, LayerNeed, Mla, Refusal, RuleBook,
    group::kv::layout::KvCacheLayout,
    process::rules::{KernelBlockSize, KindTag, SizeRange},
};
use headway_tensor::DType;
use serde::{Deserialize, Deserializer, de::Error};

/// The name of this backend.
pub(super) const NAME: &str = "CPU_MLA";
/// Layouts whose pages are one region of memory: with one head the order of heads and tokens is the same.
pub(super) const LAYOUTS: [KvCacheLayout; 4] =
    [KvCacheLayout::LBNHC, KvCacheLayout::LBHNC, KvCacheLayout::BLNHC, KvCacheLayout::BLHNC];

/// Most tokens of the workspace that can be asked for.
const MOST_WORKSPACE_TOKENS: usize = 1 << 20;

/// Latent attention on the CPU. See the [folder](super).
pub enum CpuMla {}

/// The backend's configuration table.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct CpuMlaConfig {
    /// Tokens whose keys and values a prefill expands at a time, a multiple of 16 up to 1,048,576; `None`: by the rule in the
    /// [folder](super).
    #[serde(deserialize_with = "workspace_tokens")]
    pub workspace_tokens: Option<usize>,
}

fn workspace_tokens<'de, D: Deserializer<'de>>(d: D) -> Result<Option<usize>, D::Error> {
    let tokens = i64::deserialize(d)?;
    match usize::try_from(tokens) {
        Ok(n) if (GROUP..=MOST_WORKSPACE_TOKENS).contains(&n) && n.is_multiple_of(GROUP) => Ok(Some(n)),
        _ => Err(D::Error::custom(format!(
            "workspace_tokens = {tokens}: the workspace holds keys and values of a multiple of {GROUP} tokens, from \
             {GROUP} to {MOST_WORKSPACE_TOKENS}; give such a number, or leave it out"
        ))),
    }
}

/// Refuses in the backend's name.
pub(super) fn refuse(what: impl Into<String>, remedy: &str) -> AttentionError {
    common::refuse(NAME, what, remedy)
}

impl AttentionBackend for CpuMla {
    const CONTRACT: u32 = 1;
    type Exec = CpuExec;
    type Kind = Mla;
    type Config = CpuMlaConfig;
    type Builder = CpuMlaBuilder;
    type Impl = CpuMlaLayer;

    fn rules() -> RuleBook {
        RuleBook {
            name: NAME.into(),
            kind: KindTag::Mla,
            platform: "cpu".into(),
            dtypes: vec![DType::F32, DType::BF16, DType::F16],
            kv_cache_dtypes: ["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]
                .map(Into::into)
                .into(),
            head_sizes: vec![SizeRange { first: 8, last: 1024, step: 8 }],
            kernel_block_sizes: [16, 32, 64, 128].map(KernelBlockSize::Exact).into(),
            preferred_block_size: Some(16),
            kv_cache_layouts: LAYOUTS.to_vec(),
            supports_sliding_window: false,
            supports_logit_soft_cap: false,
            supports_alibi: false,
            supports_batch_invariance: true,
            supports_kv_connector: false,
            reorder_batch_threshold: Some(1),
            ..RuleBook::default()
        }
    }

    fn combination(need: &LayerNeed) -> Option<Refusal> {
        let l = need.latent?;
        let head = l.qk_nope_head_dim + l.qk_rope_head_dim;
        let parts = [l.qk_nope_head_dim, l.qk_rope_head_dim, l.kv_lora_rank, l.v_head_dim];
        if l.kv_lora_rank + l.qk_rope_head_dim != need.head_size {
            return Some("a cache row other than kv_lora_rank + qk_rope_head_dim not supported".into());
        }
        if parts.iter().any(|n| !n.is_multiple_of(8)) {
            return Some("latent dimensions that are not multiples of 8 not supported".into());
        }
        if l.kv_lora_rank == 0 || l.v_head_dim == 0 || l.qk_nope_head_dim == 0 || head.max(l.v_head_dim) > 512
        {
            return Some("heads of 0 or of more than 512 elements not supported".into());
        }
        None
    }
}
