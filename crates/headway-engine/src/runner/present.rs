//! Fills the `StartupReport`.

use super::{
    StartupReport,
    block_size::BlockSizes,
    capacity,
    devices::OpenDevice,
    facts::Facts,
    fast_prefill::SharingLayers,
    micro_batches::builder_bytes,
    needs,
    report::{
        CodedOutputReport, GraphModeReport, GroupReport, LoweringReport, PartsReport, RefusedReport,
        SharedCacheReport,
    },
    startup::Decided,
};
use crate::{
    loading::ModelFiles,
    models::{Decoder, ModelPlan, needs::LayerNeeds, unused},
    options::{DTypeOption, EngineOptions, LoadFormat},
    speculation::LookupSizes,
    tuning::Tuned,
};
use headway_attention::{
    AttentionGroup, AttentionGroupPlan, AttnLayer, KvCacheSpec,
    group::{
        graph::{GraphResolution, Lowering, MicroBatching},
        kv::page::RequestLimits,
    },
    process::select::Refused,
};

/// What is known before weights are loaded.
pub(super) fn report(
    facts: &Facts,
    files: &ModelFiles,
    options: &EngineOptions,
    device: &OpenDevice,
    decided: &Decided,
) -> StartupReport {
    let Decided { plan, selections, cache, limits, .. } = decided;
    let layers = LayerNeeds::of_plan(plan);
    let mut r = StartupReport {
        model: described(plan),
        files: facts.files.clone(),
        engine: "headway".into(),
        device: device.description.clone(),
        groups: cache
            .attention_groups
            .iter()
            .map(|g| GroupReport {
                measured: decided.measured[first_layer(g)].clone(),
                ..group(g, &selections[first_layer(g)].refused, &layers)
            })
            .collect(),
        kv_cache_layout: cache.layout.to_string(),
        ..StartupReport::default()
    };
    r.warnings = selections.iter().flat_map(|s| s.warnings.iter().cloned()).collect();
    r.warnings.extend(cache.warnings.iter().chain(&facts.warnings).cloned());
    r.warnings.dedup();
    graph_mode(&mut r, options.graph_mode.clone(), &decided.graph);
    if options.load_format == LoadFormat::Dummy {
        r.warnings.push("--load-format dummy: the weights are random; the answers mean nothing".into());
    }
    r.memory.weights_bytes = facts.weights_bytes;
    let request = RequestLimits {
        max_model_len: limits.max_model_len,
        max_in_flight_tokens: limits.max_num_tokens,
        max_encoder_tokens: plan.encoder.as_ref().map_or(0, |e| e.max_tokens),
        dcp_size: 1,
    };
    // Without context parallelism no cache refuses these limits.
    if let Err(e) = capacity::fill(&mut r.memory, cache, cache.num_blocks, &request) {
        r.unknowns.push(e.to_string());
    }
    options_in_force(&mut r, options, device, files, decided);
    r
}

/// Architecture, layers, and experts where there are any.
fn described(plan: &ModelPlan) -> String {
    let mut text = format!("{}, {} layers", plan.architecture, plan.num_layers());
    if let Some(l) = plan.expert_limits() {
        let count = plan.experts().count();
        text += &format!(", {} of {} experts a token in {count} of them", l.top_k, l.experts);
    }
    text
}

fn first_layer(g: &AttentionGroupPlan) -> usize {
    g.info.layers.first().map_or(0, |l| l.0 as usize)
}

