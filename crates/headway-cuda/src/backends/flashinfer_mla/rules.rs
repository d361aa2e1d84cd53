//! Lifetime: process. Class 1 of 3: the rule book of `FLASHINFER_MLA`, which modules a layer needs, and its settings.

use super::{FlashInferMlaBuilder, FlashInferMlaLayer};
use crate::{
    CudaExec,
    backends::{
        latent::{deepseek_refusal, deepseek_rules, workspace_tokens},
        modules::not_built,
    },
    compile::Arch,
    kernels::flashinfer::divides_tiles,
    modules::{Kind, ModuleError, ModuleFolder, Want, installed, module_dtype},
};
use headway_attention::{
    AttentionBackend, GraphSupport, LayerNeed, Mla, Refusal, RuleBook,
    process::rules::{CapabilityRange, ComputeCapability, KernelBlockSize},
};
use serde::Deserialize;

/// The name of this backend.
pub(super) const NAME: &str = "FLASHINFER_MLA";
pub(super) use crate::kernels::mla::DEEPSEEK as LATENT;

/// Latent attention by FlashInfer's kernels. See the [folder](super).
pub enum FlashInferMla {}

/// The backend's configuration table.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct FlashInferMlaConfig {
    /// As [`CudaMlaConfig::workspace_tokens`](crate::backends::cuda_mla::CudaMlaConfig::workspace_tokens).
    #[serde(deserialize_with = "workspace_tokens")]
    pub workspace_tokens: Option<usize>,
}

/// A module of a kind.
pub(super) fn want(kind: Kind, dtype: &str) -> Want<'_> {
    Want { kind, dtype, head_size: LATENT.0, sliding_window: false, soft_cap: false, arch: None }
}

impl AttentionBackend for FlashInferMla {
    const CONTRACT: u32 = 1;
    type Exec = CudaExec;
    type Kind = Mla;
    type Config = FlashInferMlaConfig;
    type Builder = FlashInferMlaBuilder;
    type Impl = FlashInferMlaLayer;

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
        refused(installed(), need)
    }

    fn stands_back(need: &LayerNeed) -> Option<Refusal> {
        slower(installed(), need)
    }
}

/// Why `CUDA_MLA` is the faster with the modules that there are: `mla_fa2` takes 1.4 to 1.9 times as long (`docs/gpu.md`).
fn slower(installed: &Result<ModuleFolder, ModuleError>, need: &LayerNeed) -> Option<Refusal> {
    let arch = need.compute_capability.map(|c| Arch::of((c.0, c.1)).to_string());
    let fa3 = Want { arch: arch.as_deref(), ..want(Kind::MlaFa3, module_dtype(need.dtype)?) };
    let there = installed.as_ref().is_ok_and(|folder| folder.find(&fa3).is_some());
    (!there).then(|| {
        format!(
            "mla_fa3 is not built for {}, and mla_fa2 is slower than CUDA_MLA: used only where it is asked for by name",
            arch.as_deref().unwrap_or("this device")
        )
        .into()
    })
}

