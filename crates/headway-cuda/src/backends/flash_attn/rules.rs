//! Lifetime: process. Class 1 of 3: the rule book of `FLASH_ATTN`.

use super::{FlashAttnBuilder, FlashAttnLayer};
use crate::{
    CudaExec,
    backends::{cuda_attn::LAYOUTS, extensions::not_fetched},
    kernels::flash_attn::{MOST_HEADS_WITH_SINKS, head_step},
    modules::{extension::Extensions, installed},
};
use headway_attention::{
    AttentionBackend, GraphSupport, LayerNeed, Refusal, RuleBook, Standard,
    process::rules::{
        AttnType, CapabilityRange, ComputeCapability, KernelBlockSize, KvCacheDType, SizeRange,
    },
};
use headway_tensor::DType;
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
        RuleBook {
            name: NAME.into(),
            platform: "cuda".into(),
            dtypes: vec![DType::BF16, DType::F16],
            kv_cache_dtypes: ["auto", "bfloat16", "float16", "fp8", "fp8_e4m3"].map(Into::into).into(),
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
        if let Some((kv, cache)) = other_cache(need) {
            if (cache, need.dtype) != (DType::F8E4M3, DType::BF16) {
                return Some(
                    format!(
                        "kv_cache_dtype {kv} with {} activations not supported (auto is, and fp8 with bfloat16)",
                        need.dtype
                    )
                    .into(),
                );
            }
            let step = head_step(cache);
            if !need.head_size.is_multiple_of(step) {
                return Some(
                    format!(
                        "kv_cache_dtype {kv} with heads of {} not supported (multiples of {step} are)",
                        need.head_size
                    )
                    .into(),
                );
            }
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

    fn stands_back(need: &LayerNeed) -> Option<Refusal> {
        other_cache(need).map(|(kv, _)| {
            format!(
                "over kv_cache_dtype {kv} its kernels round queries and probabilities to 8 bits too, which CUDA_ATTN does \
                 not: used only where it is asked for by name"
            )
            .into()
        })
    }
}

/// A cache of another type than the activations'.
fn other_cache(need: &LayerNeed) -> Option<(&KvCacheDType, DType)> {
    let kv = need.kv_cache_dtype.as_ref()?;
    kv.element(need.dtype).filter(|cache| *cache != need.dtype).map(|cache| (kv, cache))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernels_lack_is_refused() {
        let says = |need: LayerNeed| FlashAttn::combination(&need).map(|r| r.to_string()).unwrap_or_default();
        let need = LayerNeed { dtype: DType::BF16, ..LayerNeed::default() };
        let fp8 = LayerNeed { kv_cache_dtype: Some("fp8".into()), head_size: 128, ..need.clone() };
        let half = says(LayerNeed { dtype: DType::F16, ..fp8.clone() });
        assert!(half.starts_with("kv_cache_dtype fp8 with float16 activations not supported"), "{half}");
        let odd = says(LayerNeed { head_size: 72, ..fp8.clone() });
        assert!(odd.starts_with("kv_cache_dtype fp8 with heads of 72 not supported"), "{odd}");
        let e5m2 = says(LayerNeed { kv_cache_dtype: Some("fp8_e5m2".into()), ..fp8.clone() });
        assert!(e5m2.starts_with("kv_cache_dtype fp8_e5m2 with bfloat16"), "{e5m2}");
        assert!(!says(fp8.clone()).contains("not supported"));
        assert!(FlashAttn::stands_back(&fp8).is_some() && FlashAttn::stands_back(&need).is_none());
        let sinks = says(LayerNeed { has_sinks: true, num_heads: 96, ..need });
        assert_eq!(sinks, "sinks of 96 heads not supported (64 at most are)");
    }
}
