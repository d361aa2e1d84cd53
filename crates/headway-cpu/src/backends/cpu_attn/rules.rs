//! Lifetime: process. Class 1 of 3: the rule book of `CPU_ATTN`.

use super::{CpuAttnBuilder, CpuAttnLayer};
use crate::CpuExec;
use headway_attention::{
    AttentionBackend, LayerNeed, Refusal, RuleBook, Standard,
    group::kv::layout::KvCacheLayout,
    process::rules::{AttnType, KernelBlockSize, SizeRange},
};
use headway_tensor::{DType, RowQuantKind};
use serde::Deserialize;

/// The name of this backend.
pub(super) const NAME: &str = "CPU_ATTN";
/// Layouts whose pages hold one head after another.
pub(super) const LAYOUTS: [KvCacheLayout; 2] = [KvCacheLayout::LBHNC, KvCacheLayout::BLHNC];

/// Attention on the CPU. See the [folder](super).
pub enum CpuAttn {}

/// The backend's configuration table: it has no settings.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct CpuAttnConfig {}

impl AttentionBackend for CpuAttn {
    const CONTRACT: u32 = 1;
    type Exec = CpuExec;
    type Kind = Standard;
    type Config = CpuAttnConfig;
    type Builder = CpuAttnBuilder;
    type Impl = CpuAttnLayer;

    fn rules() -> RuleBook {
        RuleBook {
            name: NAME.into(),
            platform: "cpu".into(),
            dtypes: vec![DType::F32, DType::BF16, DType::F16],
            kv_cache_dtypes: ["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]
                .map(Into::into)
                .into(),
            head_sizes: vec![SizeRange { first: 8, last: 512, step: 8 }],
            supports_different_v_head_size: true,
            kernel_block_sizes: [16, 32, 64, 128].map(KernelBlockSize::Exact).into(),
            preferred_block_size: Some(16),
            kv_cache_layouts: LAYOUTS.to_vec(),
            attn_types: vec![
                AttnType::Decoder,
                AttnType::Encoder,
                AttnType::EncoderOnly,
                AttnType::EncoderDecoder,
            ],
            supports_sliding_window: true,
            supports_sinks: true,
            supports_logit_soft_cap: true,
            supports_alibi: true,
            supports_non_causal: true,
            supports_mm_prefix: true,
            supports_rswa: true,
            supports_batch_invariance: true,
            supports_kv_connector: false,
            output_quants: vec![
                RowQuantKind::E4m3PerTensor,
                RowQuantKind::Int8PerTensor,
                RowQuantKind::E4m3Blocks,
            ],
            forward_includes_kv_cache_update: false,
            ..RuleBook::default()
        }
    }

    fn combination(need: &LayerNeed) -> Option<Refusal> {
        (need.use_rswa && need.sliding_window.is_some())
            .then(|| "R-SWA with a sliding window of the layer's own not supported".into())
    }
}
