//! The report for people.

use headway_attention::{KvCacheSpec, group::kv::spec::KvQuantMode};
use headway_engine::{
    runner::{
        StartupReport,
        report::{GroupReport, SuggestionReport},
    },
    tuning,
};
use std::{
    collections::BTreeMap,
    io::{Result, Write},
};

/// Prints a report.
pub fn print(out: &mut dyn Write, r: &StartupReport) -> Result<()> {
    writeln!(out, "model      {}", r.model)?;
    writeln!(out, "engine     {} on {}", r.engine, r.device)?;
    writeln!(out, "options    {}", asked(r))?;
    if let Some(why) = r.options.get("attention_backend").filter(|o| tuning::is_asked(o.requested.as_deref()))
    {
        writeln!(out, "tuned      {}", why.because.as_deref().unwrap_or_default())?;
    }
    for (groups, first) in alike(&r.groups) {
        writeln!(out)?;
        group(out, &groups, first)?;
    }
    writeln!(out)?;
    if !r.kv_cache_layout.is_empty() {
        let why = because(r, "kv_layout");
        writeln!(out, "layout     {}{why}", r.kv_cache_layout)?;
        graphs(out, r)?;
        memory(out, r)?;
    }
    lines(out, "warning", r.warnings.iter().map(String::as_str))?;
    let changes: Vec<String> = r.suggestions.iter().map(suggestion).collect();
    lines(out, "change", changes.iter().map(String::as_str))?;
    lines(out, "unknown", r.unknowns.iter().map(String::as_str))
}

/// A heading before the first line and blanks before the others.
fn lines<'a>(out: &mut dyn Write, heading: &str, all: impl Iterator<Item = &'a str>) -> Result<()> {
    for (i, text) in all.enumerate() {
        writeln!(out, "{:<10} {text}", if i == 0 { heading } else { "" })?;
    }
    Ok(())
}

/// A suggestion as a sentence.
pub fn suggestion(s: &SuggestionReport) -> String {
    s.gain.clone()
}

/// The options that were asked for, and those whose value says something.
fn asked(r: &StartupReport) -> String {
    let show = |name: &str| r.options.get(name).map(|o| o.in_force.clone()).unwrap_or_default();
    let mut all = vec![format!("dtype {}", show("dtype")), format!("KV cache {}", show("kv_cache_dtype"))];
    for (name, o) in &r.options {
        let silent =
            ["device", "dtype", "kv_cache_dtype", "kv_layout", "graph_mode", "kv_cache_memory", "memory"];
        let off = matches!(o.requested.as_deref(), None | Some("false"));
        if !silent.contains(name) && !off {
            all.push(format!("{} {}", name.replace('_', "-"), o.requested.as_deref().unwrap_or_default()));
        }
    }
    all.join(", ")
}

/// Groups that differ in their layers alone, together.
fn alike(groups: &[GroupReport]) -> Vec<(Vec<&GroupReport>, &GroupReport)> {
    let same = |a: &GroupReport, b: &GroupReport| {
        (&a.kind, &a.backend, &a.measured, &a.refused, &a.kv_cache_spec, a.fast_prefill)
            == (&b.kind, &b.backend, &b.measured, &b.refused, &b.kv_cache_spec, b.fast_prefill)
            && a.kernel_block_size == b.kernel_block_size
    };
    let mut out: Vec<(Vec<&GroupReport>, &GroupReport)> = vec![];
    for g in groups {
        match out.iter_mut().find(|(_, first)| same(first, g)) {
            Some((all, _)) => all.push(g),
            None => out.push((vec![g], g)),
        }
    }
    out
}

fn group(out: &mut dyn Write, groups: &[&GroupReport], g: &GroupReport) -> Result<()> {
    let mut layers: Vec<u32> = groups.iter().flat_map(|g| g.layers.iter().copied()).collect();
    layers.sort_unstable();
    layers.dedup();
    let backend = g.backend.as_deref().unwrap_or("no valid backend");
    writeln!(out, "layers {}: {}", runs(&layers), g.kind)?;
    writeln!(out, "  backend  {backend}")?;
    if let Some(parts) = &g.parts {
        writeln!(out, "  parts    decodes on {}, prefills on {}", parts.decodes, parts.prefills)?;
    }
    if let Some(figures) = &g.measured {
        writeln!(out, "  because  {figures}")?;
    }
    for r in &g.refused {
        writeln!(out, "  refused  {}: {}", r.backend, r.reasons.join("; "))?;
    }
    writeln!(out, "  cache    {}", cache(&g.kv_cache_spec))?;
    for (of, readers) in shared(groups) {
        writeln!(out, "  shared   layers {} read layer {of}'s", runs(&readers))?;
    }
    if g.fast_prefill {
        writeln!(out, "  rows     those with logits alone, of a prompt its last")?;
    }
    if g.kernel_block_size == 0 {
        return Ok(());
    }
    let kernel = match g.kernel_block_size == g.block_size {
        true => String::new(),
        false => format!(", cut into kernel blocks of {}", g.kernel_block_size),
    };
    let cache_groups: Vec<u32> = groups.iter().map(|g| g.kv_cache_group as u32).collect();
    writeln!(
        out,
        "  blocks   {} tokens{kernel}; {} bytes a page, KV cache group {}",
        g.block_size,
        g.page_size_bytes,
        runs(&cache_groups)
    )?;
    let order = match g.reorder_batch_threshold {
        Some(n) => format!("requests with up to {n} new tokens come first, as decodes"),
        None => "no order of the batch".into(),
    };
    writeln!(out, "  builder  full graphs: {}; {order}", g.graph_support)?;
    match g.workspace_bytes {
        0 => Ok(()),
        bytes => writeln!(out, "  scratch  {} for all layers of the group", gib(bytes)),
    }
}

