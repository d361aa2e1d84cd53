//! The table of selection, answered by the catalogue alone.

use crate::{
    Outcome,
    catalog::{capability, catalog},
    differences::Why,
    read::{Table, all, flag, num, opt, same, text},
};
use headway_attention::{
    AttentionError, BackendRequest, LayerNeed, Refusal,
    catalog::CatalogCandidate,
    process::{
        rules::{KindTag, LatentDims},
        select::reasons,
    },
};
use serde_json::Value;

fn need(input: &Value, table: &Table) -> Option<LayerNeed> {
    let config = &input["config"];
    let field = |name: &str| config.get(name).unwrap_or(&table.header("selector_config_defaults")[name]);
    let on = |name: &str| flag(field(name));
    let head_size = num(field("head_size"));
    let model = &input["model"];
    let latent = LatentDims {
        qk_nope_head_dim: num(&model["qk_nope_head_dim"]),
        qk_rope_head_dim: num(&model["qk_rope_head_dim"]),
        kv_lora_rank: num(&model["kv_lora_rank"]),
        v_head_dim: num(&model["v_head_dim"]),
        index_topk: opt(&model["index_topk"]),
    };
    Some(LayerNeed {
        kind: if on("use_mla") { KindTag::Mla } else { KindTag::Standard },
        platform: text(&input["platform"]).to_owned().into(),
        compute_capability: capability(&input["device_capability"]),
        head_size,
        head_size_v: head_size,
        model_head_size: model.is_object().then_some(head_size),
        latent: (text(&model["kind"]) == "mla").then_some(latent),
        num_heads: num(&input["num_heads"]),
        dtype: serde_json::from_value(field("dtype").clone()).ok()?,
        kv_cache_dtype: field("kv_cache_dtype").as_str().map(|s| s.to_owned().into()),
        block_size: opt(field("block_size")),
        attn_type: serde_json::from_value(field("attn_type").clone()).ok()?,
        sliding_window: on("has_sliding_window").then_some(1),
        has_sinks: on("has_sink"),
        use_sparse: on("use_sparse"),
        use_mm_prefix: on("use_mm_prefix"),
        use_per_head_quant_scales: on("use_per_head_quant_scales"),
        use_non_causal: on("use_non_causal"),
        use_batch_invariant: on("use_batch_invariant"),
        use_kv_connector: on("use_kv_connector"),
        use_dcp: on("use_dcp"),
        use_pcp: on("use_pcp"),
        use_rswa: on("use_rswa"),
        use_adaptive_verification: on("use_adaptive_verification"),
        cpu_has_amx: flag(&input["amx_available"]),
        ..LayerNeed::default()
    })
}

fn texts(v: &Value) -> Vec<String> {
    v.as_array().map_or(vec![], |a| a.iter().map(|t| text(t).to_owned()).collect())
}

fn words(reasons: &[Refusal]) -> Vec<String> {
    reasons.iter().map(ToString::to_string).collect()
}

