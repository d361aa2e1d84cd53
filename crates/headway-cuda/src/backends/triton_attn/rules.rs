//! Lifetime: process. Class 1 of 3: the rule book of `TRITON_ATTN`, and which kernels a layer needs.

use super::{TritonAttnBuilder, TritonAttnLayer};
use crate::{
    CudaExec,
    backends::{cuda_attn::LAYOUTS, triton::not_built},
    compile::Arch,
    modules::{
        module_dtype,
        triton::{TritonError, TritonFolder, TritonWant, WantOf, installed_triton},
    },
};
use headway_attention::{
    AttentionBackend, GraphSupport, LayerNeed, Refusal, RuleBook, Standard,
    process::rules::{AttnType, CapabilityRange, ComputeCapability, KernelBlockSize, SizeRange},
};
use headway_tensor::DType;
use serde::Deserialize;

/// The name of this backend.
pub(super) const NAME: &str = "TRITON_ATTN";

/// Triton kernels. See the [folder](super).
pub enum TritonAttn {}

/// The backend's configuration table: it has no settings.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default, deny_unknown_fields)]
pub struct TritonAttnConfig {}

impl AttentionBackend for TritonAttn {
    const CONTRACT: u32 = 1;
    type Exec = CudaExec;
    type Kind = Standard;
    type Config = TritonAttnConfig;
    type Builder = TritonAttnBuilder;
    type Impl = TritonAttnLayer;

    fn rules() -> RuleBook {
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
            compute_capabilities: Some(vec![CapabilityRange {
                from: Some(ComputeCapability(8, 0)),
                to: None,
            }]),
            supports_sliding_window: true,
            supports_sinks: true,
            supports_logit_soft_cap: true,
            supports_alibi: false,
            supports_non_causal: true,
            supports_batch_invariance: false,
            supports_kv_connector: false,
            forward_includes_kv_cache_update: false,
            graph_support: GraphSupport::Always,
            ..RuleBook::default()
        }
    }

    fn combination(need: &LayerNeed) -> Option<Refusal> {
        if let Some(kv) = &need.kv_cache_dtype
            && kv.element(need.dtype).is_some_and(|cache| cache != need.dtype)
        {
            return Some(format!("kv_cache_dtype {kv} with {} activations not supported", need.dtype).into());
        }
        refused(installed_triton(), need)
    }
}

/// Why no kernels serve a layer.
fn refused(installed: &Result<TritonFolder, TritonError>, need: &LayerNeed) -> Option<Refusal> {
    if need.latent.is_some() {
        // Refused by its kind; no kernel would help.
        return None;
    }
    let arch = need.compute_capability.map(|c| Arch::of((c.0, c.1)).to_string());
    let want = TritonWant {
        dtype: module_dtype(need.dtype)?,
        of: WantOf::Paged { head_size: need.head_size, soft_cap: need.has_logit_soft_cap },
        arch: arch.as_deref(),
    };
    not_built(installed, &want, need.compute_capability)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::triton::{FormKind, TRITON_MANIFEST, TritonEntry};

    fn folder(change: impl Fn(&mut TritonEntry)) -> (tempfile::TempDir, Result<TritonFolder, TritonError>) {
        let of = WantOf::Paged { head_size: 128, soft_cap: false };
        crate::backends::triton::tests::folder(TritonWant { dtype: "bfloat16", of, arch: None }, change)
    }

    fn need() -> LayerNeed {
        LayerNeed {
            platform: "cuda".into(),
            compute_capability: Some(ComputeCapability(9, 0)),
            ..LayerNeed::default()
        }
    }

    #[test]
    fn a_layer_without_kernels_is_refused_with_the_command() {
        let (_dir, there) = folder(|_| {});
        let says = |need: &LayerNeed| refused(&there, need).map(|r| r.to_string());
        let command = "not built: run headway kernels build triton --head-size";
        assert_eq!(says(&need()), None);
        // One kernel serves layers with a window and without, with sinks and without.
        assert_eq!(says(&LayerNeed { sliding_window: Some(4), has_sinks: true, ..need() }), None);
        assert_eq!(
            says(&LayerNeed { head_size: 64, ..need() }),
            Some(format!("{command} 64 --dtype bfloat16 --arch sm_90a"))
        );
        assert_eq!(
            says(&LayerNeed { has_logit_soft_cap: true, dtype: DType::F16, ..need() }),
            Some(format!("{command} 128 --dtype float16 --arch sm_90a --soft-cap"))
        );
        let older = LayerNeed { compute_capability: Some(ComputeCapability(8, 0)), ..need() };
        assert!(says(&older).unwrap().ends_with("--arch sm_80"));
        // All four are needed, of these sources and this version.
        for change in [
            (|e| e.recipe = "other".into()) as fn(&mut TritonEntry),
            |e| e.triton = "3.5.0".into(),
            |e| e.rows *= 2,
            |e| e.num_warps *= 2,
            |e| e.kind = FormKind::Merge,
        ] {
            assert!(refused(&folder(change).1, &need()).is_some());
        }
        let (_dir, large) = folder(|e| e.shared = 232_449);
        let why = refused(&large, &need()).unwrap().to_string();
        assert!(why.contains("takes 232449 bytes") && why.contains("the device has 232448"), "{why}");
    }

    #[test]
    fn a_layer_whose_files_are_gone_is_refused_with_the_command() {
        let command =
            "build it again with headway kernels build triton --head-size 128 --dtype bfloat16 --arch sm_90a";
        let (dir, there) = folder(|_| {});
        let says = || refused(&there, &need()).unwrap().to_string();
        let file = dir.path().join(&there.as_ref().unwrap().kernels()[1].file);
        std::fs::write(&file, "longer").unwrap();
        assert!(says().contains("6 bytes, of 1") && says().ends_with(command), "{}", says());
        std::fs::remove_file(&file).unwrap();
        assert!(says().contains("it is not there") && says().ends_with(command), "{}", says());
        std::fs::create_dir(&file).unwrap();
        assert!(says().contains("no plain file") && says().ends_with(command), "{}", says());
    }

    #[test]
    fn what_the_kernels_lack_is_refused() {
        let rules = TritonAttn::rules();
        assert!(!rules.supports_alibi && !rules.supports_batch_invariance && rules.supports_sinks);
        let need = LayerNeed { kv_cache_dtype: Some("float16".into()), ..need() };
        let refusal = TritonAttn::combination(&need).unwrap();
        assert!(refusal.to_string().contains("kv_cache_dtype float16"), "{refusal}");
    }

    #[test]
    fn a_manifest_that_is_none_is_a_refusal_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(TRITON_MANIFEST), "{").unwrap();
        let refusal = refused(&TritonFolder::open(dir.path()), &need()).unwrap();
        assert!(refusal.to_string().contains("triton.json: not JSON"), "{refusal}");
    }
}
