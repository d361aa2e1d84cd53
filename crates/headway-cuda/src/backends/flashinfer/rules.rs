//! Lifetime: process. Class 1 of 3: the rule book of `FLASHINFER`, and which modules a layer needs.

use super::{FlashInferBuilder, FlashInferLayer};
use crate::{
    CudaExec,
    backends::{cuda_attn::LAYOUTS, modules::not_built},
    compile::Arch,
    modules::{Kind, ModuleError, ModuleFolder, Want, build::HEAD_SIZES, installed, module_dtype},
};
use headway_attention::{
    AttentionBackend, GraphSupport, LayerNeed, Refusal, RuleBook, Standard,
    process::rules::{AttnType, CapabilityRange, ComputeCapability, KernelBlockSize, SizeRange},
};
use headway_tensor::DType;
use serde::Deserialize;

/// The name of this backend.
pub(super) const NAME: &str = "FLASHINFER";

/// FlashInfer's kernels. See the [folder](super).
pub enum FlashInfer {}

/// The backend's configuration table: it has no settings.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct FlashInferConfig {}

impl AttentionBackend for FlashInfer {
    const CONTRACT: u32 = 1;
    type Exec = CudaExec;
    type Kind = Standard;
    type Config = FlashInferConfig;
    type Builder = FlashInferBuilder;
    type Impl = FlashInferLayer;

    fn rules() -> RuleBook {
        RuleBook {
            name: NAME.into(),
            platform: "cuda".into(),
            dtypes: vec![DType::BF16, DType::F16],
            kv_cache_dtypes: ["auto", "bfloat16", "float16"].map(Into::into).into(),
            head_sizes: HEAD_SIZES.map(SizeRange::exactly).into(),
            kernel_block_sizes: vec![KernelBlockSize::MultipleOf(16)],
            preferred_block_size: Some(16),
            kv_cache_layouts: LAYOUTS.to_vec(),
            attn_types: vec![AttnType::Decoder],
            compute_capabilities: Some(vec![CapabilityRange {
                from: Some(ComputeCapability(8, 0)),
                to: None,
            }]),
            supports_sliding_window: true,
            supports_logit_soft_cap: true,
            supports_alibi: false,
            supports_kv_connector: false,
            forward_includes_kv_cache_update: false,
            graph_support: GraphSupport::UniformSingleTokenDecode,
            reorder_batch_threshold: Some(1),
            ..RuleBook::default()
        }
    }

    fn combination(need: &LayerNeed) -> Option<Refusal> {
        if let Some(kv) = &need.kv_cache_dtype
            && kv.element(need.dtype).is_some_and(|cache| cache != need.dtype)
        {
            return Some(format!("kv_cache_dtype {kv} with {} activations not supported", need.dtype).into());
        }
        refused(installed(), need)
    }
}

/// Why no module serves a layer.
fn refused(installed: &Result<ModuleFolder, ModuleError>, need: &LayerNeed) -> Option<Refusal> {
    if need.latent.is_some() {
        // Refused by its kind; no module would help.
        return None;
    }
    let arch = need.compute_capability.map(|c| Arch::of((c.0, c.1)).to_string());
    let want = Want {
        kind: Kind::Fa2,
        dtype: module_dtype(need.dtype)?,
        head_size: need.head_size,
        sliding_window: need.sliding_window.is_some(),
        soft_cap: need.has_logit_soft_cap,
        arch: arch.as_deref(),
    };
    not_built(installed, &[want])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::{Entry, FLASHINFER, MANIFEST, Manifest, Mask, RECIPE};

    fn folder(sliding_window: bool) -> (tempfile::TempDir, Result<ModuleFolder, ModuleError>) {
        let entry = Entry {
            file: "a.so".into(),
            kind: Kind::Fa2,
            dtype: "bfloat16".into(),
            head_size: 128,
            sliding_window,
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

    #[test]
    fn a_layer_without_a_module_is_refused_with_the_command() {
        let (_dir, folder) = folder(false);
        let need = LayerNeed {
            platform: "cuda".into(),
            compute_capability: Some(ComputeCapability(9, 0)),
            ..LayerNeed::default()
        };
        let says = |need: &LayerNeed| refused(&folder, need).map(|r| r.to_string());
        assert_eq!(says(&need), None);
        assert_eq!(
            says(&LayerNeed { head_size: 64, ..need.clone() }).as_deref(),
            Some(
                "not built: run headway kernels build flashinfer --head-size 64 --dtype bfloat16 --arch sm_90a"
            )
        );
        let capability = Some(ComputeCapability(8, 0));
        let refused = says(&LayerNeed { compute_capability: capability, ..need.clone() });
        assert!(refused.unwrap().ends_with("--arch sm_80"));
        let refused = says(&LayerNeed { sliding_window: Some(4), ..need.clone() });
        assert!(refused.unwrap().ends_with("--arch sm_90a --sliding-window"));
        let refused = says(&LayerNeed { has_logit_soft_cap: true, dtype: DType::F16, ..need });
        assert!(refused.unwrap().ends_with("--dtype float16 --arch sm_90a --soft-cap"));
    }

    #[test]
    fn a_manifest_that_is_none_is_a_refusal_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(MANIFEST), "{").unwrap();
        let refused = refused(&ModuleFolder::open(dir.path()), &LayerNeed::default()).unwrap();
        assert!(refused.to_string().contains("manifest.json: not JSON"), "{refused}");
    }

    #[test]
    fn a_cache_of_another_type_is_refused() {
        let need = LayerNeed { kv_cache_dtype: Some("float16".into()), ..LayerNeed::default() };
        let refused = FlashInfer::combination(&need).unwrap();
        assert!(refused.to_string().contains("kv_cache_dtype float16"), "{refused}");
    }
}
