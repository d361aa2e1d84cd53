//! What holds of every version of the catalogue, whatever its data say, and the answers that users meet first.

#[path = "catalog/properties.rs"]
mod properties;

use headway_attention::{
    catalog::{Catalog, RegistryKind},
    process::{
        rules::{AttnType, ComputeCapability, KernelBlockSize, StateSpaceMixer},
        select::BackendRequest,
    },
    *,
};
use headway_tensor::DType;
use std::sync::OnceLock;

fn catalogs() -> &'static [Catalog] {
    static ALL: OnceLock<Vec<Catalog>> = OnceLock::new();
    ALL.get_or_init(|| Catalog::versions().into_iter().map(|v| Catalog::load(v).unwrap()).collect())
}

fn latest() -> &'static Catalog {
    catalogs().last().unwrap()
}

fn on(capability: ComputeCapability) -> LayerNeed {
    LayerNeed { platform: "cuda".into(), compute_capability: Some(capability), ..LayerNeed::default() }
}

fn asking(name: &str) -> BackendRequest {
    BackendRequest { backend: Some(name.into()), ..BackendRequest::default() }
}

#[test]
fn vision_names_are_known() {
    for catalog in catalogs() {
        for &c in catalog.capabilities() {
            let names = catalog.vision_priorities(c);
            assert!(!names.is_empty(), "on {c}");
            for name in names {
                assert!(
                    catalog.backend(name).is_ok() || catalog.without_rule_book().contains(name),
                    "{name} on {c}"
                );
            }
        }
    }
}

#[test]
fn every_rule_book_can_be_used() {
    for catalog in catalogs() {
        for backend in catalog.backends() {
            for &c in catalog.capabilities() {
                let r = backend.rules(&on(c));
                let name = &backend.name;
                assert_eq!(*name, r.name);
                assert!(
                    !r.dtypes.is_empty() && !r.attn_types.is_empty() && !r.kv_cache_dtypes.is_empty(),
                    "{name}"
                );
                assert!(r.supports_block_size(r.preferred_block_size(16)), "{name} on {c}");
                let positive = |k: &KernelBlockSize| match *k {
                    KernelBlockSize::Exact(n) | KernelBlockSize::MultipleOf(n) => n > 0,
                };
                assert!(r.kernel_block_sizes.iter().all(positive), "{name}");
                assert_eq!(r.kind == KindTag::StateSpace, backend.registry == RegistryKind::Mamba, "{name}");
                // The rule book states the least, the builder the truth.
                assert!(r.graph_support <= backend.plan(&on(c)).graph_support, "{name} on {c}");
            }
        }
    }
}

#[test]
fn a_rule_book_survives_json() {
    for catalog in catalogs() {
        for backend in catalog.backends() {
            let rules = backend.rules_on(Some(ComputeCapability(9, 0)));
            let text = serde_json::to_string(rules).unwrap();
            assert_eq!(serde_json::from_str::<RuleBook>(&text).unwrap(), *rules, "{}", backend.name);
        }
    }
}

#[test]
fn the_block_size_alone() -> Result<()> {
    let catalog = Catalog::load("0.33.0")?;
    let need = LayerNeed {
        kind: KindTag::Mla,
        head_size: 576,
        block_size: Some(48),
        ..on(ComputeCapability(10, 0))
    };
    let s = catalog.select("layer 0", &need, &BackendRequest::default())?;
    assert_eq!(s.backend.name, "TRITON_MLA");
    assert!(s.warnings[0].contains("--block-size 48 precluded"), "{:?}", s.warnings);
    let without = LayerNeed { block_size: None, ..need };
    let s = catalog.select("layer 0", &without, &BackendRequest::default())?;
    assert_eq!(s.backend.name, "FLASHINFER_MLA");
    assert!(s.warnings.is_empty());
    Ok(())
}

#[test]
fn a_named_backend_is_no_hint() -> Result<()> {
    let catalog = Catalog::load("0.33.0")?;
    let need = on(ComputeCapability(8, 0));
    // Valid, though lower in the list; and one that no list has.
    for name in ["flex_attention", "FLASH_ATTN_DIFFKV"] {
        let s = catalog.select("layer 3", &need, &asking(name))?;
        assert!(s.backend.name.eq_ignore_ascii_case(name));
    }
    let e = catalog.select("layer 3", &need, &asking("FLASHMLA")).unwrap_err().to_string();
    for part in ["FLASHMLA", "layer 3", "non-MLA not supported", "--attention-backend"] {
        assert!(e.contains(part), "{part} in {e}");
    }
    let e = catalog.select("layer 3", &need, &asking("FLASH_ATN")).unwrap_err().to_string();
    assert!(e.contains("did you mean FLASH_ATTN?"), "{e}");
    let request = BackendRequest {
        per_kind: BackendRequest::parse_per_kind("sliding_window=TRITON_ATTN")?,
        ..BackendRequest::default()
    };
    let windowed = LayerNeed { sliding_window: Some(512), ..need.clone() };
    assert_eq!(catalog.select("layer 3", &windowed, &request)?.backend.name, "TRITON_ATTN");
    assert_eq!(catalog.select("layer 3", &need, &request)?.backend.name, "FLASH_ATTN");
    Ok(())
}

