//! Lifetime: process. Class 1 of 3: the rule book of `CUDA_ATTN`.

use super::{CudaAttnBuilder, CudaAttnLayer};
use crate::CudaExec;
use headway_attention::{
    AttentionBackend, GraphSupport, LayerNeed, Refusal, RuleBook, Standard,
    group::kv::layout::KvCacheLayout,
    process::rules::{AttnType, CapabilityRange, ComputeCapability, KernelBlockSize, SizeRange},
};
use headway_tensor::DType;
use serde::Deserialize;

/// The name of this backend.
pub(super) const NAME: &str = "CUDA_ATTN";
/// Layouts whose pages are one region of memory.
pub(in crate::backends) const LAYOUTS: [KvCacheLayout; 4] =
    [KvCacheLayout::LBHNC, KvCacheLayout::LBNHC, KvCacheLayout::BLHNC, KvCacheLayout::BLNHC];

/// Attention on NVIDIA devices. See the [folder](super).
pub enum CudaAttn {}

/// The backend's configuration table: it has no settings.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct CudaAttnConfig {}

impl AttentionBackend for CudaAttn {
    const CONTRACT: u32 = 1;
    type Exec = CudaExec;
    type Kind = Standard;
    type Config = CudaAttnConfig;
    type Builder = CudaAttnBuilder;
    type Impl = CudaAttnLayer;

    fn rules() -> RuleBook {
        RuleBook {
            name: NAME.into(),
            platform: "cuda".into(),
            dtypes: vec![DType::BF16, DType::F16],
            kv_cache_dtypes: ["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]
                .map(Into::into)
                .into(),
            head_sizes: vec![SizeRange { first: 8, last: 256, step: 8 }],
            kernel_block_sizes: vec![KernelBlockSize::MultipleOf(16)],
            preferred_block_size: Some(16),
            kv_cache_layouts: LAYOUTS.to_vec(),
            attn_types: vec![AttnType::Decoder],
            compute_capabilities: Some(vec![CapabilityRange {
                from: Some(ComputeCapability(8, 0)),
                to: None,
            }]),
            supports_sliding_window: true,
            supports_sinks: true,
            supports_logit_soft_cap: true,
            supports_alibi: true,
            supports_non_causal: true,
            supports_batch_invariance: true,
            supports_kv_connector: false,
            forward_includes_kv_cache_update: false,
            graph_support: GraphSupport::Always,
            ..RuleBook::default()
        }
    }

    fn combination(need: &LayerNeed) -> Option<Refusal> {
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
