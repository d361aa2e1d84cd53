//! The tables of CUDA graph modes and of the dispatch to captured shapes.

use crate::{
    Outcome,
    differences::Why,
    read::{Table, all, flag, num, nums, opt, same, same_failure, text},
};
use headway_attention::{
    GraphSupport,
    group::graph::{
        Batch, CaptureOptions, GraphMode, GraphPlan, GraphRequest, GraphShape, MicroBatching, resolve,
    },
};
use serde_json::Value;

fn mode_of(v: &Value) -> Option<GraphMode> {
    serde_json::from_value(v.clone()).ok()
}

pub fn mode_helpers(_: &str, input: &Value, e: &Value, _: &Table) -> Outcome {
    let Some(m) = mode_of(&input["mode"]) else { return Outcome::NotUnderstood(input.to_string()) };
    let named = |what: &str, ours: GraphMode| same(what, ours.name(), text(&e[what]));
    let is = |what: &str, ours: bool| same(what, ours, flag(&e[what]));
    all([
        named("decode_mode", m.decode_mode()),
        named("mixed_mode", m.mixed_mode()),
        named("max_cudagraph_mode", m.max_mode()),
        named("without_piecewise", m.without_piecewise()),
        named("display", m),
        is("has_full_cudagraphs", m.has_full()),
        is("has_piecewise_cudagraphs", m.has_piecewise()),
        is("requires_piecewise_compilation", m.has_piecewise()),
        is("separate_routine", m.separates_decode()),
        is("is_valid_runtime_mode", m.is_runtime_mode()),
        is("truthy", m != GraphMode::None),
        same("has NONE", m.has(GraphMode::None), flag(&e["has_mode"]["NONE"])),
        same("has PIECEWISE", m.has(GraphMode::Piecewise), flag(&e["has_mode"]["PIECEWISE"])),
        same("has FULL", m.has(GraphMode::Full), flag(&e["has_mode"]["FULL"])),
    ])
}

pub fn mode(_: &str, i: &Value, e: &Value, _: &Table) -> Outcome {
    let Ok(support) = serde_json::from_value::<GraphSupport>(i["min_support"].clone()) else {
        return Outcome::NotUnderstood(i["min_support"].to_string());
    };
    let compilation = text(&i["compilation_mode"]);
    let backend = text(&i["min_support_backend"]);
    let kv = &i["kv_cache"];
    let request = GraphRequest {
        configured: mode_of(&i["configured_mode"]),
        support,
        backend: backend.into(),
        attention_splits: flag(&i["splitting_ops_contain_attention"]),
        piecewise_compilation: compilation == "VLLM_COMPILE",
        partitioned_in_compiler: flag(&i["use_inductor_graph_partition"]),
        piecewise_available: flag(&i["piecewise_capture_available"]),
        decode_query_len: num(&i["uniform_decode_query_len"]),
        capture_sizes: i["cudagraph_capture_sizes"].as_array().map(|_| nums(&i["cudagraph_capture_sizes"])),
        max_capture_size: opt(&i["max_cudagraph_capture_size"]),
        round_sizes: !flag(&i["use_v2_model_runner"]),
        state_blocks: flag(&kv["has_mamba_layers"]).then(|| num(&kv["num_blocks"])),
        max_num_reqs: opt(&i["max_num_reqs"]),
        is_profiling: flag(&i["is_profiling"]),
    };
    let ours = resolve(&request);
    let r = match (&ours, e["error"].is_null()) {
        (Ok(r), true) => r,
        (Err(ours), false) => {
            let theirs = text(&e["error"]["message"]);
            let both = |part: &str| ours.to_string().contains(part) == theirs.contains(part);
            let named = !theirs.contains("Backend") || ours.to_string().contains(backend);
            return same("error", named && both("is not supported with") && both("rounding"), true);
        }
        _ => return same_failure(&ours, &e["error"]),
    };
    let warnings = e["warnings"].as_array().cloned().unwrap_or_default();
    let mut outcomes = vec![
        same("mode", r.mode.name(), text(&e["mode"])),
        same("stored mode", r.mode.name(), text(&e["stored_mode_after"])),
        same("warnings", r.lowerings.len(), warnings.len()),
        same("max size", r.max_capture_size, opt(&e["max_cudagraph_capture_size_after"])),
        same(
            "sizes",
            r.capture_sizes.clone(),
            e["cudagraph_capture_sizes_after"].as_array().map(|_| nums(&e["cudagraph_capture_sizes_after"])),
        ),
    ];
    for (l, w) in r.lowerings.iter().zip(&warnings) {
        let w = text(w);
        let to = w.split("setting cudagraph_mode=").nth(1).or_else(|| w.split("Overriding to ").nth(1));
        let to = to.unwrap_or("").split([' ', '.']).next().unwrap_or("");
        let from = w.split("CUDAGraphMode.").nth(1).or_else(|| w.split("Cudagraph mode ").nth(1));
        let from = from.unwrap_or("").split(' ').next().unwrap_or("");
        outcomes.push(same("lowered from", l.from.name(), from));
        outcomes.push(same("lowered to", l.to.name(), to));
        for part in ["is not supported with", "requires piecewise capture"] {
            outcomes.push(same(part, l.because.contains(part), w.contains(part)));
        }
        outcomes.push(same("names the backend", !w.contains("Backend") || l.because.contains(backend), true));
        outcomes.push(same("names the option", l.because.contains("--graph-mode"), true));
    }
    all(outcomes)
}

