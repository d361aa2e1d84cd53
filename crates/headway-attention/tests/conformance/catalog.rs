//! The catalogue against the tables of rule books and of priority lists.

use crate::{
    Outcome,
    read::{Table, all, flag, num, opt, same, text},
};
use headway_attention::{
    AttentionSpec, KvCacheSpec, LayerNeed,
    catalog::{BuilderFacts, Catalog, CatalogBackend},
    group::kv::spec::StrideAlignment,
    process::rules::{ComputeCapability, KernelBlockSize, KindTag, RuleBook},
};
use headway_tensor::DType;
use serde_json::{Map, Value, json};
use std::sync::OnceLock;

/// The catalogue of the version that the tables name.
pub fn catalog() -> &'static Catalog {
    static CATALOG: OnceLock<Catalog> = OnceLock::new();
    CATALOG.get_or_init(|| Catalog::load("0.33.0").expect("the tables' version is embedded"))
}

/// A compute capability.
pub fn capability(v: &Value) -> Option<ComputeCapability> {
    text(v).parse().ok()
}

const BLOCK_SIZES: [usize; 27] = [
    1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 256, 272, 384, 400, 512, 528, 544, 784,
    1024, 1056, 2048,
];

/// The configurations under which builders were asked.
fn configured(config: &str, need: LayerNeed) -> LayerNeed {
    match config {
        "spec3" => LayerNeed { num_speculative_tokens: 3, ..need },
        "dcp2" => LayerNeed { use_dcp: true, ..need },
        _ => need,
    }
}
const CONFIGS: [&str; 3] = ["default config", "spec3", "dcp2"];

/// A sample spec, and the layer that has it.
struct Sample {
    name: &'static str,
    spec: AttentionSpec,
    need: LayerNeed,
}

fn samples(kind: KindTag, need: &LayerNeed, block_size: usize) -> Vec<Sample> {
    if kind == KindTag::Mla {
        let spec = AttentionSpec { head_size_v: 0, ..AttentionSpec::new(block_size, 1, 576, DType::BF16) };
        let need = LayerNeed { kind, head_size: 576, model_head_size: Some(576), ..need.clone() };
        return vec![Sample { name: "default", spec, need }];
    }
    let sample = |name, head: usize, dtype, kv: Option<&'static str>, window| Sample {
        name,
        spec: AttentionSpec::new(block_size, 2, head, dtype),
        need: LayerNeed {
            kind,
            head_size: head,
            model_head_size: Some(head),
            kv_cache_dtype: kv.map(Into::into),
            sliding_window: window,
            ..need.clone()
        },
    };
    let plain = sample("default", 128, DType::BF16, None, None);
    if kind == KindTag::StateSpace {
        return vec![plain];
    }
    vec![
        plain,
        sample("sliding_window", 128, DType::BF16, None, Some(1024)),
        sample("fp8", 128, DType::F8E4M3, Some("fp8"), None),
        sample("head256", 256, DType::BF16, None, None),
        sample("head512", 512, DType::BF16, None, None),
    ]
}

fn block_sizes(sizes: &[KernelBlockSize]) -> Value {
    let one = |s: &KernelBlockSize| match *s {
        KernelBlockSize::Exact(n) => json!(n),
        KernelBlockSize::MultipleOf(n) => json!({"multiple_of": n}),
    };
    sizes.iter().map(one).collect()
}

fn object(entries: impl IntoIterator<Item = (String, Value)>) -> Value {
    Value::Object(entries.into_iter().collect::<Map<_, _>>())
}