/// A group as the rule book describes it; [`finish`] has what its builder says.
pub(crate) fn group(g: &AttentionGroupPlan, refused: &[Refused], layers: &[LayerNeeds]) -> GroupReport {
    let shared = |l: &AttnLayer| {
        let layer = layers.get(l.0 as usize)?;
        let of = layers.get(layer.shares_cache_of?)?;
        Some(SharedCacheReport { layer: layer.layer as u32, of: of.layer as u32 })
    };
    GroupReport {
        fast_prefill: g.info.fast_prefill,
        shared_caches: g.info.layers.iter().filter_map(shared).collect(),
        layers: g.info.layers.iter().map(|l| l.0).collect(),
        kind: kind(&g.info.spec),
        kv_cache_group: g.kv_cache_group,
        backend: Some(g.backend.rules().name.to_string()),
        parts: g.backend.parts().map(|parts| {
            let [decodes, prefills] = parts.map(|b| b.rules().name.to_string());
            PartsReport { decodes, prefills }
        }),
        measured: None,
        refused: refused.iter().map(refusal).collect(),
        block_size: g.info.spec.block_size(),
        kernel_block_size: g.info.kernel_block_size,
        page_size_bytes: g.info.spec.page_size_bytes(),
        graph_support: g.backend.rules().graph_support.to_string(),
        reorder_batch_threshold: g.backend.rules().reorder_batch_threshold,
        workspace_bytes: 0,
        kv_cache_spec: g.info.spec.clone(),
    }
}

/// A refusal in words.
pub(crate) fn refusal(r: &Refused) -> RefusedReport {
    RefusedReport { backend: r.backend.clone(), reasons: r.reasons.iter().map(ToString::to_string).collect() }
}

/// A cache spec in words.
pub(crate) fn kind(spec: &KvCacheSpec) -> String {
    // Others say what they see already.
    let both_ways = match spec {
        KvCacheSpec::SlidingWindow { attention, .. } | KvCacheSpec::Full(attention)
            if attention.non_causal =>
        {
            ", both ways in a prompt"
        }
        _ => "",
    };
    match spec {
        KvCacheSpec::SlidingWindow { sliding_window, .. } => {
            format!("sliding window {sliding_window}{both_ways}")
        }
        KvCacheSpec::ChunkedLocal { attention_chunk_size, .. } => {
            format!("chunked local {attention_chunk_size}")
        }
        KvCacheSpec::Rswa { rswa_window, .. } => format!("R-SWA, window {rswa_window} beside the prompt"),
        KvCacheSpec::Mla(_) => "MLA".into(),
        KvCacheSpec::SlidingWindowMla { sliding_window, .. } => {
            format!("MLA, sliding window {sliding_window}")
        }
        KvCacheSpec::Mamba { .. } => "Mamba state".into(),
        KvCacheSpec::Cross(_) => "cross attention".into(),
        KvCacheSpec::EncoderOnly(_) => "encoder only".into(),
        KvCacheSpec::Sink { sink_len, .. } => format!("sink of {sink_len}"),
        _ => format!("full attention{both_ways}"),
    }
}

