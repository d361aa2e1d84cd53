//! Lifetime: process. Class 1 of 3: the rule book of `CUDA_MLA`, and its settings.

use super::{CudaMlaBuilder, CudaMlaLayer};
use crate::{
    CudaExec,
    kernels::mla::{Dims, MAX_LATENT},
};
use headway_attention::{
    AttentionBackend, GraphSupport, LayerNeed, Mla, Refusal, RuleBook,
    group::kv::layout::KvCacheLayout,
    process::rules::{CapabilityRange, ComputeCapability, KernelBlockSize, KindTag, LatentDims, SizeRange},
};
use headway_tensor::DType;
use serde::{Deserialize, Deserializer, de::Error};

/// The name of this backend.
pub(super) const NAME: &str = "CUDA_MLA";
/// Layouts whose pages are one region of memory: with one head the order of heads and tokens is the same.
pub(super) const LAYOUTS: [KvCacheLayout; 4] =
    [KvCacheLayout::LBNHC, KvCacheLayout::LBHNC, KvCacheLayout::BLNHC, KvCacheLayout::BLHNC];
/// What runs of tokens in the prefills' workspace are aligned to.
pub(super) const ALIGNMENT: usize = 16;
/// Most tokens of the workspace that can be asked for.
const MOST_WORKSPACE_TOKENS: usize = 1 << 20;

/// Latent attention on NVIDIA devices. See the [folder](super).
pub enum CudaMla {}

/// The backend's configuration table.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct CudaMlaConfig {
    /// Tokens whose keys and values a prefill expands at a time, a multiple of 16 up to 1,048,576; `None`: by the rule
    /// in the [folder](super).
    #[serde(deserialize_with = "workspace_tokens")]
    pub workspace_tokens: Option<usize>,
}

fn workspace_tokens<'de, D: Deserializer<'de>>(d: D) -> Result<Option<usize>, D::Error> {
    let tokens = i64::deserialize(d)?;
    match usize::try_from(tokens) {
        Ok(n) if (ALIGNMENT..=MOST_WORKSPACE_TOKENS).contains(&n) && n.is_multiple_of(ALIGNMENT) => {
            Ok(Some(n))
        }
        _ => Err(D::Error::custom(format!(
            "workspace_tokens = {tokens}: the workspace holds keys and values of a multiple of {ALIGNMENT} tokens, from \
             {ALIGNMENT} to {MOST_WORKSPACE_TOKENS}; give such a number, or leave it out"
        ))),
    }
}

/// The sizes of a layer.
pub(super) fn dims(heads: usize, l: &LatentDims) -> Dims {
    Dims { heads, nope: l.qk_nope_head_dim, rope: l.qk_rope_head_dim, rank: l.kv_lora_rank, v: l.v_head_dim }
}

impl AttentionBackend for CudaMla {
    const CONTRACT: u32 = 1;
    type Exec = CudaExec;
    type Kind = Mla;
    type Config = CudaMlaConfig;
    type Builder = CudaMlaBuilder;
    type Impl = CudaMlaLayer;

    fn rules() -> RuleBook {
        RuleBook {
            name: NAME.into(),
            kind: KindTag::Mla,
            platform: "cuda".into(),
            dtypes: vec![DType::BF16, DType::F16],
            kv_cache_dtypes: ["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]
                .map(Into::into)
                .into(),
            head_sizes: vec![SizeRange { first: 8, last: MAX_LATENT, step: 8 }],
            kernel_block_sizes: vec![KernelBlockSize::MultipleOf(16)],
            preferred_block_size: Some(16),
            kv_cache_layouts: LAYOUTS.to_vec(),
            compute_capabilities: Some(vec![CapabilityRange {
                from: Some(ComputeCapability(8, 0)),
                to: None,
            }]),
            supports_sliding_window: false,
            supports_logit_soft_cap: false,
            supports_alibi: false,
            supports_batch_invariance: true,
            supports_kv_connector: false,
            reorder_batch_threshold: Some(1),
            graph_support: GraphSupport::UniformBatch,
            ..RuleBook::default()
        }
    }

    fn combination(need: &LayerNeed) -> Option<Refusal> {
        let l = need.latent?;
        if l.kv_lora_rank + l.qk_rope_head_dim != need.head_size {
            return Some("a cache row other than kv_lora_rank + qk_rope_head_dim not supported".into());
        }
        if let Some(what) = dims(need.num_heads, &l).refusal() {
            return Some(format!("{what} not supported").into());
        }
        let cache = need.kv_cache_dtype.as_ref()?.element(need.dtype)?;
        let eight_bits = matches!(cache, DType::F8E4M3 | DType::F8E5M2);
        (cache != need.dtype && !eight_bits).then(|| {
            format!(
                "kv_cache_dtype {cache} with {} activations not supported (auto or an fp8 type is)",
                need.dtype
            )
            .into()
        })
    }
}
