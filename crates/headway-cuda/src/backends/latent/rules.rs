//! Lifetime: process. What rule books of latent attention share, and the setting of the prefills' workspace.

use crate::kernels::mla::{DEEPSEEK, Dims};
use headway_attention::{
    LayerNeed, Refusal, RuleBook,
    group::kv::layout::KvCacheLayout,
    process::rules::{KindTag, LatentDims, SizeRange},
};
use headway_tensor::DType;
use serde::{Deserialize, Deserializer, de::Error};

/// Layouts whose pages are one region of memory: with one head the order of heads and tokens is the same.
pub(in crate::backends) const LAYOUTS: [KvCacheLayout; 4] =
    [KvCacheLayout::LBNHC, KvCacheLayout::LBHNC, KvCacheLayout::BLNHC, KvCacheLayout::BLHNC];
/// What runs of tokens in the prefills' workspace are aligned to.
pub(super) const ALIGNMENT: usize = 16;
/// Most tokens of the workspace that can be asked for.
const MOST_WORKSPACE_TOKENS: usize = 1 << 20;

/// The setting `workspace_tokens`: a multiple of 16 up to 1,048,576.
pub(in crate::backends) fn workspace_tokens<'de, D: Deserializer<'de>>(
    d: D,
) -> Result<Option<usize>, D::Error> {
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

/// Why the kernels around a decode don't take a layer.
pub(in crate::backends) fn refusal(need: &LayerNeed) -> Option<Refusal> {
    let l = need.latent?;
    if l.kv_lora_rank + l.qk_rope_head_dim != need.head_size {
        return Some("a cache row other than kv_lora_rank + qk_rope_head_dim not supported".into());
    }
    dims(need.num_heads, &l).refusal().map(|what| format!("{what} not supported").into())
}

/// What the rule books of kernels for DeepSeek's latents, 16-bit as the activations are, have in common.
pub(in crate::backends) fn deepseek_rules(name: &'static str) -> RuleBook {
    RuleBook {
        name: name.into(),
        kind: KindTag::Mla,
        platform: "cuda".into(),
        dtypes: vec![DType::BF16, DType::F16],
        kv_cache_dtypes: ["auto", "bfloat16", "float16"].map(Into::into).into(),
        head_sizes: vec![SizeRange::exactly(DEEPSEEK.0 + DEEPSEEK.1)],
        kv_cache_layouts: LAYOUTS.to_vec(),
        supports_sliding_window: false,
        supports_logit_soft_cap: false,
        supports_alibi: false,
        supports_kv_connector: false,
        reorder_batch_threshold: Some(1),
        ..RuleBook::default()
    }
}

/// Why those kernels don't take a layer of latent attention.
pub(in crate::backends) fn deepseek_refusal(need: &LayerNeed) -> Option<Refusal> {
    let l = need.latent?;
    if let Some(refused) = refusal(need) {
        return Some(refused);
    }
    if (l.kv_lora_rank, l.qk_rope_head_dim) != DEEPSEEK {
        let (rank, rope) = (l.kv_lora_rank, l.qk_rope_head_dim);
        let (of, with) = DEEPSEEK;
        return Some(format!("latents of {rank} + {rope} not supported ({of} + {with} are)").into());
    }
    let kv = need.kv_cache_dtype.as_ref()?;
    let other = kv.element(need.dtype).is_some_and(|cache| cache != need.dtype);
    other.then(|| format!("kv_cache_dtype {kv} with {} activations not supported", need.dtype).into())
}
