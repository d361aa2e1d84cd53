//! Two answers side by side.

use super::{super::CliError, ExplainArgs, text};
use comfy_table::{ContentArrangement, Table, presets};
use headway_attention::{Registry, process::registry::nearest};
use headway_engine::{
    explain::{Outcome, Target},
    runner::StartupReport,
};
use std::io::Write;

/// Options that a set can name.
const OPTIONS: [&str; 20] = [
    "device",
    "engine",
    "dtype",
    "kv-cache-dtype",
    "block-size",
    "kv-layout",
    "attention-backend",
    "backend-per-kind",
    "graph-mode",
    "compilation",
    "batch-invariant",
    "kv-connector",
    "speculative-tokens",
    "tp",
    "dcp",
    "pcp",
    "max-model-len",
    "max-num-seqs",
    "memory",
    "kv-cache-memory",
];

/// The two sets that `A,B` names, on top of the other options.
pub fn sets(args: &ExplainArgs, pair: &str, _: &Registry) -> Result<Vec<(String, ExplainArgs)>, CliError> {
    let wrong = |why: String| CliError::Usage(format!("--compare {pair}: {why}"));
    let Some((a, b)) = pair.split_once(',').filter(|(_, b)| !b.contains(',')) else {
        return Err(wrong(
            "write two devices or option sets with a comma between them, as in h100,b200".into(),
        ));
    };
    [a, b]
        .into_iter()
        .map(|set| Ok((set.trim().to_owned(), one(args, set.trim()).map_err(&wrong)?)))
        .collect()
}

fn one(base: &ExplainArgs, set: &str) -> Result<ExplainArgs, String> {
    let mut args = base.clone();
    if !set.contains('=') {
        Target::parse(set).map_err(|e| e.to_string())?;
        if let Some(d) = &args.engine.device {
            return Err(format!("{set} is a device and contradicts --device {d}; leave --device out"));
        }
        args.engine.device = Some(set.to_owned());
        return Ok(args);
    }
    for pair in set.split('+') {
        let (name, value) = pair.split_once('=').ok_or_else(|| format!("{pair} is not OPTION=VALUE"))?;
        apply(&mut args, name.trim().trim_start_matches("--"), value.trim())?;
    }
    Ok(args)
}

fn apply(a: &mut ExplainArgs, name: &str, value: &str) -> Result<(), String> {
    let text = || Some(value.to_owned());
    let number =
        || value.parse::<usize>().map(Some).map_err(|_| format!("{name}={value} is not a whole number"));
    let bytes = || super::super::parse::size(value).map(Some).map_err(|e| format!("{name}={value}: {e}"));
    let flag = || match value {
        "on" | "true" | "1" => Ok(true),
        "off" | "false" | "0" => Ok(false),
        _ => Err(format!("{name}={value} is neither on nor off")),
    };
    let e = &mut a.engine;
    match name {
        "device" => e.device = text(),
        "engine" => a.of = value.to_owned(),
        "dtype" => e.dtype = value.parse()?,
        "kv-cache-dtype" => e.kv_cache_dtype = text(),
        "block-size" => e.block_size = number()?,
        "kv-layout" => e.kv_layout = text(),
        "attention-backend" => e.attention_backend = text(),
        "backend-per-kind" => e.backend_per_kind = text(),
        "graph-mode" => e.graph_mode = text(),
        "compilation" => a.compilation = Some(flag()?),
        "batch-invariant" => e.batch_invariant = flag()?,
        "kv-connector" => a.kv_connector = flag()?,
        "speculative-tokens" => e.speculative_tokens = number()?,
        "tp" => e.tp = number()?,
        "dcp" => e.dcp = number()?,
        "pcp" => a.pcp = number()?,
        "max-model-len" => e.max_model_len = number()?,
        "max-num-seqs" => e.max_num_seqs = number()?,
        "memory" => a.memory = bytes()?,
        "kv-cache-memory" => e.kv_cache_memory = bytes()?,
        other => {
            let near = nearest(other, OPTIONS.into_iter())
                .map(|n| format!(" (did you mean {n}?)"))
                .unwrap_or_default();
            return Err(format!("no option is named {other}; there are: {}{near}", OPTIONS.join(", ")));
        }
    }
    Ok(())
}

/// Prints both.
pub fn print(both: &[(String, Outcome)], json: bool) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    if json {
        let all: Vec<_> =
            both.iter().map(|(set, o)| serde_json::json!({"set": set, "startup": o.report})).collect();
        writeln!(out, "{}", serde_json::json!({ "compare": all }))?;
        return Ok(());
    }
    let mut table = Table::new();
    table.load_preset(presets::UTF8_FULL_CONDENSED).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(["".to_owned()].into_iter().chain(both.iter().map(|(set, _)| set.clone())));
    for (name, cell) in ROWS {
        let cells: Vec<String> = both.iter().map(|(_, o)| cell(&o.report)).collect();
        if cells.iter().any(|c| !c.is_empty()) {
            table.add_row([(*name).to_owned()].into_iter().chain(cells));
        }
    }
    writeln!(out, "{}", table.trim_fmt())?;
    Ok(())
}

type Cell = fn(&StartupReport) -> String;

const ROWS: &[(&str, Cell)] = &[
    ("device", |r| format!("{} on {}", r.engine, r.device)),
    ("backends", |r| per_kind(r, |g| g.backend.clone().unwrap_or_else(|| "none".into()))),
    ("refused", |r| {
        per_kind(r, |g| {
            g.refused.iter().map(|x| format!("\n  {}: {}", x.backend, x.reasons.join("; "))).collect()
        })
    }),
    ("blocks", |r| {
        per_kind(r, |g| {
            format!("{} tokens, kernel {}, {} bytes", g.block_size, g.kernel_block_size, g.page_size_bytes)
        })
    }),
    ("full graphs", |r| per_kind(r, |g| g.graph_support.clone())),
    ("decodes first", |r| {
        per_kind(r, |g| g.reorder_batch_threshold.map_or("no".into(), |n| format!("up to {n} tokens")))
    }),
    ("layout", |r| r.kv_cache_layout.clone()),
    ("graph mode", |r| r.graph_mode.in_force.clone()),
    ("lowered", |r| {
        r.graph_mode.lowerings.iter().map(|l| format!("{} → {}", l.from, l.to)).collect::<Vec<_>>().join("\n")
    }),
    ("bytes a token", |r| r.memory.kv_bytes_per_token.to_string()),
    ("state a request", |r| match r.memory.state_bytes_per_request {
        0 => String::new(),
        n => n.to_string(),
    }),
    ("tokens that fit", |r| r.memory.kv_cache_tokens.to_string()),
    ("full requests", |r| format!("{:.2}", r.memory.full_length_requests)),
    ("fails", |r| r.error.clone().unwrap_or_default()),
    ("change", |r| r.suggestions.iter().map(text::suggestion).collect::<Vec<_>>().join("\n")),
];

/// A line for each kind of layer.
fn per_kind(
    r: &StartupReport,
    of: impl Fn(&headway_engine::runner::report::GroupReport) -> String,
) -> String {
    let mut lines: Vec<String> = vec![];
    for g in &r.groups {
        let line = format!("{}: {}", g.kind, of(g));
        if !lines.contains(&line) && !line.ends_with(": ") {
            lines.push(line);
        }
    }
    lines.join("\n")
}
