//! Lifetime: process. Class 1 of 3: the rule book of `FLASHMLA`, and its settings.

use super::{FlashMlaBuilder, FlashMlaLayer};
use crate::{
    CudaExec,
    backends::{
        extensions::not_fetched,
        latent::{LAYOUTS, refusal, workspace_tokens},
    },
    kernels::flash_mla::{LATENT, PAGE, ROW},
    modules::{extension::Extensions, installed},
};
use headway_attention::{
    AttentionBackend, GraphSupport, LayerNeed, Mla, Refusal, RuleBook,
    process::rules::{CapabilityRange, ComputeCapability, KernelBlockSize, KindTag, SizeRange},
};
use headway_tensor::DType;
use serde::Deserialize;

/// The name of this backend.
pub(super) const NAME: &str = "FLASHMLA";
/// The capability that its kernel is for.
const HOPPER: ComputeCapability = ComputeCapability(9, 0);

/// Latent attention by FlashMLA's kernel. See the [folder](super).
pub enum FlashMla {}

/// The backend's configuration table.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct FlashMlaConfig {
    /// As [`CudaMlaConfig::workspace_tokens`](crate::backends::cuda_mla::CudaMlaConfig::workspace_tokens).
    #[serde(deserialize_with = "workspace_tokens")]
    pub workspace_tokens: Option<usize>,
}

impl AttentionBackend for FlashMla {
    const CONTRACT: u32 = 1;
    type Exec = CudaExec;
    type Kind = Mla;
    type Config = FlashMlaConfig;
    type Builder = FlashMlaBuilder;
    type Impl = FlashMlaLayer;

    fn rules() -> RuleBook {
        RuleBook {
            name: NAME.into(),
            kind: KindTag::Mla,
            platform: "cuda".into(),
            dtypes: vec![DType::BF16, DType::F16],
            kv_cache_dtypes: ["auto", "bfloat16", "float16"].map(Into::into).into(),
            head_sizes: vec![SizeRange::exactly(ROW)],
            kernel_block_sizes: vec![KernelBlockSize::Exact(PAGE)],
            preferred_block_size: Some(PAGE),
            kv_cache_layouts: LAYOUTS.to_vec(),
            compute_capabilities: Some(vec![CapabilityRange { from: Some(HOPPER), to: Some(HOPPER) }]),
            supports_sliding_window: false,
            supports_logit_soft_cap: false,
            supports_alibi: false,
            supports_kv_connector: false,
            reorder_batch_threshold: Some(1),
            graph_support: GraphSupport::UniformSingleTokenDecode,
            ..RuleBook::default()
        }
    }

    fn combination(need: &LayerNeed) -> Option<Refusal> {
        refused(need).or_else(|| not_fetched(installed(), Extensions::FlashMla))
    }
}

/// What of a layer the kernel does not take.
fn refused(need: &LayerNeed) -> Option<Refusal> {
    if let Some(l) = need.latent
        && (l.kv_lora_rank, l.qk_rope_head_dim) != LATENT
    {
        let (rank, rope) = (l.kv_lora_rank, l.qk_rope_head_dim);
        return Some(format!("latents of {rank} + {rope} not supported (512 + 64 are)").into());
    }
    if let Some(kv) = &need.kv_cache_dtype
        && kv.element(need.dtype).is_some_and(|cache| cache != need.dtype)
    {
        return Some(format!("kv_cache_dtype {kv} with {} activations not supported", need.dtype).into());
    }
    if need.num_speculative_tokens > 0 {
        return Some("drafts not supported (one new token a request is)".into());
    }
    refusal(need)
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_attention::process::rules::LatentDims;

    fn need(rank: usize, rope: usize) -> LayerNeed {
        LayerNeed {
            kind: KindTag::Mla,
            num_heads: 16,
            head_size: rank + rope,
            latent: Some(LatentDims {
                qk_nope_head_dim: 128,
                qk_rope_head_dim: rope,
                kv_lora_rank: rank,
                v_head_dim: 128,
                index_topk: None,
            }),
            ..LayerNeed::default()
        }
    }

    #[test]
    fn what_the_kernel_is_not_for_is_refused_with_the_reason() {
        assert_eq!(refused(&need(512, 64)), None);
        let says = |need: LayerNeed| refused(&need).unwrap().to_string();
        assert!(says(need(448, 128)).contains("latents of 448 + 128"));
        assert!(says(LayerNeed { num_speculative_tokens: 1, ..need(512, 64) }).contains("drafts"));
        assert!(
            says(LayerNeed { kv_cache_dtype: Some("fp8".into()), ..need(512, 64) })
                .contains("kv_cache_dtype fp8")
        );
    }
}