#[test]
fn what_the_machine_lacks_is_told_by_the_caller() -> Result<()> {
    let catalog = Catalog::load("0.33.0")?;
    let need = on(ComputeCapability(9, 0));
    let mut candidates = catalog.candidates(&need)?;
    candidates[0].unavailable = Some("package flash-attn is missing".into());
    let s = catalog.select_among(candidates, "layer 0", &need, &BackendRequest::default())?;
    assert_eq!(s.backend.name, "FLASHINFER");
    assert_eq!(s.refused[0].reasons, [Refusal::from("package flash-attn is missing")]);
    Ok(())
}

#[test]
fn vllm_asks_about_the_cache_of_layers_without_one() -> Result<()> {
    let catalog = Catalog::load("0.33.0")?;
    let need = LayerNeed {
        attn_type: AttnType::EncoderOnly,
        has_cache: false,
        kv_cache_dtype: Some("fp8".into()),
        ..on(ComputeCapability(8, 0))
    };
    let s = catalog.select("layer 0", &need, &BackendRequest::default())?;
    assert_eq!(s.refused[0].backend, "FLASH_ATTN");
    assert_eq!(s.refused[0].reasons[0], Refusal::from("kv_cache_dtype not supported"));
    Ok(())
}

#[test]
fn on_the_cpu_vllm_picks_by_itself() -> Result<()> {
    let catalog = Catalog::load("0.33.0")?;
    let cpu = LayerNeed::default();
    let s = catalog.select("layer 0", &cpu, &asking("TRITON_ATTN"))?;
    assert_eq!(s.backend.name, "CPU_ATTN");
    assert!(s.warnings[0].contains("--attention-backend TRITON_ATTN counts for nothing"), "{:?}", s.warnings);
    let mla = LayerNeed { kind: KindTag::Mla, head_size: 576, ..cpu };
    assert_eq!(catalog.select("layer 0", &mla, &BackendRequest::default())?.backend.name, "CPU_MLA");
    let amx = LayerNeed { cpu_has_amx: true, ..mla };
    assert_eq!(catalog.select("layer 0", &amx, &BackendRequest::default())?.backend.name, "AMX_MLA");
    Ok(())
}

#[test]
fn a_platform_without_priorities_is_an_error() {
    for catalog in catalogs() {
        let need = LayerNeed { platform: "rocm".into(), ..LayerNeed::default() };
        let e = catalog.candidates(&need).unwrap_err().to_string();
        assert!(e.contains("rocm") && e.contains("cuda, cpu"), "{e}");
        let mixer = LayerNeed { kind: KindTag::StateSpace, ..on(ComputeCapability(9, 0)) };
        assert!(catalog.candidates(&mixer).unwrap_err().to_string().contains("mixer"));
    }
}

#[test]
fn state_space_layers_get_their_mixer() -> Result<()> {
    let catalog = Catalog::load("0.33.0")?;
    for (mixer, name) in
        StateSpaceMixer::ALL.into_iter().zip(["MAMBA1", "MAMBA2", "SHORT_CONV", "LINEAR", "GDN_ATTN"])
    {
        let need =
            LayerNeed { kind: KindTag::StateSpace, state_space: Some(mixer), ..on(ComputeCapability(9, 0)) };
        // Whatever the attention layers beside it have: no rule book is asked.
        let need = LayerNeed { kv_cache_dtype: Some("fp8".into()), dtype: DType::F32, ..need };
        let s = catalog.select("layer 0", &need, &asking("FLASH_ATTN"))?;
        assert_eq!(s.backend.name, name);
        assert!(s.warnings.is_empty() && s.refused.is_empty());
        let request = BackendRequest {
            per_kind: BackendRequest::parse_per_kind("state_space=MAMBA2")?,
            ..BackendRequest::default()
        };
        let s = catalog.select("layer 0", &need, &request)?;
        assert_eq!(s.backend.name, name);
        assert!(s.warnings[0].contains("MAMBA2 counts for nothing for state-space"), "{:?}", s.warnings);
    }
    Ok(())
}

#[test]
fn builders_grow_with_speculation() -> Result<()> {
    let catalog = Catalog::load("0.33.0")?;
    let mamba = catalog.backend("MAMBA2")?;
    let need = LayerNeed { num_speculative_tokens: 5, ..on(ComputeCapability(9, 0)) };
    assert_eq!(mamba.plan(&need).reorder_batch_threshold, Some(6));
    assert_eq!(mamba.varlen_graph_max_query_len(&need), Some(6));
    let flash = catalog.backend("FLASHMLA")?;
    assert_eq!(flash.plan(&need).reorder_batch_threshold, Some(128));
    let dcp = LayerNeed { use_dcp: true, ..need };
    assert_eq!(flash.plan(&dcp).reorder_batch_threshold, Some(1));
    Ok(())
}