/// Every option: asked, in force, and why they differ.
fn options_in_force(
    r: &mut StartupReport,
    o: &EngineOptions,
    device: &OpenDevice,
    files: &ModelFiles,
    decided: &Decided,
) {
    let Decided { plan, cache, limits, kv_dtype, .. } = decided;
    let text = |v: Option<usize>| v.map(|v| v.to_string());
    let usual = device.place.usual_limits();
    r.option("device", o.device.clone(), device.ops.device(), "the default");
    let activations = format!("activations are {} on {}", decided.activations, device.ops.device());
    let (dtype, why) = match o.dtype {
        DTypeOption::Auto => {
            let largest = files.checkpoint.main_dtype().map_or("none", |t| t.name());
            (largest, format!("the type of the file's largest tensor; {activations}"))
        }
        DTypeOption::As(d) => (d.name(), activations),
    };
    let asked = (o.dtype != DTypeOption::Auto).then(|| o.dtype.to_string());
    r.option("dtype", asked, dtype, &why);
    let why = match o.kv_cache_dtype.as_deref() {
        Some("fp8") => "fp8 is e4m3",
        _ if !device.place.is_host() => "the activations' type",
        _ => "the model's type; float16 where its weights are block-quantised",
    };
    r.option("kv_cache_dtype", o.kv_cache_dtype.clone(), needs::kv_name(*kv_dtype), why);
    let why = match &o.kv_layout {
        Some(_) => "the same layout by its axes",
        None => "the first that every backend reads",
    };
    r.option("kv_layout", o.kv_layout.clone(), cache.layout, why);
    let mut names: Vec<&str> = r.groups.iter().filter_map(|g| g.backend.as_deref()).collect();
    names.sort_unstable();
    names.dedup();
    let names = names.join(", ");
    let why = match (&decided.tuned, &o.attention_backend) {
        (Some(tuned), _) => tuned.describe(),
        (None, Some(_)) => "asked of layers that --backend-per-kind doesn't name".into(),
        (None, None) => "the first that fits each layer".into(),
    };
    r.option("attention_backend", o.attention_backend.clone(), names, &why);
    let per_kind: Vec<_> = o.backend_per_kind.iter().map(|(k, b)| format!("{k}={b}")).collect();
    let asked = (!per_kind.is_empty()).then(|| per_kind.join(","));
    r.option("backend_per_kind", asked.clone(), asked.unwrap_or_else(|| "none".into()), "");
    let why = match device.place.is_host() {
        true => "the CPU has no graphs to capture",
        false => "what the backends allow of the default",
    };
    r.option("graph_mode", o.graph_mode.clone(), decided.graph.mode, why);
    let asked = o.batch_invariant.then(|| "true".to_owned());
    r.option("batch_invariant", asked, o.batch_invariant, "the default");
    micro_batches(r, o, &limits.micro_batching);
    r.option(
        "max_model_len",
        text(o.max_model_len),
        limits.max_model_len,
        &format!("the model's {}", plan.max_position_embeddings),
    );
    r.option(
        "max_num_seqs",
        text(o.max_num_seqs),
        limits.max_num_reqs,
        &format!("the default of {}, within the token budget", usual.max_num_seqs),
    );
    r.option(
        "max_num_batched_tokens",
        text(o.max_num_batched_tokens),
        limits.max_num_tokens,
        &format!("the default of {}, at least one a request", usual.max_num_batched_tokens),
    );
    r.option(
        "kv_cache_memory",
        o.kv_cache_memory.map(|b| b.to_string()),
        cache.total_bytes,
        "whole blocks of it, no more than --max-num-seqs requests of --max-model-len tokens can fill",
    );
    r.option("threads", text(o.threads), device.threads, &device.threads_because);
    r.option("tp", text(o.tensor_parallel), 1, "the default");
    r.option("dcp", text(o.decode_context_parallel), 1, "the default");
}

/// The graph mode's way from asked to in force; each step down is a warning.
pub(crate) fn graph_mode(r: &mut StartupReport, requested: Option<String>, graph: &GraphResolution) {
    let words = |l: &Lowering| format!("{}; graph mode is {} instead of {}", l.because, l.to, l.from);
    r.warnings.extend(graph.lowerings.iter().map(words));
    let lowering = |l: &Lowering| LoweringReport {
        from: l.from.to_string(),
        to: l.to.to_string(),
        because: l.because.clone(),
    };
    r.graph_mode = GraphModeReport {
        requested,
        in_force: graph.mode.to_string(),
        lowerings: graph.lowerings.iter().map(lowering).collect(),
        captured: None,
    };
}

/// How steps are cut.
pub(crate) fn micro_batches(r: &mut StartupReport, o: &EngineOptions, m: &MicroBatching) {
    let text = |v: Option<usize>| v.map(|v| v.to_string());
    let why = match m.num_micro_batches {
        1 => "of steps in micro-batches, and none is cut",
        _ => "the default; smaller steps run whole",
    };
    let (decode, prefill) = (m.decode_token_threshold, m.prefill_token_threshold);
    r.option("micro_batches", text(o.micro_batches), m.num_micro_batches, "the default");
    r.option("micro_batch_decode_tokens", text(o.micro_batch_decode_tokens), decode, why);
    r.option("micro_batch_prefill_tokens", text(o.micro_batch_prefill_tokens), prefill, why);
}