/// Validity of the platform's own list.
fn validity(candidates: &[CatalogCandidate<'_>], need: &LayerNeed, e: &Value) -> Outcome {
    let asked: Vec<_> =
        candidates.iter().map(|c| (c.backend.name.clone(), words(&reasons(c, need)))).collect();
    let valid: Vec<_> =
        asked.iter().filter(|(_, why)| why.is_empty()).map(|(name, _)| name.clone()).collect();
    let invalid: Vec<_> = asked.into_iter().filter(|(_, why)| !why.is_empty()).collect();
    let expected: Vec<_> = e["invalid"]
        .as_array()
        .map_or(vec![], |a| a.iter().map(|i| (text(&i[0]).to_owned(), texts(&i[1]))).collect());
    all([same("valid", valid, texts(&e["valid"])), same("invalid", invalid, expected)])
}

/// Where headway decides otherwise on a named backend.
fn on_purpose(ours: &[String], theirs: &[String]) -> Option<Why> {
    match ours.split_first() {
        Some((first, rest)) if first == "runs on cpu, not on cuda" && rest == theirs => {
            Some(Why::OtherPlatform)
        }
        _ if theirs.split_last().is_some_and(|(last, rest)| last.ends_with("but got 1") && rest == ours) => {
            Some(Why::NoLatentDimensions)
        }
        _ => None,
    }
}

pub fn selection(_: &str, input: &Value, e: &Value, table: &Table) -> Outcome {
    let Some(need) = need(input, table) else { return Outcome::NotUnderstood(input["config"].to_string()) };
    let mut candidates = match catalog().candidates(&need) {
        Ok(c) => c,
        Err(e) => return Outcome::Differs(e.to_string()),
    };
    for c in &mut candidates {
        let missing = input["import_errors"][&c.backend.name].as_str();
        c.unavailable = missing.map(|why| format!("ImportError: {why}").into());
    }
    let list = if need.platform == "cuda" { validity(&candidates, &need, e) } else { Outcome::Same };
    let named = input["selected_backend"].as_str();
    let mut deliberate = None;
    if need.platform == "cuda"
        && let Some(name) = named
        && !candidates.iter().any(|c| c.backend.name == name && c.unavailable.is_some())
    {
        let backend = match catalog().backend(name) {
            Ok(b) => b,
            Err(e) => return Outcome::Differs(e.to_string()),
        };
        let ours = match catalog().candidate(backend, &need) {
            Ok(c) => words(&reasons(&c, &need)),
            Err(e) => return Outcome::Differs(e.to_string()),
        };
        let theirs = texts(&e["selected_reasons"]);
        match on_purpose(&ours, &theirs) {
            Some(why) => deliberate = Some(why),
            None if ours != theirs => {
                return Outcome::Differs(format!("selected_reasons: {ours:?}, expected {theirs:?}"));
            }
            None => {}
        }
    }
    let request = BackendRequest { backend: named.map(Into::into), ..BackendRequest::default() };
    let answer = catalog().select_among(candidates, "the layer", &need, &request);
    let chosen = match (answer, &e["error"]) {
        (Err(_), _) if let Some(why) = deliberate => Outcome::Deliberate(why),
        (Ok(s), Value::Null) => {
            let warnings = if need.platform == "cuda" {
                same("warnings", s.warnings, texts(&e["warnings"]))
            } else {
                Outcome::Same
            };
            all([same("chosen", s.backend.name.as_str(), text(&e["chosen"])), warnings])
        }
        (Ok(s), error) => Outcome::Differs(format!("chose {}, expected {error}", s.backend.name)),
        (Err(ours), theirs) => refused(&ours, theirs, named, e),
    };
    all([list, chosen])
}

/// An error of the same kind that names the same backends and reasons.
fn refused(ours: &AttentionError, theirs: &Value, named: Option<&str>, e: &Value) -> Outcome {
    let AttentionError::Selection(message) = ours else { return Outcome::Differs(ours.to_string()) };
    let kinds = ["ValueError", "NotImplementedError"];
    if !kinds.contains(&text(&theirs["type"])) {
        return Outcome::Differs(format!("{message}; expected {theirs}"));
    }
    let mut parts = match named {
        _ if e.get("invalid").is_none_or(Value::is_null) => vec![text(&theirs["message"]).to_owned()],
        Some(name) => {
            vec![format!("Selected backend {name} is not valid"), texts(&e["selected_reasons"]).join(", ")]
        }
        None => vec!["No valid attention backend found".to_owned()],
    };
    if named.is_none() {
        let list = e["invalid"].as_array().into_iter().flatten();
        parts.extend(list.map(|i| format!("{}: [{}]", text(&i[0]), texts(&i[1]).join(", "))));
    }
    // Where the table keeps the text, the reasons stand in it in the same words.
    if let (Some(kept), false) = (theirs["message"].as_str(), parts.is_empty()) {
        let quoted = kept.replace(['\'', '"'], "");
        if let Some(p) = parts.iter().skip(1).find(|p| !quoted.contains(&p.replace(['\'', '"'], ""))) {
            return Outcome::NotUnderstood(format!("{p} in {kept}"));
        }
    }
    match parts.iter().find(|p| !message.contains(p.as_str())) {
        Some(part) => Outcome::Differs(format!("{message}; expected {part}")),
        None => Outcome::Same,
    }
}
