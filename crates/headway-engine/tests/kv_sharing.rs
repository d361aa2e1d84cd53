//! Layers that read the cache of an earlier one (Gemma 4): the golden in every way, memory, preemption, and
//! configs that can't be.

mod support;

use headway_engine::{EngineOptions, LlmEngine, options::LoadFormat};
use headway_testkit::{
    golden::{
        self,
        check::Compute,
        walk::{Generates, Table},
    },
    testdata,
};
use serde_json::{Value, json};
use std::path::Path;
use support::{UnderTest, options};

const MODEL: &str = "tiny-gemma4";

fn walk(compute: Compute, way: &str, options: &EngineOptions) -> Table {
    support::walk_of(MODEL, compute, way, options)
}

#[test]
fn the_golden_alone_batched_and_in_chunks() {
    let mut table = walk(Compute::Half, "auto", &options("auto"));
    for block_size in [16, 64] {
        for chunk in [5, 64] {
            for (caching, batch_invariant) in [(true, false), (false, true)] {
                let options = EngineOptions {
                    block_size: Some(block_size),
                    max_num_batched_tokens: Some(chunk),
                    max_num_seqs: Some(chunk.min(16)),
                    no_prefix_caching: !caching,
                    batch_invariant,
                    ..options("float32")
                };
                let way = format!("block {block_size} chunk {chunk} caching {caching}");
                table.extend(walk(Compute::Float32, &way, &options));
            }
        }
    }
    println!("{table}");
    assert!(table.ok(), "\n{table}");
}

/// A config with changes, for random weights.
fn changed(changes: &Value, dir: &Path) {
    let text = std::fs::read_to_string(testdata::model_dir(MODEL).unwrap().join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    changes.as_object().unwrap().iter().for_each(|(k, v)| config[k] = v.clone());
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

fn dummy() -> EngineOptions {
    EngineOptions { load_format: LoadFormat::Dummy, ..options("auto") }
}

#[test]
fn sharing_layers_have_no_pages_and_the_report_says_whose_they_read() {
    let dir = tempfile::tempdir().unwrap();
    let started = |changes: Value| {
        changed(&changes, dir.path());
        let engine = LlmEngine::open(dir.path(), &dummy(), &mut |_, _| ()).unwrap();
        serde_json::to_value(engine.report()).unwrap()
    };
    let each = json!({"2": {"head_dim": 16}, "5": {"head_dim": 16}});
    started(json!({"global_head_dim": null, "per_layer_config": each}));
    let (shared, own) = (started(json!({})), started(json!({"num_kv_shared_layers": 0})));
    let pairs = |r: &Value| -> Vec<(u64, u64)> {
        let groups = r["groups"].as_array().unwrap().iter();
        let all = groups.filter_map(|g| g["shared_caches"].as_array()).flatten();
        let mut all: Vec<_> =
            all.map(|s| (s["layer"].as_u64().unwrap(), s["of"].as_u64().unwrap())).collect();
        all.sort_unstable();
        all
    };
    assert_eq!(pairs(&shared), [(3, 1), (4, 1), (5, 2)]);
    assert_eq!(pairs(&own), []);
    // Of heads of 8, four sliding layers or two; of heads of 16, two full layers or one: 2 heads, keys and values,
    // 2 bytes.
    let bytes = |r: &Value| r["memory"]["kv_bytes_per_token"].as_u64().unwrap();
    assert_eq!(bytes(&own), (4 * 8 + 2 * 16) * 2 * 2 * 2);
    assert_eq!(bytes(&shared), (2 * 8 + 16) * 2 * 2 * 2);
    // Sharing layers are in their owners' groups: one build a step for both.
    let layers = |r: &Value, kind: &str| -> Vec<u64> {
        let groups = r["groups"].as_array().unwrap().iter().filter(|g| g["kind"] == kind);
        let mut all: Vec<_> =
            groups.flat_map(|g| g["layers"].as_array().unwrap()).map(|l| l.as_u64().unwrap()).collect();
        all.sort_unstable();
        all
    };
    assert_eq!(layers(&shared, "sliding window 16"), [0, 1, 3, 4]);
    assert_eq!(layers(&shared, "full attention"), [2, 5]);
}

#[test]
fn preempted_requests_get_the_same_answers() {
    let dir = testdata::model_dir(MODEL).unwrap();
    let goldens = golden::tiny().unwrap();
    let golden = goldens.iter().find(|g| g.model.name == MODEL).unwrap();
    let mut long: Vec<_> = golden.cases.iter().filter(|c| c.prompt_ids.len() >= 33).collect();
    long.extend(long.clone());
    let prompts: Vec<_> = long.iter().map(|c| c.prompt()).collect();
    let roomy = EngineOptions { no_prefix_caching: true, ..options("float32") };
    let mut first = UnderTest::open(&dir, &roomy).unwrap();
    let memory = &first.engine.report().memory;
    let page = memory.kv_cache_bytes / memory.kv_cache_blocks as u64;
    // A full cache would take a page of each of the three groups for every 32 tokens: too few for all six.
    let tight = EngineOptions { kv_cache_memory: Some(page * 26), max_model_len: Some(160), ..roomy };
    let mut second = UnderTest::open(&dir, &tight).unwrap();
    let (many, few) = (first.run_batch(&prompts).unwrap(), second.run_batch(&prompts).unwrap());
    let stats = second.engine.scheduler_stats();
    println!("{stats:?}");
    assert!(stats.preemptions > 0, "{stats:?}");
    for ((a, b), c) in many.iter().zip(&few).zip(&long) {
        assert_eq!(a.ids, b.ids, "{}", c.name);
        assert_eq!(a.ids, c.greedy_ids, "{}", c.name);
    }
}

#[test]
fn configs_that_can_not_be_say_what_to_change() {
    let dir = tempfile::tempdir().unwrap();
    let says = |changes: Value, words: &[&str]| {
        changed(&changes, dir.path());
        let e = LlmEngine::open(dir.path(), &dummy(), &mut |_, _| ()).err().unwrap().to_string();
        assert!(words.iter().all(|w| e.contains(w)), "{e}");
    };
    says(json!({"num_kv_shared_layers": 6}), &["num_kv_shared_layers", "below num_hidden_layers, 6"]);
    says(json!({"num_kv_shared_layers": "all"}), &["num_kv_shared_layers", "whole number"]);
    says(
        json!({"num_kv_shared_layers": 4}),
        &["num_kv_shared_layers", "layer 2 (full_attention)", "first 2"],
    );
    says(json!({"layer_types": ["full_attention"]}), &["layer_types", "1 entries for 6 layers"]);
    says(json!({"enable_moe_block": true}), &["enable_moe_block", "dense Gemma 4"]);
    says(json!({"use_bidirectional_attention": "all"}), &["use_bidirectional_attention", "causal"]);
    says(json!({"vocab_size_per_layer_input": 64}), &["vocab_size_per_layer_input", "vocab_size, 128"]);
    says(json!({"per_layer_config": {"2": {"head_dim": 16}, "5": {"head_dim": 8}}}), &["the same head_dim"]);
    says(json!({"attention_k_eq_v": true, "num_global_key_value_heads": 3}), &["num_global_key_value_heads"]);
}
