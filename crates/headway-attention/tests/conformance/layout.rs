//! The table of KV cache layouts.

use crate::{
    Outcome,
    read::{Table, all, flag, num, nums, opt, same, same_failure, spec, text},
};
use headway_attention::group::kv::layout::{
    KvCacheLayout, LayoutRequest, common_layouts, resolve_for_workers,
};
use serde_json::Value;

pub fn layouts(_: &str, i: &Value, e: &Value, _: &Table) -> Outcome {
    match text(&i["op"]) {
        "common_layouts" => common(i, e),
        "resolve" => resolve(i, e),
        "properties" => properties(i, e),
        "strides" => strides(i, e),
        other => Outcome::NotUnderstood(other.into()),
    }
}

fn layout(v: &Value) -> Option<KvCacheLayout> {
    text(v).parse().ok()
}

fn list(v: &Value) -> Option<Vec<KvCacheLayout>> {
    v.as_array().map(|a| a.iter().filter_map(layout).collect())
}

fn common(i: &Value, e: &Value) -> Outcome {
    let declared: Vec<_> =
        i["declared"].as_array().map_or(vec![], |a| a.iter().map(|d| list(d).unwrap_or_default()).collect());
    let ours = common_layouts(&declared.iter().map(Vec::as_slice).collect::<Vec<_>>());
    match &ours {
        Ok(l) => {
            all([same("layouts", Some(l.clone()), list(&e["layouts"])), same_failure(&ours, &e["error"])])
        }
        Err(x) => {
            // The reference writes lists in Python's form.
            let text_of = text(&e["error"]["message"]).replace('\'', "\"");
            same("error", x.to_string(), text_of)
        }
    }
}

fn resolve(i: &Value, e: &Value) -> Outcome {
    let workers: Vec<_> = i["workers_supported"]
        .as_array()
        .map_or(vec![], |a| a.iter().map(|w| list(w).unwrap_or_default()).collect());
    let specs = match i["specs"].as_array() {
        None => None,
        Some(a) => match a.iter().map(spec).collect::<Option<Vec<_>>>() {
            Some(s) => Some(s),
            None => return Outcome::NotUnderstood("a spec".into()),
        },
    };
    let known =
        ["workers_supported", "requested_env", "connector_preference", "already_resolved", "specs", "op"];
    if let Some(extra) = i.as_object().and_then(|o| o.keys().find(|k| !known.contains(&k.as_str()))) {
        return Outcome::NotUnderstood(format!("input {extra}"));
    }
    let request = LayoutRequest {
        requested: i["requested_env"].as_str().map(Into::into),
        connector: layout(&i["connector_preference"]),
        already: layout(&i["already_resolved"]),
    };
    let ours = resolve_for_workers(&workers, &request, specs.as_deref());
    match &ours {
        Ok((l, warnings)) => all([
            same_failure(&ours, &e["error"]),
            same("layout", Some(*l), layout(&e["layout"])),
            same("warnings", warnings.len(), e["warnings"].as_array().map_or(0, Vec::len)),
        ]),
        Err(_) => same_failure(&ours, &e["error"]),
    }
}

fn properties(i: &Value, e: &Value) -> Outcome {
    let Some(l) = layout(&i["layout"]) else { return Outcome::NotUnderstood(i["layout"].to_string()) };
    all([
        same("stride order", l.stride_order().to_vec(), nums(&e["stride_order"])),
        same("layer view", l.layer_view_order().to_vec(), nums(&e["layer_view_order"])),
        same("layer compact", l.is_layer_compact(), flag(&e["is_layer_compact"])),
        same("block contiguous", l.is_block_contiguous(), flag(&e["is_block_contiguous"])),
        same("block compact", l.is_block_compact(), flag(&e["is_block_compact"])),
        same("block outermost", l.is_block_outermost(), flag(&e["is_block_outermost"])),
        same("name", l.nhd_or_hnd(), e["flashinfer_name"].as_str()),
    ])
}

fn strides(i: &Value, e: &Value) -> Outcome {
    let (Some(l), Some(s)) = (layout(&i["layout"]), spec(&i["spec"])) else {
        return Outcome::NotUnderstood(i["spec"].to_string());
    };
    let (layers, blocks) = (num(&i["num_layers"]), num(&i["num_blocks"]));
    let kernel = opt(&i["kernel_block_size"]);
    let ours = s.kernel_block_view(kernel, blocks).and_then(|(s, blocks)| {
        let [h, n, c] = s.page_shape();
        Ok((vec![blocks, h, n, c], l.strides(&s, layers, blocks, None)?))
    });
    match &ours {
        Ok((shape, strides)) => all([
            same_failure(&ours, &e["error"]),
            same("shape", shape.clone(), nums(&e["shape"])),
            same("strides", strides.to_vec(), nums(&e["strides"])),
        ]),
        Err(_) => same_failure(&ours, &e["error"]),
    }
}
