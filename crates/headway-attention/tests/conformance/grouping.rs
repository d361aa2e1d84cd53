//! The table of KV cache groups, spec sizes and attention groups.

use crate::{
    Outcome,
    differences::Why,
    read::{Table, all, block_sizes, flag, num, opt, same, same_failure, spec, text},
};
use headway_attention::{
    AttnLayer, GraphSupport, RuleBook,
    group::{
        kv::page::RequestLimits,
        plan::{
            CacheGroupLayers, GroupLayer, KvCacheGroup, group_layers, kv_cache_groups,
            place::{bytes_per_block, place},
        },
    },
};
use serde_json::Value;

pub fn grouping(_: &str, i: &Value, e: &Value, _: &Table) -> Outcome {
    match text(&i["op"]) {
        "spec_sizes" => sizes(i, e),
        "kv_cache_groups" => groups(i, e),
        "attention_groups" => attention_groups(i, e),
        other => Outcome::NotUnderstood(other.into()),
    }
}

fn sizes(i: &Value, e: &Value) -> Outcome {
    let Some(s) = spec(&i["spec"]) else { return Outcome::NotUnderstood(i["spec"].to_string()) };
    let limits = RequestLimits {
        max_model_len: num(&i["max_model_len"]),
        max_in_flight_tokens: num(&i["max_in_flight_tokens"]),
        max_encoder_tokens: num(&i["max_num_encoder_input_tokens"]),
        dcp_size: num(&i["decode_context_parallel_size"]),
    };
    let [heads, states, content] = s.page_shape();
    let alignment = s.attention().map_or(1, |a| a.block_stride_alignment_bytes());
    let pages = s.max_pages_per_request(&limits);
    all([
        same("page", s.page_size_bytes(), num(&e["page_size_bytes"])),
        same("unpadded page", s.unpadded_page_size_bytes(), num(&e["real_page_size_bytes"])),
        same("heads", heads, num(&e["num_heads"])),
        same("states", states, num(&e["num_states"])),
        same("content", content, num(&e["state_content_size_bytes"])),
        same("stride alignment", alignment, num(&e["block_stride_alignment_bytes"])),
        same("prefix cacheable", s.prefix_cacheable(), flag(&e["prefix_cacheable"])),
        same("slot mapping", s.uses_slot_mapping(), flag(&e["uses_slot_mapping"])),
        same("table alignment", s.block_table_token_alignment(), opt(&e["block_table_token_alignment"])),
        same("kind", s.kind_name(), text(&e["spec_kind"])),
        same("full", s.is_full_attention(), flag(&e["is_full_attention"])),
        same(
            "blocks",
            s.max_blocks_per_request(&limits, limits.max_model_len),
            num(&e["max_num_blocks_per_req"]),
        ),
        same("most memory", pages.ok().map(|p| p * s.page_size_bytes()), opt(&e["max_memory_usage_bytes"])),
    ])
}

fn same_specs(ours: &KvCacheGroup, theirs: &Value) -> Outcome {
    if let Some(per_layer) = theirs["per_layer"].as_array() {
        let theirs: Option<Vec<_>> = per_layer.iter().map(|l| spec(&l["spec"])).collect();
        return same("specs", Some(ours.layer_specs.clone()), theirs);
    }
    same("spec", Some(ours.spec.clone()), spec(&theirs["spec"]))
}

