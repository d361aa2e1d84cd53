//! Lifetime: process. Class 1 of 3: the rule book of `TRITON_MLA`, which kernels a layer needs, and its settings.

use super::{TritonMlaBuilder, TritonMlaLayer};
use crate::{
    CudaExec,
    backends::{
        latent::{deepseek_refusal, deepseek_rules, workspace_tokens},
        triton::not_built,
    },
    compile::Arch,
    modules::{
        module_dtype,
        triton::{TritonError, TritonFolder, TritonWant, WantOf, installed_triton},
    },
};
use headway_attention::{
    AttentionBackend, GraphSupport, LayerNeed, Mla, Refusal, RuleBook,
    process::rules::{CapabilityRange, ComputeCapability, KernelBlockSize},
};
use serde::Deserialize;

/// The name of this backend.
pub(super) const NAME: &str = "TRITON_MLA";
pub(super) use crate::kernels::mla::DEEPSEEK as LATENT;

/// Latent attention by Triton kernels. See the [folder](super).
pub enum TritonMla {}

/// The backend's configuration table.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct TritonMlaConfig {
    /// As [`CudaMlaConfig::workspace_tokens`](crate::backends::cuda_mla::CudaMlaConfig::workspace_tokens).
    #[serde(deserialize_with = "workspace_tokens")]
    pub workspace_tokens: Option<usize>,
}

impl AttentionBackend for TritonMla {
    const CONTRACT: u32 = 1;
    type Exec = CudaExec;
    type Kind = Mla;
    type Config = TritonMlaConfig;
    type Builder = TritonMlaBuilder;
    type Impl = TritonMlaLayer;

    fn rules() -> RuleBook {
        RuleBook {
            kernel_block_sizes: vec![KernelBlockSize::MultipleOf(16)],
            preferred_block_size: Some(16),
            compute_capabilities: Some(vec![CapabilityRange {
                from: Some(ComputeCapability(8, 0)),
                to: None,
            }]),
            graph_support: GraphSupport::UniformBatch,
            ..deepseek_rules(NAME)
        }
    }

    fn combination(need: &LayerNeed) -> Option<Refusal> {
        refused(installed_triton(), need)
    }
}

/// Why a layer is refused that each rule by itself would take.
fn refused(installed: &Result<TritonFolder, TritonError>, need: &LayerNeed) -> Option<Refusal> {
    // Other layers are refused by their kind; no kernel would help.
    need.latent?;
    if let Some(refused) = deepseek_refusal(need) {
        return Some(refused);
    }
    let arch = need.compute_capability.map(|c| Arch::of((c.0, c.1)).to_string());
    let want = TritonWant { dtype: module_dtype(need.dtype)?, of: WantOf::Latent, arch: arch.as_deref() };
    not_built(installed, &want, need.compute_capability)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{backends::triton::tests::folder, modules::triton::FormKind};
    use headway_attention::process::rules::{KindTag, LatentDims};

    const WANT: TritonWant<'_> = TritonWant { dtype: "bfloat16", of: WantOf::Latent, arch: None };

    fn need(rank: usize, rope: usize) -> LayerNeed {
        LayerNeed {
            platform: "cuda".into(),
            compute_capability: Some(ComputeCapability(9, 0)),
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
    fn without_kernels_the_command_is_named() {
        let (_dir, there) = folder(WANT, |_| {});
        let says = |need: &LayerNeed| refused(&there, need).map(|r| r.to_string());
        assert_eq!(says(&need(512, 64)), None);
        assert_eq!(says(&LayerNeed { num_speculative_tokens: 2, num_heads: 20, ..need(512, 64) }), None);
        let ampere = LayerNeed { compute_capability: Some(ComputeCapability(8, 0)), ..need(512, 64) };
        assert_eq!(
            says(&ampere).as_deref(),
            Some("not built: run headway kernels build triton --mla --dtype bfloat16 --arch sm_80")
        );
        // All three are needed.
        let (_dir, some) = folder(WANT, |e| e.kind = FormKind::LatentMerge);
        assert!(refused(&some, &need(512, 64)).unwrap().to_string().contains("not built: run"));
        let (_dir, large) = folder(WANT, |e| e.shared = 232_449);
        assert!(refused(&large, &need(512, 64)).unwrap().to_string().contains("takes 232449 bytes"));
    }

    #[test]
    fn what_the_kernels_are_not_for_is_refused_with_the_reason() {
        let (_dir, there) = folder(WANT, |_| {});
        let says = |need: LayerNeed| refused(&there, &need).unwrap().to_string();
        assert!(says(need(48, 16)).contains("latents of 48 + 16 not supported (512 + 64 are)"));
        let fp8 = LayerNeed { kv_cache_dtype: Some("fp8".into()), ..need(512, 64) };
        assert!(says(fp8).contains("kv_cache_dtype fp8"));
        assert!(!TritonMla::rules().supports_batch_invariance);
        assert_eq!(refused(&there, &LayerNeed { latent: None, ..need(512, 64) }), None);
    }
}
