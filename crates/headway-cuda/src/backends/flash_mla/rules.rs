//! Lifetime: process. Class 1 of 3: the rule book of `FLASHMLA`, and its settings.

use super::{FlashMlaBuilder, FlashMlaLayer};
use crate::{
    CudaExec,
    backends::{
        extensions::not_fetched,
        latent::{deepseek_refusal, deepseek_rules, workspace_tokens},
    },
    kernels::flash_mla::PAGE,
    modules::{extension::Extensions, installed},
};
use headway_attention::{
    AttentionBackend, GraphSupport, LayerNeed, Mla, Refusal, RuleBook,
    process::rules::{CapabilityRange, ComputeCapability, KernelBlockSize},
};
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
            kernel_block_sizes: vec![KernelBlockSize::Exact(PAGE)],
            preferred_block_size: Some(PAGE),
            compute_capabilities: Some(vec![CapabilityRange { from: Some(HOPPER), to: Some(HOPPER) }]),
            graph_support: GraphSupport::UniformSingleTokenDecode,
            ..deepseek_rules(NAME)
        }
    }

    fn combination(need: &LayerNeed) -> Option<Refusal> {
        refused(need).or_else(|| not_fetched(installed(), Extensions::FlashMla))
    }
}

/// What of a layer the kernel does not take.
fn refused(need: &LayerNeed) -> Option<Refusal> {
    let drafts = need.num_speculative_tokens > 0;
    deepseek_refusal(need)
        .or_else(|| drafts.then(|| "drafts not supported (one new token a request is)".into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_attention::process::rules::{KindTag, LatentDims};

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
