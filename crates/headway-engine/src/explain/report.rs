//! Fills the report.

use super::{Contenders, Query, resolve::Planned};
use crate::{
    models::{
        ModelNeeds,
        needs::{LayerNeeds, MixerNeeds, Reach},
    },
    options::DTypeOption,
    runner::{
        StartupReport,
        micro_batches::builder_bytes,
        present::{self, group, kind, refusal},
        report::GroupReport,
    },
    tuning::Tuned,
};
use headway_attention::{
    AttentionError, LayerNeed, Selection,
    process::{rules::AttnType, select::Refused},
};

/// What is known before anything is decided.
pub(super) fn begin(model: &ModelNeeds, query: &Query, contenders: &Contenders) -> StartupReport {
    let mut r = StartupReport {
        model: described(model),
        engine: contenders.engine(),
        device: query.target.describe(),
        ..StartupReport::default()
    };
    r.memory.weights_bytes = query.weights_bytes.unwrap_or(0);
    r.memory.packed_weights_bytes = query.device_weights_bytes.unwrap_or(0);
    r.graph_mode.requested = query.graph_mode.map(|m| m.to_string());
    options(&mut r, model, query);
    r
}

/// Architecture, layers, and experts where there are any.
fn described(model: &ModelNeeds) -> String {
    let text = format!("{}, {} layers", model.architecture, model.num_layers);
    match model.experts {
        Some((chosen, all)) => format!("{text}, {chosen} of {all} experts a token"),
        None => text,
    }
}

/// Every option: asked, in force, and why they differ.
fn options(r: &mut StartupReport, model: &ModelNeeds, q: &Query) {
    let (o, s) = (&q.asked.engine, &q.setting);
    let text = |v: Option<usize>| v.map(|v| v.to_string());
    r.option("device", o.device.clone(), &q.target.name, "the default of this engine");
    let asked = (o.dtype != DTypeOption::Auto).then(|| o.dtype.to_string());
    r.option("dtype", asked, s.dtype, "the config's, in a type that the device computes in");
    r.option(
        "kv_cache_dtype",
        o.kv_cache_dtype.clone(),
        &s.kv_cache_dtype,
        "the checkpoint's, else that of activations",
    );
    r.option(
        "attention_backend",
        o.attention_backend.clone(),
        "per layer, see groups",
        &q.tuned.as_ref().map_or_else(|| "the first that fits each layer".into(), Tuned::describe),
    );
    let per_kind: Vec<_> = o.backend_per_kind.iter().map(|(k, b)| format!("{k}={b}")).collect();
    let asked = (!per_kind.is_empty()).then(|| per_kind.join(","));
    r.option("backend_per_kind", asked.clone(), asked.unwrap_or_else(|| "none".into()), "");
    r.option("compilation", q.asked.compilation.map(|c| c.to_string()), q.compilation, "the default");
    r.option("batch_invariant", Some(s.batch_invariant.to_string()), s.batch_invariant, "");
    r.option("kv_connector", Some(s.kv_connector.to_string()), s.kv_connector, "");
    present::micro_batches(r, o, &q.micro_batching);
    present::fast_prefill(r, o, &model.mixers);
    match q.lookup {
        Some(sizes) => present::speculation(r, o, &sizes),
        None => {
            r.option("speculative_tokens", text(o.speculative_tokens), s.speculative_tokens, "the default")
        }
    }
    r.option("tp", text(o.tensor_parallel), s.tp, "the default");
    r.option("dcp", text(o.decode_context_parallel), s.dcp, "the default");
    r.option("pcp", text(q.asked.prefill_context_parallel), s.pcp, "the default");
    r.option("max_model_len", text(o.max_model_len), q.max_model_len, "the config's");
    r.option("max_num_seqs", text(o.max_num_seqs), q.max_num_seqs, "a default");
    r.option("max_num_batched_tokens", text(o.max_num_batched_tokens), q.max_num_batched_tokens, "a default");
    r.option("kv_cache_memory", o.kv_cache_memory.map(|b| b.to_string()), q.kv_memory, &q.kv_memory_because);
    r.option(
        "memory",
        q.asked.memory.map(|b| b.to_string()),
        q.asked.memory.or(q.target.memory).unwrap_or(0),
        "the device's",
    );
}

/// What stands once everything is planned.
///
/// # Errors
/// A cache that the limits don't go with.
pub(super) fn planned(
    r: &mut StartupReport,
    model: &ModelNeeds,
    q: &Query,
    selections: &[Selection],
    p: &Planned,
) -> Result<(), AttentionError> {
    warnings(r, selections, &p.cache.warnings);
    for (g, plan) in p.cache.attention_groups.iter().zip(&p.builders) {
        let first = g.info.layers.first().map_or(0, |l| l.0 as usize);
        let mut entry = GroupReport {
            graph_support: plan.graph_support.to_string(),
            reorder_batch_threshold: plan.reorder_batch_threshold,
            workspace_bytes: builder_bytes(plan, q.micro_batching.num_micro_batches).1,
            ..group(g, &selections[first].refused, &model.mixers)
        };
        entry.layers = layers(model, entry.layers.iter().map(|l| *l as usize));
        entry.kind = name(&model.mixers[first]).unwrap_or(entry.kind);
        let need = q.setting.need(&model.mixers[first]);
        entry.measured = q.tuned.as_ref().and_then(|t| t.because(&need, entry.backend.as_deref()?));
        r.groups.push(entry);
    }
    r.kv_cache_layout = p.cache.layout.to_string();
    let because = layout_because(selections);
    r.option("kv_layout", q.asked.engine.kv_layout.clone(), p.cache.layout, &because);
    block_size_option(r, q, p);
    let requested = r.graph_mode.requested.clone();
    present::graph_mode(r, requested, &p.graph);
    let why = if q.setting.platform == "cpu" {
        "a CPU has no graphs to capture"
    } else {
        "what the backends allow of the default"
    };
    r.option("graph_mode", q.graph_mode.map(|m| m.to_string()), p.graph.mode, why);
    let n = q.micro_batching.num_micro_batches;
    r.memory.metadata_bytes = p.builders.iter().map(|b| builder_bytes(b, n).0).sum();
    p.capacity(r, model, q)
}

