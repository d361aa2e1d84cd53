//! Lifetime: process. Class 1 of 3: the rule book of `FLASH_ATTN`.

use super::{FlashAttnBuilder, FlashAttnLayer};
use crate::{
    CudaExec,
    backends::{cuda_attn::LAYOUTS, extensions::not_fetched},
    kernels::flash_attn::MOST_HEADS_WITH_SINKS,
    modules::{extension::Extensions, installed},
};
use headway_attention::{
    AttentionBackend, GraphSupport, LayerNeed, Refusal, RuleBook, Standard,
    process::rules::{AttnType, CapabilityRange, ComputeCapability, KernelBlockSize, SizeRange},
};
use serde::Deserialize;

/// The name of this backend.
pub(super) const NAME: &str = "FLASH_ATTN";
/// Most new tokens of a decode in graphs of decodes of several lengths: more than anybody drafts.
const MOST_DRAFTED: usize = 64;
/// The capability that its kernels are for.
const HOPPER: ComputeCapability = ComputeCapability(9, 0);

/// FlashAttention-3. See the [folder](super).
pub enum FlashAttn {}

/// The backend's configuration table: it has no settings.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct FlashAttnConfig {}

impl AttentionBackend for FlashAttn {
    const CONTRACT: u32 = 1;
    type Exec = CudaExec;
    type Kind = Standard;
    type Config = FlashAttnConfig;
    type Builder = FlashAttnBuilder;
    type Impl = FlashAttnLayer;

    fn rules() -> RuleBook {
        use headway_tensor::DType;
        RuleBook {
            name: NAME.into(),
            platform: "cuda".into(),
            dtypes: vec![DType::BF16, DType::F16],
            kv_cache_dtypes: ["auto", "bfloat16", "float16"].map(Into::into).into(),
            head_sizes: vec![SizeRange { first: 8, last: 256, step: 8 }],
            kernel_block_sizes: vec![KernelBlockSize::MultipleOf(16)],
            preferred_block_size: Some(16),
            kv_cache_layouts: LAYOUTS.to_vec(),
            attn_types: vec![AttnType::Decoder],
            compute_capabilities: Some(vec![CapabilityRange { from: Some(HOPPER), to: Some(HOPPER) }]),
            supports_sliding_window: true,
            supports_sinks: true,
            supports_logit_soft_cap: true,
            supports_alibi: false,
            supports_batch_invariance: true,
            supports_kv_connector: false,
            forward_includes_kv_cache_update: false,
            graph_support: GraphSupport::UniformBatch,
            varlen_graph_max_query_len: Some(MOST_DRAFTED),
            ..RuleBook::default()
        }
    }

    fn combination(need: &LayerNeed) -> Option<Refusal> {
        if let Some(kv) = &need.kv_cache_dtype
            && kv.element(need.dtype).is_some_and(|cache| cache != need.dtype)
        {
            return Some(format!("kv_cache_dtype {kv} with {} activations not supported", need.dtype).into());
        }
        if need.has_sinks && need.num_heads > MOST_HEADS_WITH_SINKS {
            return Some(
                format!(
                    "sinks of {} heads not supported ({MOST_HEADS_WITH_SINKS} at most are)",
                    need.num_heads
                )
                .into(),
            );
        }
        not_fetched(installed(), Extensions::FlashAttention3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_tensor::DType;

    #[test]
    fn what_the_kernels_lack_is_refused() {
        let says = |need: LayerNeed| FlashAttn::combination(&need).map(|r| r.to_string()).unwrap_or_default();
        let need = LayerNeed { dtype: DType::BF16, ..LayerNeed::default() };
        let other = says(LayerNeed { kv_cache_dtype: Some("fp8".into()), ..need.clone() });
        assert!(other.contains("kv_cache_dtype fp8"), "{other}");
        let sinks = says(LayerNeed { has_sinks: true, num_heads: 96, ..need });
        assert_eq!(sinks, "sinks of 96 heads not supported (64 at most are)");
    }
}
