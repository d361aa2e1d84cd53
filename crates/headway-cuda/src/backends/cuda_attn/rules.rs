//! Lifetime: process. Class 1 of 3: the rule book of `CUDA_ATTN`.

use super::{CudaAttnBuilder, CudaAttnLayer};
use crate::{CudaExec, device::shared_per_block, kernels::attention::Shape};
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
        let cache = match &need.kv_cache_dtype {
            Some(kv) => kv.element(need.dtype)?,
            None => need.dtype,
        };
        let eight_bits = matches!(cache, DType::F8E4M3 | DType::F8E5M2);
        if cache != need.dtype && !eight_bits {
            return Some(
                format!(
                    "kv_cache_dtype {cache} with {} activations not supported (auto or an fp8 type is)",
                    need.dtype
                )
                .into(),
            );
        }
        // Sizes without a kernel are refused by their fields.
        let shape = Shape::new(1, 1, need.head_size).ok()?;
        let capability = need.compute_capability?;
        let shared = shared_per_block((capability.0, capability.1))?;
        let why = shape.check_shared(cache, shared).err()?;
        Some(format!("{why} (compute capability {capability})").into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A need that the rules take wherever a launch fits.
    fn need(head_size: usize, dtype: DType, kv: &'static str, capability: (u32, u32)) -> LayerNeed {
        LayerNeed {
            platform: "cuda".into(),
            compute_capability: Some(ComputeCapability(capability.0, capability.1)),
            head_size,
            head_size_v: head_size,
            dtype,
            kv_cache_dtype: Some(kv.into()),
            ..LayerNeed::default()
        }
    }

    fn refusals(need: &LayerNeed) -> Vec<String> {
        let all = CudaAttn::rules().refusals(need).into_iter().chain(CudaAttn::combination(need));
        all.map(|r| r.to_string()).collect()
    }

    #[test]
    fn what_is_taken_can_be_launched_and_what_can_not_is_refused_with_the_sizes() {
        let (mut taken, mut refused) = (0, 0);
        for (capability, limit) in [((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((12, 0), 99)] {
            let limit = limit << 10;
            assert_eq!(shared_per_block(capability), Some(limit));
            for head_size in (8..=256).step_by(8) {
                for dtype in CudaAttn::rules().dtypes {
                    for kv in ["auto", "fp8", "fp8_e5m2"] {
                        let need = need(head_size, dtype, kv, capability);
                        let cache = need.kv_cache_dtype.as_ref().unwrap().element(dtype).unwrap();
                        let takes = Shape::new(8, 2, head_size).unwrap().shared_bytes(cache, limit);
                        let said = refusals(&need);
                        match takes <= limit {
                            // A kernel has some hundred bytes of its own beside what it asks for.
                            true => assert!(
                                said.is_empty() && takes + 256 <= limit,
                                "{head_size} {kv} {capability:?}: {said:?}"
                            ),
                            false => {
                                let sizes = [takes.to_string(), limit.to_string()];
                                assert_eq!(said.len(), 1);
                                assert!(sizes.iter().all(|n| said[0].contains(n)), "{said:?}");
                            }
                        }
                        *if said.is_empty() { &mut taken } else { &mut refused } += 1;
                    }
                }
            }
        }
        // 99 KiB, three times: the 16 sizes over 128 in each of 2 types and 3 caches. 163 and 227 KiB hold all.
        assert_eq!((taken, refused), (5 * 32 * 6 - 3 * 16 * 6, 3 * 16 * 6));
        assert!(refusals(&need(128, DType::BF16, "auto", (8, 9))).is_empty());
        assert!(refusals(&need(128, DType::BF16, "fp8", (12, 0))).is_empty());
        let said = refusals(&need(256, DType::BF16, "auto", (8, 9)));
        assert_eq!(
            said,
            [
                "heads of 256 with a KV cache of bfloat16: a block takes 163840 bytes of shared memory, the device has \
              101376 (compute capability 8.9)"
            ]
        );
    }

    #[test]
    fn fewer_stages_are_taken_only_where_more_do_not_fit() {
        let shape = Shape::new(8, 2, 128).unwrap();
        let bytes = [99, 163, 227].map(|kib| shape.shared_bytes(DType::BF16, kib << 10));
        assert_eq!(bytes, [98_304, 102_400, 102_400]);
    }
}