fn block_size_option(r: &mut StartupReport, q: &Query, p: &Planned) {
    present::block_size(r, q.asked.engine.block_size, &p.blocks, q.tuned.as_ref());
    if p.blocks.in_force != p.blocks.preferred {
        r.unknowns.push(format!(
            "block size {} is the least multiple of what the kernels take that makes an attention page as large as a \
             state; an engine may round it further up",
            p.blocks.in_force
        ));
    }
}

/// Backends are there, but the cache can't be planned.
pub(super) fn unplanned(r: &mut StartupReport, model: &ModelNeeds, q: &Query, selections: &[Selection]) {
    warnings(r, selections, &[]);
    let named = |s: &Selection| (Some(s.backend.rules().name.to_string()), s.refused.clone());
    by_need(r, model, q, |i| named(&selections[i]));
}

/// Some layer gets no backend.
pub(super) fn no_backend(
    r: &mut StartupReport,
    model: &ModelNeeds,
    q: &Query,
    needs: &[LayerNeed],
    picked: &[Result<Selection, String>],
    contenders: &Contenders,
) {
    by_need(r, model, q, |i| match &picked[i] {
        Ok(s) => (Some(s.backend.rules().name.to_string()), s.refused.clone()),
        Err(_) => (None, contenders.refused(&needs[i], &q.request)),
    });
}

/// Layers by kind and backend, where there is no plan of the cache: a group for each, with blocks as asked.
fn by_need(
    r: &mut StartupReport,
    model: &ModelNeeds,
    q: &Query,
    answer: impl Fn(usize) -> (Option<String>, Vec<Refused>),
) {
    let block = q.setting.block_size.unwrap_or(crate::runner::block_size::DEFAULT_BLOCK_SIZE);
    let mut seen: Vec<(&MixerNeeds, Vec<usize>)> = vec![];
    for (i, l) in model.mixers.iter().enumerate() {
        match seen.iter_mut().find(|(m, _)| **m == l.mixer) {
            Some((_, same)) => same.push(i),
            None => seen.push((&l.mixer, vec![i])),
        }
    }
    for (_, same) in seen {
        let first = &model.mixers[same[0]];
        let spec = q.setting.cache_spec(first, block, q.max_model_len);
        let (backend, refused) = answer(same[0]);
        r.groups.push(GroupReport {
            layers: layers(model, same.iter().copied()),
            kind: name(first).unwrap_or_else(|| kind(&spec)),
            shared_caches: vec![],
            fast_prefill: false,
            kv_cache_group: 0,
            backend,
            parts: None,
            measured: None,
            refused: refused.iter().map(refusal).collect(),
            block_size: spec.block_size(),
            kernel_block_size: 0,
            page_size_bytes: spec.page_size_bytes(),
            graph_support: String::new(),
            reorder_batch_threshold: None,
            workspace_bytes: 0,
            kv_cache_spec: spec,
        });
    }
}

/// Model layers of mixers, each once.
fn layers(model: &ModelNeeds, mixers: impl Iterator<Item = usize>) -> Vec<u32> {
    let mut all: Vec<u32> = mixers.map(|i| model.mixers[i].layer as u32).collect();
    all.dedup();
    all
}

/// A kind that the cache's spec doesn't name by itself.
fn name(l: &LayerNeeds) -> Option<String> {
    match &l.mixer {
        MixerNeeds::State(d) => Some(d.name().into()),
        MixerNeeds::Mla(m) if m.index_topk.is_some() => Some("MLA, sparse".into()),
        MixerNeeds::Attention(a) => match (a.attn_type, a.reach) {
            (AttnType::Encoder, _) => Some("encoder".into()),
            (AttnType::EncoderOnly, _) => Some("encoder only".into()),
            (_, Reach::Window(w)) => Some(format!("sliding window {w}")),
            _ => None,
        },
        MixerNeeds::Mla(_) => None,
    }
}

fn warnings(r: &mut StartupReport, selections: &[Selection], others: &[String]) {
    for w in selections.iter().flat_map(|s| &s.warnings).chain(others) {
        if !r.warnings.contains(w) {
            r.warnings.push(w.clone());
        }
    }
}

/// Which backends decide the layout.
fn layout_because(selections: &[Selection]) -> String {
    let mut lists: Vec<String> = vec![];
    for s in selections {
        let rules = s.backend.rules();
        let layouts: Vec<_> = rules.kv_cache_layouts.iter().map(|l| l.name()).collect();
        let text = format!("{} reads {}", rules.name, layouts.join(", "));
        if !layouts.is_empty() && !lists.contains(&text) {
            lists.push(text);
        }
    }
    match lists.is_empty() {
        true => "every backend reads any; this is the first".into(),
        false => format!("the first that every backend reads: {}", lists.join("; ")),
    }
}