fn rules(r: &RuleBook, b: &CatalogBackend, capabilities: &[ComputeCapability]) -> Value {
    let accepted: Vec<usize> = BLOCK_SIZES.into_iter().filter(|&n| r.supports_block_size(n)).collect();
    let takes = |c: &ComputeCapability| {
        r.supports_compute_capability(&LayerNeed { compute_capability: Some(*c), ..LayerNeed::default() })
    };
    let layouts = (!r.kv_cache_layouts.is_empty()).then_some(&r.kv_cache_layouts);
    json!({
        "name": b.own_name, "class": b.class, "module": b.module,
        "is_mla": r.kind == KindTag::Mla, "is_ssm": r.kind == KindTag::StateSpace, "is_sparse": r.is_sparse,
        "supports_sink": r.supports_sinks,
        "supports_sliding_window": r.supports_sliding_window,
        "supports_alibi_sqrt": r.supports_alibi_sqrt,
        "supports_mm_prefix": r.supports_mm_prefix,
        "supports_per_head_quant_scales": r.supports_per_head_quant_scales,
        "supports_non_causal": r.supports_non_causal,
        "supports_non_causal_dcp": r.supports_non_causal_dcp,
        "supports_batch_invariance": r.supports_batch_invariance,
        "supports_kv_connector": r.supports_kv_connector,
        "supports_pcp": r.supports_pcp, "supports_dcp": r.supports_dcp, "supports_rswa": r.supports_rswa,
        "supports_device_cpu_query_lens_mismatch": r.supports_inexact_query_lens,
        "supports_unset_kv_cache_dtype": r.supports_unset_kv_cache_dtype,
        "supports_kv_cache_update_bypass": r.supports_kv_cache_update_bypass,
        "forward_includes_kv_cache_update": r.forward_includes_kv_cache_update,
        "supported_dtypes": r.dtypes, "supported_dtypes_declared": b.declared.dtypes,
        "supported_kv_cache_dtypes": r.kv_cache_dtypes,
        "supported_head_sizes": b.declared.head_sizes,
        "accepted_head_sizes_1_to_1024": (1..=1024).filter(|&n| r.supports_head_size(n)).collect::<Vec<_>>(),
        "supported_kernel_block_sizes": block_sizes(&r.kernel_block_sizes),
        "accepted_block_sizes": accepted,
        "preferred_block_size": object([1, 8, 16, 32, 64, 128, 256].map(|n: usize| {
            (n.to_string(), json!(r.preferred_block_size(n)))
        })),
        "supported_kv_cache_layouts": layouts,
        "supported_attn_types": r.attn_types,
        "compute_capabilities": capabilities.iter().filter(|c| takes(c)).collect::<Vec<_>>(),
    })
}

fn specs(b: &CatalogBackend, samples: &[Sample], kind: KindTag) -> Value {
    let one = |s: &Sample| {
        let kind_of = if kind == KindTag::Mla { KvCacheSpec::Mla } else { KvCacheSpec::Full };
        let spec = b.customize_spec(kind_of(s.spec.clone()));
        let a = spec.attention().cloned().unwrap_or_else(|| s.spec.clone());
        let stride = match a.block_stride_alignment {
            None => Value::Null,
            Some(StrideAlignment::Bytes(n)) => json!(n),
            Some(StrideAlignment::Tokens(n)) => json!({"multiple_of": n}),
        };
        json!({
            "changed": b.spec_change.is_some(),
            "num_heads": a.num_heads(),
            "state_content_size_bytes": a.state_content_size_bytes(),
            "page_size_bytes": a.page_size_bytes(),
            "block_stride_alignment": stride,
        })
    };
    let attention = samples.iter().filter(|_| kind != KindTag::StateSpace);
    object(attention.map(|s| (s.name.to_owned(), one(s))))
}

fn builder(b: &CatalogBackend, samples: &[Sample]) -> Value {
    let plain = &samples[0].need;
    let facts = b.builder(plain);
    let each = |f: &dyn Fn(&LayerNeed, &BuilderFacts) -> Value| {
        object(CONFIGS.map(|c| {
            let need = configured(c, plain.clone());
            (c.to_owned(), f(&need, b.builder(&need)))
        }))
    };
    let support = CONFIGS.map(|c| {
        let of = |s: &Sample| json!(b.plan(&configured(c, s.need.clone())).graph_support);
        (c.to_owned(), object(samples.iter().map(|s| (s.name.to_owned(), of(s)))))
    });
    json!({
        "class": facts.class,
        "cudagraph_support": object(support),
        "varlen_cudagraph_max_query_len": each(&|need, _| json!(b.varlen_graph_max_query_len(need))),
        "reorder_batch_threshold_class": facts.class_reorder_batch_threshold,
        "instance": each(&|need, facts| json!({
            "threshold": b.plan(need).reorder_batch_threshold,
            "supports_draft_decode_metadata_update": facts.supports_draft_decode_update,
        })),
        "supports_update_block_table": facts.supports_update_block_table,
        "requires_block_table_width": facts.requires_block_table_width,
        "supports_draft_decode_metadata_update": facts.class_supports_draft_decode_update,
        "supports_non_causal_multi_token_dcp": facts.supports_non_causal_multi_token_dcp,
        "query_len_support": facts.query_len_support,
    })
}