/// The block size: asked or preferred, and in force.
pub(crate) fn block_size(
    r: &mut StartupReport,
    asked: Option<usize>,
    blocks: &BlockSizes,
    tuned: Option<&Tuned>,
) {
    let why = match blocks.in_force == blocks.preferred {
        true if tuned.is_some_and(|t| t.setting().block_size.is_some()) => "measured: the quickest".into(),
        true => "what the backends prefer".into(),
        false => format!(
            "raised from {} so that a page of attention is at least as large as a request's state",
            blocks.preferred
        ),
    };
    r.option("block_size", asked.map(|b| b.to_string()), blocks.in_force, &why);
}

/// Whether prefixes are cached, and why not.
pub(super) fn prefix_caching(r: &mut StartupReport, o: &EngineOptions, unshared: Option<&str>) {
    let asked = o.no_prefix_caching.then(|| "false".to_owned());
    let in_force = !o.no_prefix_caching && unshared.is_none();
    r.option("prefix_caching", asked, in_force, unshared.unwrap_or("the default"));
}

/// How many tokens are drafted, and how.
pub(crate) fn speculation(r: &mut StartupReport, o: &EngineOptions, sizes: &LookupSizes) {
    let (k, text) = (o.speculative_tokens.unwrap_or(0), |v: Option<usize>| v.map(|v| v.to_string()));
    let why = match k {
        0 => "the default",
        _ => "drafted by prompt lookup; a decode has as many rows more as it has drafts, no row is padding",
    };
    r.option("speculative_tokens", text(o.speculative_tokens), k, why);
    let (min, max) = match k {
        0 => ("none".to_owned(), "none".to_owned()),
        _ => (sizes.min.to_string(), sizes.max.to_string()),
    };
    r.option("prompt_lookup_min", text(o.prompt_lookup_min), min, "the default");
    r.option("prompt_lookup_max", text(o.prompt_lookup_max), max, "the default");
}

/// Whether the last layers compute only the rows with logits, or could.
pub(crate) fn fast_prefill(r: &mut StartupReport, o: &EngineOptions, layers: &[LayerNeeds]) {
    let on = o.kv_sharing_fast_prefill;
    let why = match SharingLayers::of(layers) {
        Some(s) => format!("the default; {} and could compute only the rows with logits", s.describe()),
        None => "the last layer has a cache or a state of its own".into(),
    };
    r.option("kv_sharing_fast_prefill", on.then(|| "true".to_owned()), on, &why);
}

/// What is known once everything is allocated.
pub(super) fn finish(
    r: &mut StartupReport,
    groups: &[AttentionGroup],
    decoder: &Decoder,
    kv_bytes: usize,
    micro_batches: usize,
) {
    r.warnings.extend(unused::warning(decoder.unused_tensors()));
    for (layer, quant, fused) in decoder.coded_outputs() {
        let output = quant.kind().to_string();
        match r.coded_outputs.iter_mut().find(|c| (&c.output, c.fused) == (&output, fused)) {
            Some(same) => same.layers.push(layer),
            None => r.coded_outputs.push(CodedOutputReport { layers: vec![layer], output, fused }),
        }
    }
    r.memory.packed_weights_bytes = decoder.taken().bytes as u64;
    r.packing_seconds = decoder.taken().time.as_secs_f64();
    r.memory.activations_bytes = decoder.buffer_bytes() as u64;
    r.memory.kv_cache_bytes = kv_bytes as u64;
    r.memory.metadata_bytes = groups.iter().map(|g| builder_bytes(g.plan(), micro_batches).0).sum();
    for (report, g) in r.groups.iter_mut().zip(groups) {
        report.graph_support = g.plan().graph_support.to_string();
        report.reorder_batch_threshold = g.plan().reorder_batch_threshold;
        report.workspace_bytes = builder_bytes(g.plan(), micro_batches).1;
    }
}