/// Layers whose cache others read, with those others.
fn shared(groups: &[&GroupReport]) -> BTreeMap<u32, Vec<u32>> {
    let mut all: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for s in groups.iter().flat_map(|g| &g.shared_caches) {
        all.entry(s.of).or_default().push(s.layer);
    }
    all
}

/// What a layer's cache holds, in words.
fn cache(spec: &KvCacheSpec) -> String {
    match spec {
        KvCacheSpec::EncoderOnly(_) => "none".into(),
        KvCacheSpec::Mamba(m) => {
            let tensors = m.shapes.iter().zip(&m.dtypes);
            let each: Vec<_> = tensors
                .map(|(s, d)| {
                    format!("{} {d}", s.iter().map(ToString::to_string).collect::<Vec<_>>().join("×"))
                })
                .collect();
            format!("{} ({} bytes a request)", each.join(", "), m.state_bytes())
        }
        other => {
            let Some(a) = other.attention() else { return String::new() };
            let quant = if a.quant == KvQuantMode::None { String::new() } else { format!(", {:?}", a.quant) };
            let bytes = a.num_heads() * a.state_content_size_bytes();
            match (other, a.head_size_v) {
                (KvCacheSpec::Mla(_), _) => {
                    format!("a latent row of {} {}{quant} ({bytes} bytes a token)", a.head_size, a.dtype)
                }
                (_, v) if v == a.head_size => {
                    format!(
                        "{} KV heads of {} {}{quant} ({bytes} bytes a token)",
                        a.num_kv_heads, a.head_size, a.dtype
                    )
                }
                (_, v) => format!(
                    "{} KV heads, keys of {} and values of {v} {}{quant} ({bytes} bytes a token)",
                    a.num_kv_heads, a.head_size, a.dtype
                ),
            }
        }
    }
}

fn graphs(out: &mut dyn Write, r: &StartupReport) -> Result<()> {
    let g = &r.graph_mode;
    let from = g.lowerings.first().map_or(&g.in_force, |l| &l.from);
    let asked = if g.requested.is_some() { "asked" } else { "the default" };
    match g.lowerings.is_empty() {
        true => writeln!(out, "graphs     {} ({asked}) stays", g.in_force)?,
        false => writeln!(out, "graphs     {from} ({asked}) becomes {}", g.in_force)?,
    }
    for l in &g.lowerings {
        writeln!(out, "           {} → {}: {}", l.from, l.to, l.because)?;
    }
    Ok(())
}

fn memory(out: &mut dyn Write, r: &StartupReport) -> Result<()> {
    let m = &r.memory;
    let mut each = format!("{} bytes a token", m.kv_bytes_per_token);
    if m.state_bytes_per_request > 0 {
        each += &format!(", {} bytes of state a request", m.state_bytes_per_request);
    }
    if (m.kv_bytes_per_token, m.state_bytes_per_request) == (0, 0) {
        return writeln!(out, "memory     no layer keeps a cache");
    }
    writeln!(out, "memory     {each}")?;
    let length = r.options.get("max_model_len").map(|o| o.in_force.as_str()).unwrap_or_default();
    let of = r.options.get("kv_cache_memory").and_then(|o| o.because.clone());
    let why = of.map(|w| format!(" ({w})")).unwrap_or_default();
    if m.kv_cache_bytes == 0 && r.options.get("kv_cache_memory").is_some_and(|o| o.in_force == "0") {
        return writeln!(out, "          {}", why.replace(['(', ')'], ""));
    }
    if m.kv_cache_blocks < 2 {
        return writeln!(out, "           the KV cache has {}{why}: nothing fits", gib(m.kv_cache_bytes));
    }
    writeln!(
        out,
        "           {}{why}: {} blocks, {} tokens, {:.2} requests of {length} tokens",
        gib(m.kv_cache_bytes),
        m.kv_cache_blocks,
        m.kv_cache_tokens,
        m.full_length_requests
    )?;
    if m.full_length_requests < 1.0 {
        writeln!(out, "           the longest request that fits has {} tokens", m.max_request_tokens)?;
    }
    Ok(())
}

fn gib(bytes: u64) -> String {
    match bytes >= 1 << 30 {
        true => format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64),
        false => format!("{:.1} MiB", bytes as f64 / (1u64 << 20) as f64),
    }
}

fn because(r: &StartupReport, option: &str) -> String {
    let why = r.options.get(option).and_then(|o| o.because.clone());
    why.map(|w| format!(": {w}")).unwrap_or_default()
}

/// `0–4, 6–10`.
pub fn runs(layers: &[u32]) -> String {
    super::super::session::runs(layers).replace('-', "–")
}