fn groups(i: &Value, e: &Value) -> Outcome {
    let empty = vec![];
    let list = i["layers"].as_array().unwrap_or(&empty);
    let specs: Option<Vec<_>> = list.iter().map(|l| spec(&l["spec"])).collect();
    let Some(specs) = specs else { return Outcome::NotUnderstood("a layer's spec".into()) };
    let Ok(layout) = text(&i["kv_cache_layout"]).parse() else {
        return Outcome::NotUnderstood(i["kv_cache_layout"].to_string());
    };
    let layers: Vec<_> = specs.into_iter().enumerate().map(|(n, s)| (AttnLayer(n as u32), s)).collect();
    let name = |l: &AttnLayer| text(&list[l.0 as usize]["name"]).to_owned();
    let mut warnings = vec![];
    let ours = kv_cache_groups(&layers, layout, !flag(&i["disable_hybrid_kv_cache_manager"]), &mut warnings);
    let Ok(ours) = &ours else { return same_failure(&ours, &e["error"]) };
    if text(&e["error"]["message"]).ends_with("must have the same window size.") {
        return Outcome::Deliberate(Why::WindowsMayDiffer);
    }
    if !e["error"].is_null() {
        return Outcome::Differs(format!("no error, expected {}", e["error"]));
    }
    let theirs = e["groups"].as_array().unwrap_or(&empty);
    let names = |g: &KvCacheGroup| g.layers.iter().map(name).collect::<Vec<_>>();
    let their_names = |g: &Value| {
        g["layer_names"]
            .as_array()
            .map_or(vec![], |a| a.iter().map(|n| text(n).to_owned()).collect::<Vec<_>>())
    };
    let mut outcomes = vec![same(
        "groups",
        ours.iter().map(names).collect::<Vec<_>>(),
        theirs.iter().map(their_names).collect::<Vec<_>>(),
    )];
    for (o, t) in ours.iter().zip(theirs) {
        outcomes.push(same("block size", o.block_size, num(&t["block_size"])));
        outcomes.push(same("page", o.page_size_bytes, num(&t["page_size_bytes"])));
        outcomes.push(same_specs(o, t));
    }
    let said: Vec<&str> = e["warnings"].as_array().map_or(vec![], |w| w.iter().map(text).collect());
    outcomes.push(same("warnings", warnings.iter().map(String::as_str).collect::<Vec<_>>(), said));
    outcomes.extend((!e["config"].is_null()).then(|| config(ours, layout, i, &e["config"], &name)));
    all(outcomes)
}

fn config(
    groups: &[KvCacheGroup],
    layout: headway_attention::KvCacheLayout,
    i: &Value,
    e: &Value,
    name: &dyn Fn(&AttnLayer) -> String,
) -> Outcome {
    let per_block = bytes_per_block(groups);
    let blocks = num(&i["available_memory"]).checked_div(per_block).unwrap_or(1);
    let ours = place(groups, layout, blocks);
    let Ok(tensors) = &ours else { return same_failure(&ours, &e["error"]) };
    if !e["error"].is_null() {
        return Outcome::Differs(format!("no error, expected {}", e["error"]));
    }
    let theirs: Vec<_> = e["tensors"].as_array().map_or(vec![], |a| {
        let one = |t: &Value| {
            let layers =
                t["layers"].as_array().map_or(vec![], |l| l.iter().map(|n| text(n).to_owned()).collect());
            (layers, ["size", "layer_stride", "block_stride", "offset"].map(|k| num(&t[k])))
        };
        a.iter().map(one).collect()
    });
    let ours: Vec<(Vec<String>, [usize; 4])> = tensors
        .iter()
        .map(|t| (t.layers.iter().map(name).collect(), [t.size, t.layer_stride, t.block_stride, t.offset]))
        .collect();
    all([same("blocks", blocks, num(&e["num_blocks"])), same("tensors", ours, theirs)])
}

struct Stand {
    class: String,
    rules: RuleBook,
}

