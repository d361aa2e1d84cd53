//! Holds the contract against tables of inputs and of what vLLM's own code returned for them. Prints
//! per table: ran, passed, deliberate differences, not understood. Fails on a mismatch, on a case that
//! isn't understood, and where no case ran at all.
//!
//! `HEADWAY_CONFORMANCE_DIR` names another directory of tables, `HEADWAY_CONFORMANCE_TABLE` one table.

#[path = "conformance/batch.rs"]
mod batch;
#[path = "conformance/catalog.rs"]
mod catalog;
#[path = "conformance/context_parallel.rs"]
mod context_parallel;
#[path = "conformance/differences.rs"]
mod differences;
#[path = "conformance/graph.rs"]
mod graph;
#[path = "conformance/grouping.rs"]
mod grouping;
#[path = "conformance/kernel_blocks.rs"]
mod kernel_blocks;
#[path = "conformance/layout.rs"]
mod layout;
#[path = "conformance/metadata/mod.rs"]
mod metadata;
#[path = "conformance/read.rs"]
mod read;
#[path = "conformance/runner.rs"]
mod runner;
#[path = "conformance/selection.rs"]
mod selection;

use read::Table;
use serde_json::Value;
use std::{collections::BTreeMap, path::PathBuf, process::ExitCode};

/// What a case gives.
pub enum Outcome {
    /// The same.
    Same,
    /// Another answer, on purpose; `differences` says why.
    Deliberate(differences::Why),
    /// Another answer.
    Differs(String),
    /// The test can't read the case.
    NotUnderstood(String),
}

type Case = fn(&str, &Value, &Value, &Table) -> Outcome;

const TABLES: &[(&str, Case)] = &[
    ("cudagraph_mode_helpers", graph::mode_helpers),
    ("cudagraph_mode", graph::mode),
    ("cudagraph_dispatch", graph::dispatch),
    ("batch_split", batch::split),
    ("dcp", context_parallel::dcp),
    ("layouts", layout::layouts),
    ("kernel_blocks", kernel_blocks::kernel_blocks),
    ("grouping", grouping::grouping),
    ("runner_build", runner::runner_build),
    ("metadata", metadata::metadata),
    ("rulebooks", catalog::rulebooks),
    ("selection_priorities", catalog::priorities),
    ("selection", selection::selection),
];

#[derive(Default)]
struct Count {
    ran: usize,
    passed: usize,
    deliberate: usize,
    not_understood: usize,
    failed: usize,
    why: BTreeMap<&'static str, usize>,
}

fn main() -> ExitCode {
    let dir = std::env::var_os("HEADWAY_CONFORMANCE_DIR").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/conformance")),
        PathBuf::from,
    );
    let only = std::env::var("HEADWAY_CONFORMANCE_TABLE").ok();
    let (mut ran, mut bad) = (0, false);
    println!("{:<24} {:>6} {:>7} {:>10} {:>15}", "table", "ran", "passed", "deliberate", "not understood");
    for (name, case) in TABLES {
        if only.as_deref().is_some_and(|o| o != *name) {
            continue;
        }
        let Some(table) = Table::read(&dir, name) else {
            println!("{name:<24} absent");
            continue;
        };
        let count = run(name, &table, *case);
        ran += count.ran;
        for (why, n) in &count.why {
            println!("  on purpose, {n}: {why}");
        }
        bad |= count.failed + count.not_understood > 0;
        println!(
            "{name:<24} {:>6} {:>7} {:>10} {:>15}{}",
            count.ran,
            count.passed,
            count.deliberate,
            count.not_understood,
            if count.failed > 0 { format!("   FAILED: {}", count.failed) } else { String::new() }
        );
    }
    if ran == 0 {
        println!("no case ran: {} holds no table", dir.display());
    }
    if bad || ran == 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn run(name: &str, table: &Table, case: Case) -> Count {
    let shown = std::env::var("HEADWAY_CONFORMANCE_SHOW").ok().and_then(|s| s.parse().ok()).unwrap_or(5);
    let mut count = Count::default();
    for c in table.cases() {
        let id = c["id"].as_str().unwrap_or("?");
        count.ran += 1;
        match case(id, &c["input"], &c["expected"], table) {
            Outcome::Same => count.passed += 1,
            Outcome::Deliberate(why) => {
                count.deliberate += 1;
                *count.why.entry(why.reason()).or_default() += 1;
            }
            Outcome::Differs(how) => {
                count.failed += 1;
                if count.failed <= shown {
                    println!("  {name} {id}: {how}");
                }
            }
            Outcome::NotUnderstood(what) => {
                count.not_understood += 1;
                if count.not_understood <= shown {
                    println!("  {name} {id} is not understood: {what}");
                }
            }
        }
    }
    count
}