/// Everything that the catalogue says of a backend on a device, in the table's shape.
fn ours(b: &CatalogBackend, capability: ComputeCapability, capabilities: &[ComputeCapability]) -> Value {
    let need = LayerNeed { compute_capability: Some(capability), ..LayerNeed::default() };
    let r = b.rules(&need);
    let smallest = r.kernel_block_sizes.iter().map(|k| match *k {
        KernelBlockSize::Exact(n) | KernelBlockSize::MultipleOf(n) => n,
    });
    // The samples' block size: 16 where that is one, else the smallest.
    let block = if r.supports_block_size(16) { 16 } else { smallest.min().unwrap_or(16) };
    let samples = samples(r.kind, &need, block);
    let mut out = rules(r, b, capabilities);
    out["sample_block_size"] = json!(block);
    out["kv_cache_shape_sample"] = if b.offers_kv_cache_shape { json!([7, block, 576]) } else { Value::Null };
    out["kernel_block_sizes_for_spec"] = object(
        samples.iter().map(|s| (s.name.to_owned(), block_sizes(&b.rules(&s.need).kernel_block_sizes))),
    );
    out["customized_spec"] = specs(b, &samples, r.kind);
    out["builder"] = builder(b, &samples);
    out["impl"] = match &b.implementation {
        Some(facts) => json!(facts),
        None => json!({"not_offered": "NotImplementedError"}),
    };
    out
}

/// What the table says for one capability: the answers that vary put back in their places.
fn theirs(e: &Value, capability: ComputeCapability) -> Value {
    let mut out = e.clone();
    let varies = out.as_object_mut().and_then(|o| o.remove("varies_by_device_capability"));
    for (path, groups) in varies.as_ref().and_then(Value::as_object).into_iter().flatten() {
        let group = groups
            .as_array()
            .into_iter()
            .flatten()
            .find(|g| g["capabilities"].as_array().is_some_and(|c| c.contains(&json!(capability))));
        let mut place = &mut out;
        for key in path.split('.') {
            place = &mut place[key];
        }
        *place = group.map_or(Value::Null, |g| g["value"].clone());
    }
    let sizes = &mut out["accepted_head_sizes_1_to_1024"];
    let run = |r: &Value| (num(&r[0])..=num(&r[1])).step_by(num(&r[2]).max(1));
    *sizes = sizes.as_array().into_iter().flatten().flat_map(run).map(Value::from).collect();
    out
}

/// The first leaf of theirs that ours has otherwise, or not at all.
fn compare(path: &str, ours: &Value, theirs: &Value) -> Outcome {
    match (ours, theirs) {
        (Value::Object(a), Value::Object(b)) => all(b.iter().map(|(key, value)| {
            let path = format!("{path}.{key}");
            match a.get(key) {
                Some(own) => compare(&path, own, value),
                None => Outcome::NotUnderstood(path),
            }
        })),
        (a, b) => same(path, a, b),
    }
}

pub fn rulebooks(_: &str, input: &Value, e: &Value, table: &Table) -> Outcome {
    let Ok(backend) = catalog().backend(text(&input["registry_name"])) else {
        return Outcome::Differs("the catalogue doesn't have it".into());
    };
    let capabilities: Option<Vec<_>> =
        table.header("device_capabilities").as_array().map(|a| a.iter().filter_map(capability).collect());
    let Some(capabilities) = capabilities.filter(|c| c == catalog().capabilities()) else {
        return Outcome::NotUnderstood("device_capabilities".into());
    };
    let on = |c: ComputeCapability| match compare("", &ours(backend, c, &capabilities), &theirs(e, c)) {
        Outcome::Differs(how) => Outcome::Differs(format!("on {c}: {how}")),
        other => other,
    };
    let registry = same("registry", json!(backend.registry), input["registry"].clone());
    all(std::iter::once(registry).chain(capabilities.iter().map(|c| on(*c))))
}

pub fn priorities(_: &str, input: &Value, e: &Value, table: &Table) -> Outcome {
    let Some(capability) = capability(&input["device_capability"]) else {
        return Outcome::NotUnderstood(input["device_capability"].to_string());
    };
    let vision = serde_json::to_value(catalog().vision_priorities(capability)).unwrap_or_default();
    let expected = &table.header("vit_backends")[capability.to_string()];
    let list = |when: &Value| {
        let mla = flag(&when["use_mla"]);
        let need = LayerNeed {
            platform: "cuda".into(),
            kind: if mla { KindTag::Mla } else { KindTag::Standard },
            compute_capability: Some(capability),
            num_heads: num(&when["num_heads"]),
            kv_cache_dtype: when["kv_cache_dtype"].as_str().map(|s| s.to_owned().into()),
            use_non_causal: flag(&when["use_non_causal"]),
            head_size: opt(&when["head_size"]).unwrap_or(0),
            use_mm_prefix: flag(&when["use_mm_prefix"]),
            ..LayerNeed::default()
        };
        match catalog().priorities(&need) {
            Ok(names) => same(&when.to_string(), json!(names), e["backends"].clone()),
            Err(e) => Outcome::Differs(e.to_string()),
        }
    };
    let lists = input["when"].as_array().into_iter().flatten().map(list);
    all(std::iter::once(same("vit_backends", &vision, expected)).chain(lists))
}
