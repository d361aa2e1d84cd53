//! Latent attention through the engine against what Hugging Face transformers computed: in chunks of several sizes, with
//! workspaces that the context overflows, with and without cached prefixes, under batch invariance; and what is refused.
//!
//! The archives here hold one of the models; `HEADWAY_MODELS_DIR` and `HEADWAY_GOLDEN_DIR` bring the others.

mod support;

use headway_engine::EngineOptions;
use headway_testkit::golden::{
    check::Compute,
    walk::{self, Table},
};
use serde_json::json;
use support::{UnderTest, options};

fn is_latent(name: &str) -> bool {
    name.contains("deepseek") || name.contains("mla")
}

fn walk_latent(table: &mut Table, way: &str, options: &EngineOptions) {
    let mut t = walk::all_tiny(Compute::Float32, way, |golden, dir| {
        if !is_latent(&golden.model.name) {
            return Ok(None);
        }
        Ok(Some(Box::new(UnderTest::open(dir, options)?)))
    })
    .unwrap();
    t.not_run.clear();
    table.extend(t);
}

fn finish(table: &Table) {
    println!("{table}");
    assert!(!table.rows.is_empty() && table.ok(), "\n{table}");
}

fn workspace(tokens: usize) -> serde_json::Map<String, serde_json::Value> {
    let mut tables = serde_json::Map::new();
    tables.insert("CPU_MLA".into(), json!({ "workspace_tokens": tokens }));
    tables
}

/// Prompts of up to 130 tokens: in chunks of 7 the context fills a workspace of 16 tokens eight times.
#[test]
fn chunks_and_workspaces_of_every_size() {
    let mut table = Table::default();
    for (chunk, tokens) in [(512, 1024), (512, 16), (64, 32), (33, 16), (7, 16)] {
        for no_prefix_caching in [false, true] {
            let options = EngineOptions {
                max_num_batched_tokens: Some(chunk),
                max_num_seqs: Some(chunk.min(16)),
                backend_config: workspace(tokens),
                no_prefix_caching,
                ..options("float32")
            };
            let caching = if no_prefix_caching { "no caching" } else { "caching" };
            walk_latent(&mut table, &format!("chunk {chunk} workspace {tokens} {caching}"), &options);
        }
    }
    finish(&table);
}

#[test]
fn every_row_as_a_decode_under_batch_invariance() {
    let mut table = Table::default();
    for chunk in [512, 20] {
        let options = EngineOptions {
            batch_invariant: true,
            max_num_batched_tokens: Some(chunk),
            max_num_seqs: Some(8),
            ..options("float32")
        };
        walk_latent(&mut table, &format!("batch-invariant chunk {chunk}"), &options);
    }
    finish(&table);
}
