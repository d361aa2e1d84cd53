//! Opening an engine for a command: find the model, show progress, print what was decided.

use super::{CliError, args::EngineArgs};
use headway_attention::Registry;
use headway_engine::{
    EngineOptions, LlmEngine,
    engine::{ENCODER_INPUT, Finished, OpenProgress},
    runner::{StartupError, StartupReport},
    sources::{self, FetchOptions, ModelSpec, TerminalProgress},
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::path::{Path, PathBuf};

/// Finds the model and opens it.
pub fn open(args: &EngineArgs, registry: Registry) -> Result<LlmEngine, CliError> {
    let engine =
        open_with(args, registry, |path, options, progress| LlmEngine::open(path, options, progress))?;
    let plan = engine.runner().model();
    if plan.encoder.is_some() {
        let what = format!(
            "{} ({}) has an encoder: {ENCODER_INPUT} (headway_engine::Engine::add); choose a model that is a decoder alone",
            args.model, plan.architecture
        );
        return Err(CliError::Usage(what));
    }
    warnings(engine.report());
    Ok(engine)
}

/// Start-up's warnings, a line each.
pub fn warnings(r: &StartupReport) {
    for warning in &r.warnings {
        note!("headway: warning: {warning}");
    }
}

/// Finds the model and has `open` open it, with a bar of its layers, and then of the graphs that are captured.
pub fn open_with<E>(
    args: &EngineArgs,
    registry: Registry,
    open: impl FnOnce(&Path, &EngineOptions, OpenProgress<'_>) -> Result<E, StartupError>,
) -> Result<E, CliError> {
    let options = args.options(registry)?;
    let path = find(&args.model)?;
    let bar = layer_bar();
    let engine = open(&path, &options, &mut |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    Ok(engine?)
}

/// Where a model lies, by whatever it is named; fetched where it has to be.
pub fn find(model: &str) -> Result<PathBuf, CliError> {
    match ModelSpec::parse(model)? {
        // A path needs no cache, and so none of the environment's folders.
        ModelSpec::Path(path) => {
            FetchOptions::check_env()?;
            Ok(path)
        }
        spec => Ok(sources::resolve(&spec, &FetchOptions::from_env()?, &TerminalProgress::new())?.path),
    }
}

/// Hidden where standard error is not a terminal.
fn layer_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("opening {bar:30} {pos}/{len}");
    ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr())
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// What was decided at start-up, for people.
pub fn print_report(r: &StartupReport) {
    let mib = |b: u64| format!("{:.1} MiB", b as f64 / (1 << 20) as f64);
    note!("model      {}", r.model);
    note!("files      {}", r.files);
    note!("device     {}", r.device);
    for g in &r.groups {
        let block = match g.kernel_block_size == g.block_size {
            true => format!("blocks of {}", g.block_size),
            false => format!("blocks of {}, kernel blocks of {}", g.block_size, g.kernel_block_size),
        };
        let backend = g.backend.as_deref().unwrap_or("no backend");
        note!("attention  layers {}: {} on {backend}, {block}", runs(&g.layers), g.kind);
        if let Some(figures) = &g.measured {
            note!("           {figures}");
        }
        for refused in &g.refused {
            note!("           not {}: {}", refused.backend, refused.reasons.join("; "));
        }
    }
    note!(
        "KV cache   {} in {} blocks, layout {}, {} bytes a token",
        mib(r.memory.kv_cache_bytes),
        r.memory.kv_cache_blocks,
        r.kv_cache_layout,
        r.memory.kv_bytes_per_token
    );
    note!(
        "memory     weights {} ({} packed in {:.2} s), activations {}, metadata and workspaces {}",
        mib(r.memory.weights_bytes),
        mib(r.memory.packed_weights_bytes),
        r.packing_seconds,
        mib(r.memory.activations_bytes),
        mib(r.memory.metadata_bytes)
    );
    match &r.graph_mode.captured {
        None => note!("graphs     {}", r.graph_mode.in_force),
        Some(c) => {
            let of = |sizes: &[usize], what: &str, nodes| match (sizes.first(), sizes.last()) {
                (Some(first), Some(last)) => {
                    format!(
                        "{} {what} of {first} to {last} tokens ({nodes} nodes in the largest), ",
                        sizes.len()
                    )
                }
                _ => String::new(),
            };
            note!(
                "graphs     {}: {}{}captured in {:.2} s, {}",
                r.graph_mode.in_force,
                of(&c.sizes, "whole steps", c.nodes),
                of(&c.piecewise_sizes, "in pieces", c.piecewise_nodes),
                c.seconds,
                mib(c.bytes)
            );
        }
    }
    for (name, o) in &r.options {
        if let Some(because) = o.because.as_ref().filter(|b| *b != "the default") {
            let asked = o.requested.as_deref().unwrap_or("not asked");
            note!("option     {name}: {} ({asked}): {because}", o.in_force);
        }
    }
}

/// What came of a request's drafts, where any were made.
pub fn print_speculation(engine: &LlmEngine, f: &Finished) {
    if engine.drafts() {
        note!("speculation: {}", f.speculation.summary());
    }
}

/// `0-4, 6-10`.
pub(super) fn runs(layers: &[u32]) -> String {
    let mut out: Vec<(u32, u32)> = vec![];
    for &l in layers {
        match out.last_mut() {
            Some((_, last)) if *last + 1 == l => *last = l,
            _ => out.push((l, l)),
        }
    }
    let text = |(a, b): (u32, u32)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    out.into_iter().map(text).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    #[test]
    fn layers_in_runs() {
        assert_eq!(super::runs(&[0, 1, 2, 4, 6, 7]), "0-2, 4, 6-7");
        assert_eq!(super::runs(&[]), "");
    }
}
