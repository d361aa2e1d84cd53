//! Lifetime: process. Class 1 of 3: the rule book of `CUDA_MLA`, and its settings.

use super::{CudaMlaBuilder, CudaMlaLayer};
use crate::{
    CudaExec,
    backends::latent::{LAYOUTS, refusal, workspace_tokens},
    kernels::mla::MAX_LATENT,
};
use headway_attention::{
    AttentionBackend, GraphSupport, LayerNeed, Mla, Refusal, RuleBook,
    process::rules::{CapabilityRange, ComputeCapability, KernelBlockSize, KindTag, SizeRange},
};
use headway_tensor::DType;
use serde::Deserialize;

/// The name of this backend.
pub(super) const NAME: &str = "CUDA_MLA";

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
        need.latent?;
        if let Some(refused) = refusal(need) {
            return Some(refused);
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