fn shape(v: &Value) -> Option<GraphShape> {
    Some(GraphShape {
        mode: mode_of(&v["mode"])?,
        num_tokens: num(&v["num_tokens"]),
        num_reqs: opt(&v["num_reqs"]),
        uniform_token_count: opt(&v["uniform_token_count"]),
        max_query_len: opt(&v["max_query_len"]),
        num_active_loras: num(&v["num_active_loras"]),
        num_micro_batches: num(&v["num_ubatches"]),
    })
}

pub fn dispatch(_: &str, i: &Value, e: &Value, _: &Table) -> Outcome {
    let Some(mode) = mode_of(&i["mode"]) else { return Outcome::NotUnderstood(i["mode"].to_string()) };
    let micro = &i["ubatching"];
    let mut lens: Vec<usize> =
        i["dynamic_spec_schedule"].as_array().map_or(vec![], |s| s.iter().map(|r| num(&r[2]) + 1).collect());
    lens.sort_unstable();
    lens.dedup();
    let plan = GraphPlan::new(&CaptureOptions {
        mode,
        capture_sizes: nums(&i["capture_sizes"]),
        max_capture_size: num(&i["max_capture_size"]),
        max_num_reqs: num(&i["max_num_reqs"]),
        decode_query_len: num(&i["decode_query_len"]),
        lora_cases: nums(&i["lora_capture_cases"]),
        varlen_decode: flag(&i["varlen_decode"]),
        decode_query_lens: lens,
        micro_batching: (!micro.is_null()).then(|| MicroBatching {
            num_micro_batches: num(&micro["num_ubatches"]),
            decode_token_threshold: num(&micro["decode_token_threshold"]),
            prefill_token_threshold: num(&micro["prefill_token_threshold"]),
        }),
        limit_mixed_to_decode_tokens: flag(&i["limit_mixed_to_decode_tokens"]),
    });
    let captured: Option<Vec<_>> =
        e["captured"].as_array().map_or(Some(vec![]), |c| c.iter().map(shape).collect());
    let mut outcomes = vec![
        same("needs capture", !plan.shapes().is_empty(), flag(&e["needs_capture"])),
        same("captured", Some(plan.shapes().to_vec()), captured),
    ];
    let empty = vec![];
    let theirs = e["dispatched"].as_array().unwrap_or(&empty);
    for (q, d) in i["queries"].as_array().unwrap_or(&empty).iter().zip(theirs) {
        let batch = Batch {
            num_reqs: num(&q["num_reqs"]),
            num_tokens: num(&q["num_tokens"]),
            uniform_token_count: opt(&q["uniform_token_count"]),
            num_active_loras: num(&q["num_active_loras"]),
            max_query_len: opt(&q["max_query_len"]),
            num_micro_batches: num(&q["num_ubatches"]),
        };
        let ours = if flag(&i["graphs_captured"]) { plan.dispatch(&batch) } else { plan.eager(&batch) };
        let theirs = shape(d);
        let better = ours.mode == GraphMode::Full
            && plan.shapes().contains(&ours)
            && theirs.is_some_and(|t| t.mode != GraphMode::Full);
        outcomes.push(if better {
            Outcome::Deliberate(Why::FullGraphFits)
        } else {
            same(&format!("dispatch of {batch:?}"), Some(ours), theirs)
        });
    }
    all(outcomes)
}
