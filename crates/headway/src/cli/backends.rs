//! `headway backends`: the rule books of this build.

use super::{CliError, args::BackendsArgs};
use comfy_table::{ContentArrangement, Table, presets};
use headway_attention::{Registry, RuleBook, process::rules::KernelBlockSize};
use headway_cpu::Isa;
use std::{io::Write, process::ExitCode};

/// Runs the command.
pub fn run(args: &BackendsArgs, registry: &Registry) -> Result<ExitCode, CliError> {
    let mut out = std::io::stdout().lock();
    if args.json {
        for b in registry.iter() {
            writeln!(out, "{}", serde_json::json!(b.rules()))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header([
        "NAME",
        "KIND",
        "DEVICE",
        "DTYPES",
        "KV CACHE",
        "HEAD SIZES",
        "KERNEL BLOCKS",
        "LAYOUTS",
        "GRAPHS",
    ]);
    for b in registry.iter() {
        let r = b.rules();
        table.add_row([
            r.name.to_string(),
            r.kind.name().to_owned(),
            r.platform.to_string(),
            join(r.dtypes.iter()),
            join(r.kv_cache_dtypes.iter()),
            join(r.head_sizes.iter()),
            blocks(&r.kernel_block_sizes),
            join(r.kv_cache_layouts.iter()),
            r.graph_support.to_string(),
        ]);
    }
    writeln!(out, "{}", table.trim_fmt())?;
    if args.verbose {
        for b in registry.iter() {
            let r = b.rules();
            writeln!(out, "\n{} on {}: {}", r.name, r.platform, features(r))?;
        }
        writeln!(out, "\n{}", instruction_set()?)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Which instruction set the CPU kernels use, and why not a better one: a line, and one for each level that
/// is out of reach.
fn instruction_set() -> Result<String, CliError> {
    let (used, best) = (Isa::detect().map_err(|e| CliError::Usage(e.to_string()))?, Isa::of_machine());
    let mut text = match used == best {
        true => format!("cpu kernels use {used}, the best that this machine has"),
        false => format!("cpu kernels use {used}: HEADWAY_CPU_ISA lowers it from {best}"),
    };
    for (isa, why) in Isa::out_of_reach() {
        text += &format!("\n  {isa}: {why}");
    }
    Ok(text)
}

fn join<T: ToString>(items: impl Iterator<Item = T>) -> String {
    let items: Vec<_> = items.map(|x| x.to_string()).collect();
    if items.is_empty() { "any".into() } else { items.join(", ") }
}

fn blocks(sizes: &[KernelBlockSize]) -> String {
    join(sizes.iter().map(|k| match k {
        KernelBlockSize::Exact(n) => n.to_string(),
        KernelBlockSize::MultipleOf(n) => format!("multiples of {n}"),
    }))
}

/// What a rule book says yes to, in words.
fn features(r: &RuleBook) -> String {
    let all = [
        (r.supports_sliding_window, "sliding window"),
        (r.supports_sinks, "sinks"),
        (r.supports_logit_soft_cap, "logit soft cap"),
        (r.supports_alibi, "ALiBi"),
        (r.supports_non_causal, "non-causal"),
        (r.supports_different_v_head_size, "different value head size"),
        (r.supports_batch_invariance, "batch invariance"),
        (r.supports_dcp, "decode context parallelism"),
    ];
    join(all.iter().filter(|(yes, _)| *yes).map(|(_, name)| *name))
}