fn attention_groups(i: &Value, e: &Value) -> Outcome {
    let empty = vec![];
    let mut stands = vec![];
    for b in i["backends"].as_array().unwrap_or(&empty) {
        let Ok(graph_support) = serde_json::from_value::<GraphSupport>(b["cudagraph_support"].clone()) else {
            return Outcome::NotUnderstood(b.to_string());
        };
        stands.push(Stand {
            class: text(&b["class_name"]).into(),
            rules: RuleBook {
                name: text(&b["name"]).to_owned().into(),
                kernel_block_sizes: block_sizes(&b["kernel_block_sizes"]),
                supports_batch_invariance: flag(&b["supports_batch_invariance"]),
                graph_support,
                ..RuleBook::default()
            },
        });
    }
    let mut ours = vec![];
    for g in i["kv_cache_groups"].as_array().unwrap_or(&empty) {
        let shared = spec(&g["spec"]);
        let mut layers = vec![];
        for l in g["layers"].as_array().unwrap_or(&empty) {
            let own = if l["spec"].is_null() { shared.clone() } else { spec(&l["spec"]) };
            let Some(own) = own else { return Outcome::NotUnderstood(l["spec"].to_string()) };
            let Some(stand) = stands.iter().find(|s| s.class == text(&l["backend"])) else {
                return Outcome::NotUnderstood(l["backend"].to_string());
            };
            layers.push(GroupLayer {
                id: text(&l["name"]),
                rules: &stand.rules,
                spec: own,
                num_heads: opt(&l["num_heads"]),
                latent: None,
                fast_prefill: false,
            });
        }
        ours.push(CacheGroupLayers { block_size: num(&g["block_size"]), pages_between: false, layers });
    }
    let invariant = flag(&i["batch_invariant"]);
    let grouped = group_layers(&ours, invariant);
    let grouped = match &grouped {
        Ok(g) if e["error"].is_null() => g,
        Ok(_) => return Outcome::Differs(format!("no error, expected {}", e["error"])),
        Err(_) => return same_failure(&grouped, &e["error"]),
    };
    let class =
        |rules: &RuleBook| stands.iter().find(|s| s.rules.name == rules.name).map(|s| s.class.as_str());
    let weakest = |checked: &Value| {
        let within = |names: &[&str]| {
            checked.as_array().is_none_or(|c| names.iter().any(|n| c.iter().any(|x| text(x) == *n)))
        };
        let all = grouped.iter().flat_map(|g| &g.groups).filter(|g| within(&g.layers));
        GraphSupport::weakest(all.map(|g| (class(g.rules).unwrap_or(""), g.rules.graph_support)))
    };
    let supports = |what: &str, (support, backend): (GraphSupport, Option<&str>), e: &Value| {
        all([
            same(what, support.name(), text(&e["min_cg_support"])),
            same("its backend", backend, e["min_cg_attn_backend"].as_str()),
        ])
    };
    let mut outcomes = vec![
        supports("support", weakest(&Value::Null), e),
        match &e["checked"] {
            Value::Null => Outcome::Same,
            checked => supports("support of the checked", weakest(&i["checked_layers"]), checked),
        },
        same(
            "kernel block sizes",
            grouped.iter().map(|g| g.block_size).collect::<Vec<_>>(),
            crate::read::nums(&e["kernel_block_sizes"]),
        ),
    ];
    for (index, (g, t)) in grouped.iter().zip(e["attention_groups"].as_array().unwrap_or(&empty)).enumerate()
    {
        let t = t.as_array().unwrap_or(&empty);
        outcomes.push(same("attention groups", g.groups.len(), t.len()));
        for (a, t) in g.groups.iter().zip(t) {
            let names: Vec<&str> =
                t["layer_names"].as_array().map_or(vec![], |l| l.iter().map(text).collect());
            outcomes.push(same("layers", a.layers.clone(), names));
            outcomes.push(same("backend", class(a.rules), t["backend"].as_str()));
            outcomes.push(same("group", index, num(&t["kv_cache_group_id"])));
            let own = ours[index].block_size;
            let kernel = Some(a.kernel_block_size).filter(|&k| k != own);
            outcomes.push(same("kernel block size", kernel, opt(&t["kernel_block_size"])));
            outcomes.push(same("builder's block size", a.kernel_block_size, num(&t["builder_block_size"])));
        }
    }
    all(outcomes)
}