/// Why a layer is refused that each rule by itself would take.
fn refused(installed: &Result<ModuleFolder, ModuleError>, need: &LayerNeed) -> Option<Refusal> {
    // Other layers are refused by their kind; no module would help.
    need.latent?;
    if let Some(refused) = deepseek_refusal(need) {
        return Some(refused);
    }
    if need.num_speculative_tokens > 0 && !divides_tiles(need.num_heads) {
        return Some(
            format!("drafts with {} heads not supported (1, 2, 4, … 128 are)", need.num_heads).into(),
        );
    }
    let arch = need.compute_capability.map(|c| Arch::of((c.0, c.1)).to_string());
    let dtype = module_dtype(need.dtype)?;
    let of = |kind| Want { arch: arch.as_deref(), ..want(kind, dtype) };
    not_built(installed, &[of(Kind::MlaFa3), of(Kind::MlaFa2)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::{Entry, FLASHINFER, MANIFEST, Manifest, Mask, RECIPE};
    use headway_attention::process::rules::{KindTag, LatentDims};
    use headway_tensor::DType;

    fn folder(kind: Kind) -> (tempfile::TempDir, Result<ModuleFolder, ModuleError>) {
        let entry = Entry {
            file: "a.so".into(),
            kind,
            dtype: "bfloat16".into(),
            head_size: 512,
            sliding_window: false,
            soft_cap: false,
            masks: vec![Mask::None, Mask::Causal],
            arch: "sm_90a".into(),
            flashinfer: FLASHINFER.into(),
            recipe: RECIPE,
            nvcc: "13.0.88".into(),
            bytes: 1,
            sha256: String::new(),
            functions: Default::default(),
        };
        let dir = tempfile::tempdir().unwrap();
        let manifest = Manifest { modules: vec![entry], ..Manifest::default() };
        std::fs::write(dir.path().join(MANIFEST), manifest.write()).unwrap();
        let folder = ModuleFolder::open(dir.path());
        (dir, folder)
    }

    fn need(heads: usize, rank: usize, rope: usize) -> LayerNeed {
        LayerNeed {
            platform: "cuda".into(),
            compute_capability: Some(ComputeCapability(9, 0)),
            kind: KindTag::Mla,
            num_heads: heads,
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
    fn either_kind_of_module_serves_and_without_one_the_command_is_named() {
        for kind in [Kind::MlaFa2, Kind::MlaFa3] {
            let (_dir, there) = folder(kind);
            assert_eq!(refused(&there, &need(20, 512, 64)), None);
            let other = LayerNeed { dtype: DType::F16, ..need(16, 512, 64) };
            assert_eq!(
                refused(&there, &other).unwrap().to_string(),
                "not built: run headway kernels build flashinfer --mla --dtype float16 --arch sm_90a"
            );
            let other = LayerNeed { compute_capability: Some(ComputeCapability(8, 0)), ..need(16, 512, 64) };
            assert!(
                refused(&there, &other).unwrap().to_string().ends_with("--mla --dtype bfloat16 --arch sm_80")
            );
        }
        let (_dir, paged) = folder(Kind::Fa2);
        assert!(refused(&paged, &need(16, 512, 64)).unwrap().to_string().contains("not built: run"));
    }

    #[test]
    fn without_the_faster_module_it_stands_back() {
        let (_dir, fa3) = folder(Kind::MlaFa3);
        assert_eq!(slower(&fa3, &need(16, 512, 64)), None);
        let (_dir, fa2) = folder(Kind::MlaFa2);
        let why = slower(&fa2, &need(16, 512, 64)).unwrap().to_string();
        assert!(
            why.starts_with("mla_fa3 is not built for sm_90a, and mla_fa2 is slower than CUDA_MLA"),
            "{why}"
        );
        // Built for another device.
        let ampere = LayerNeed { compute_capability: Some(ComputeCapability(8, 0)), ..need(16, 512, 64) };
        assert!(slower(&fa3, &ampere).unwrap().to_string().contains("sm_80"));
    }

    #[test]
    fn what_the_kernels_are_not_for_is_refused_with_the_reason() {
        let (_dir, there) = folder(Kind::MlaFa3);
        let says = |need: LayerNeed| refused(&there, &need).unwrap().to_string();
        assert!(says(need(4, 48, 16)).contains("latents of 48 + 16"));
        assert!(says(need(4, 448, 128)).contains("512 + 64"));
        let drafts = LayerNeed { num_speculative_tokens: 2, ..need(20, 512, 64) };
        assert!(says(drafts).contains("drafts with 20 heads"));
        let drafts = LayerNeed { num_speculative_tokens: 2, ..need(16, 512, 64) };
        assert_eq!(refused(&there, &drafts), None);
        assert_eq!(
            refused(&there, &LayerNeed { latent: None, dtype: DType::F16, ..need(16, 512, 64) }),
            None
        );
        let fp8 = LayerNeed { kv_cache_dtype: Some("fp8".into()), ..need(16, 512, 64) };
        assert!(says(fp8).contains("kv_cache_dtype fp8"));
    }
}
