//! Models with Mamba-2 layers: goldens in every way of cutting prompts, slots of states, groups, and configs
//! that contradict themselves.

mod support;

use headway_engine::{
    Engine, EngineOptions, Event, GenerateRequest, LlmEngine, kv::RequestId, options::LoadFormat,
    sampling::SamplingParams,
};
use headway_testkit::{
    golden::{
        check::Compute,
        walk::{self, Table},
    },
    testdata,
};
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex},
};
use support::{UnderTest, options};

const MODELS: [&str; 5] =
    ["tiny-mamba2", "tiny-bamba", "tiny-granitemoehybrid", "tiny-nemotron-h", "tiny-falcon-h1"];

/// Chunks of 5 tokens end inside chunks of the scan and inside the convolution's memory; 33 is one more than
/// a chunk of the scan.
#[test]
fn goldens_alone_batched_and_in_chunks() {
    let mut table = Table::default();
    for (chunk, batch_invariant) in [(1, false), (5, false), (33, false), (512, false), (40, true)] {
        let options = EngineOptions {
            max_num_batched_tokens: Some(chunk),
            max_num_seqs: Some(chunk.min(16)),
            batch_invariant,
            ..options("float32")
        };
        let invariant = if batch_invariant { " batch-invariant" } else { "" };
        let way = format!("chunk {chunk}{invariant}");
        let mut t = walk::all_tiny(Compute::Float32, &way, |golden, dir| {
            if !MODELS.contains(&golden.model.name.as_str()) {
                return Ok(None);
            }
            Ok(Some(Box::new(UnderTest::open(dir, &options)?)))
        })
        .unwrap();
        t.not_run.clear();
        table.extend(t);
    }
    println!("{table}");
    assert!(table.ok(), "\n{table}");
}

/// The two layouts of a config give the same plan.
#[test]
fn both_layouts_of_a_config_are_one_model() {
    for model in MODELS {
        let from = testdata::model_dir(model).unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(from.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        std::fs::copy(from.join("config.v5.json"), dir.path().join("config.json")).unwrap();
        let plan = |dir: &Path| {
            let files = headway_engine::loading::open(dir).unwrap();
            headway_engine::models::arch::plan(&files).unwrap()
        };
        assert_eq!(plan(&from), plan(dir.path()), "{model}");
    }
}

fn prompt(n: u32, seed: u32) -> Vec<u32> {
    (0..n).map(|t| 3 + (t * 7919 + seed * 104_729) % 500).collect()
}

/// Greedy answers, with the logits of each of their tokens, by request.
fn answers(engine: &mut LlmEngine, prompts: &[Vec<u32>], more: usize) -> Vec<(Vec<u32>, Vec<f32>)> {
    let rows: Arc<Mutex<HashMap<RequestId, Vec<f32>>>> = Arc::default();
    let sink = rows.clone();
    engine.observe_logits(move |id, row| sink.lock().unwrap().entry(id).or_default().extend(row));
    let add = |p: &Vec<u32>| {
        let sampling =
            SamplingParams { max_tokens: Some(more), ignore_eos: true, ..SamplingParams::greedy() };
        engine.add(GenerateRequest { prompt_ids: p.clone(), sampling, ..GenerateRequest::default() }).unwrap()
    };
    let ids: Vec<RequestId> = prompts.iter().map(add).collect();
    let (mut events, mut said) = (vec![], HashMap::new());
    while !engine.is_idle() {
        engine.step(&mut events).unwrap();
        for e in events.drain(..) {
            match e {
                Event::Finished(id, f) => drop(said.insert(id, f.token_ids)),
                Event::Failed(_, e) => panic!("{e}"),
                Event::Token(..) => {}
            }
        }
    }
    let mut rows = rows.lock().unwrap();
    ids.iter().map(|id| (said.remove(id).unwrap(), rows.remove(id).unwrap())).collect()
}

fn open(dir: &Path, options: &EngineOptions) -> LlmEngine {
    LlmEngine::open(dir, options, &mut |_, _| ()).unwrap()
}

/// Pages that hold a state for one request, and attention's pages for its tokens, and no more.
fn a_pool_for_one(dir: &Path, max_model_len: usize) -> EngineOptions {
    let large = EngineOptions { max_model_len: Some(max_model_len), ..options("float32") };
    let engine = open(dir, &EngineOptions { max_num_seqs: Some(1), ..large.clone() });
    let report = engine.report();
    let groups: std::collections::BTreeSet<_> = report.groups.iter().map(|g| g.kv_cache_group).collect();
    let page = report.memory.kv_cache_bytes / report.memory.kv_cache_blocks as u64;
    let attention = report.groups.iter().filter(|g| g.kind != "Mamba state").map(|g| g.block_size).min();
    let tokens = attention.map_or(0, |b| max_model_len.div_ceil(b) - 1);
    EngineOptions { kv_cache_memory: Some(page * (1 + groups.len() + tokens) as u64), ..large }
}

#[test]
fn a_request_does_not_see_the_state_of_the_one_before() {
    for model in MODELS {
        let dir = testdata::model_dir(model).unwrap();
        let options = EngineOptions { max_num_seqs: Some(1), ..a_pool_for_one(&dir, 128) };
        let alone = answers(&mut open(&dir, &options), &[prompt(37, 2)], 6);
        let mut used = open(&dir, &options);
        let (first, second) =
            (answers(&mut used, &[prompt(90, 1)], 9), answers(&mut used, &[prompt(37, 2)], 6));
        assert_ne!(first, second);
        assert_eq!(alone, second, "{model}: bit for bit");
        // A prompt of one token is all decode but for its flag.
        let one = answers(&mut used, &[prompt(1, 3)], 3);
        assert_eq!(answers(&mut open(&dir, &options), &[prompt(1, 3)], 3), one, "{model}");
    }
}

#[test]
fn states_of_preempted_requests_are_computed_again() {
    for model in ["tiny-bamba", "tiny-falcon-h1"] {
        let dir = testdata::model_dir(model).unwrap();
        let prompts: Vec<_> = (0..3).map(|i| prompt(30 + 9 * i, i)).collect();
        let tight = EngineOptions { block_size: Some(16), ..a_pool_for_one(&dir, 256) };
        let roomy = EngineOptions { kv_cache_memory: Some(64 << 20), ..tight.clone() };
        // Room for two requests' states at once, but not for the tokens that both go on to.
        let tight = EngineOptions { kv_cache_memory: tight.kv_cache_memory.map(|b| b + b / 2), ..tight };
        let mut small = open(&dir, &tight);
        let (few, many) =
            (answers(&mut small, &prompts, 170), answers(&mut open(&dir, &roomy), &prompts, 170));
        let ids = |a: &[(Vec<u32>, Vec<f32>)]| a.iter().map(|x| x.0.clone()).collect::<Vec<_>>();
        assert_eq!(ids(&few), ids(&many), "{model}");
        let stats = small.scheduler_stats();
        println!("{model}: {stats:?}");
        assert!(stats.preemptions > 0, "{model}: {stats:?}");
    }
}

/// A config with changes, for random weights.
fn changed(model: &str, changes: Value, dir: &Path) {
    let text = std::fs::read_to_string(testdata::model_dir(model).unwrap().join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text.replace("Infinity", "null")).unwrap();
    for (k, v) in changes.as_object().unwrap() {
        match v {
            Value::Null => drop(config.as_object_mut().unwrap().remove(k)),
            v => config[k] = v.clone(),
        }
    }
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

fn dummy() -> EngineOptions {
    EngineOptions { load_format: LoadFormat::Dummy, ..options("auto") }
}

#[test]
fn groups_of_states_build_once_and_swap_the_table() {
    let dir = tempfile::tempdir().unwrap();
    changed("tiny-bamba", json!({"num_hidden_layers": 8, "attn_layer_indices": [3, 7]}), dir.path());
    let mut engine = open(dir.path(), &EngineOptions { max_num_batched_tokens: Some(40), ..dummy() });
    let mut events = vec![];
    for i in 0..3 {
        let sampling = SamplingParams { max_tokens: Some(5), ignore_eos: true, ..SamplingParams::greedy() };
        engine
            .add(GenerateRequest { prompt_ids: prompt(50, i), sampling, ..GenerateRequest::default() })
            .unwrap();
    }
    let mut steps = 0;
    while !engine.is_idle() {
        engine.step(&mut events).unwrap();
        steps += 1;
    }
    let groups = engine.runner().groups();
    let calls: Vec<_> = groups.iter().map(|g| (g.backend(), g.builds(), g.table_updates())).collect();
    println!("{steps} steps: {calls:?}");
    let mut states = calls.iter().filter(|c| c.0 == "MAMBA2_ATTN");
    // Six layers in groups of two, as the two attention layers make it.
    assert_eq!(states.next(), Some(&("MAMBA2_ATTN", steps, 0)));
    assert_eq!(states.next(), Some(&("MAMBA2_ATTN", 0, steps)));
    assert_eq!(states.next(), Some(&("MAMBA2_ATTN", 0, steps)));
    assert_eq!((states.next(), calls.iter().filter(|c| c.0 == "CPU_ATTN").count()), (None, 1));
    assert_eq!(engine.runner().input_reallocs(), 0);
}

#[test]
fn the_report_says_why_blocks_are_large_and_prefixes_not_cached() {
    let engine = open(&testdata::model_dir("tiny-bamba").unwrap(), &options("float32"));
    let r = engine.report();
    let block = &r.options["block_size"];
    assert!(block.because.as_ref().is_some_and(|b| b.contains("raised from 16")), "{block:?}");
    let caching = &r.options["prefix_caching"];
    assert_eq!((caching.in_force.as_str(), caching.requested.as_ref()), ("false", None));
    assert!(caching.because.as_ref().is_some_and(|b| b.contains("layers with a state")), "{caching:?}");
    assert!(!engine.scheduler().kv().prefix_caching());
    // All pages have one size; the kernel's blocks divide attention's.
    let pages: Vec<_> = r.groups.iter().map(|g| g.page_size_bytes).collect();
    assert!(pages.windows(2).all(|w| w[0] == w[1]), "{pages:?}");
    let attention = r.groups.iter().find(|g| g.kind == "full attention").unwrap();
    assert_eq!(attention.block_size.to_string(), block.in_force);
    assert!(attention.block_size > 16 && attention.block_size.is_multiple_of(attention.kernel_block_size));
    assert!(r.memory.state_bytes_per_request > 0);
    let plain = open(&testdata::model_dir("tiny-llama").unwrap(), &options("float32"));
    assert_eq!(plain.report().options["prefix_caching"].in_force, "true");
}

#[test]
fn configs_that_lack_or_contradict_say_what_to_change() {
    let dir = tempfile::tempdir().unwrap();
    let says = |model: &str, changes: Value, words: &[&str]| {
        changed(model, changes, dir.path());
        let e = LlmEngine::open(dir.path(), &dummy(), &mut |_, _| ()).err().unwrap().to_string();
        assert!(words.iter().all(|w| e.contains(w)), "{e}");
    };
    says("tiny-bamba", json!({"mamba_d_state": null}), &["mamba_d_state", "missing"]);
    says(
        "tiny-bamba",
        json!({"mamba_n_heads": 5}),
        &["mamba_d_head", "32 for 5 heads", "mamba_expand × hidden_size = 192"],
    );
    says("tiny-bamba", json!({"mamba_n_groups": 4}), &["mamba_n_groups", "4 does not divide the 6 heads"]);
    says("tiny-bamba", json!({"mamba_d_conv": 40}), &["convolution of width 40", "from 2 to 16"]);
    says(
        "tiny-bamba",
        json!({"attn_layer_indices": "all"}),
        &["attn_layer_indices", "list of layer numbers"],
    );
    says("tiny-mamba2", json!({"head_dim": 31}), &["head_dim", "contradicts expand × hidden_size = 192"]);
    says("tiny-mamba2", json!({"time_step_limit": [2.0, 1.0]}), &["time_step_limit", "the smaller first"]);
    says("tiny-mamba2", json!({"chunk_size": 0}), &["chunk_size", "positive whole number"]);
    says("tiny-falcon-h1", json!({"mamba_d_ssm": 100}), &["contradicts mamba_d_ssm = 100"]);
    says("tiny-falcon-h1", json!({"ssm_multipliers": [1.0, 2.0]}), &["ssm_multipliers", "5 numbers"]);
    says("tiny-falcon-h1", json!({"mamba_proj_bias": true}), &["ssm_in_multiplier", "bias"]);
    says("tiny-nemotron-h", json!({"hybrid_override_pattern": "M-x"}), &["letter x", "known: M, *, -, E"]);
    says(
        "tiny-nemotron-h",
        json!({"hybrid_override_pattern": null}),
        &["hybrid_override_pattern", "layers_block_type"],
    );
    says("tiny-nemotron-h", json!({"num_hidden_layers": 4}), &["num_hidden_layers", "6 layers"]);
    says("tiny-nemotron-h", json!({"mamba_ssm_cache_dtype": "int8"}), &["mamba_ssm_cache_dtype", "bfloat16"]);
    // A state of 768 MiB beside attention of 384 bytes a token.
    says(
        "tiny-bamba",
        json!({"mamba_d_state": 1 << 20, "attn_layer_indices": [1], "num_hidden_layers": 2}),
        &["--block-size", "a request's state is", "--kv-cache-dtype"],
    );
}

#[test]
fn a_block_size_that_the_layout_can_not_cut_is_refused_with_the_way_out() {
    let dir = testdata::model_dir("tiny-bamba").unwrap();
    let options = EngineOptions { kv_layout: Some("BLHNC".into()), ..options("float32") };
    let e = LlmEngine::open(&dir, &options, &mut |_, _| ()).err().unwrap().to_string();
    assert!(e.contains("--kv-layout") && e.contains("LBNHC"), "{e}");
}

#[test]
fn states_may_be_kept_in_another_type() {
    let dir = tempfile::tempdir().unwrap();
    let from = testdata::model_dir("tiny-nemotron-h").unwrap();
    std::fs::copy(from.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let said = |dtype: &str| {
        changed("tiny-nemotron-h", json!({"mamba_ssm_cache_dtype": dtype}), dir.path());
        let mut engine = open(dir.path(), &options("float32"));
        let bytes = engine.report().memory.state_bytes_per_request;
        (answers(&mut engine, &[prompt(60, 1)], 4).remove(0), bytes)
    };
    let ((wide, narrow), (exact, rounded)) = {
        let (a, b) = (said("float32"), said("bfloat16"));
        ((a.1, b.1), (a.0.1, b.0.1))
    };
    assert!(narrow <= wide, "{narrow} {wide}");
    // The prompt's last logits are made of a state that was not yet rounded; those of the next token of one that was.
    let n = exact.len() / 4;
    assert_eq!(exact[..n], rounded[..n]);
    let next = n..2 * n;
    let worst =
        exact[next.clone()].iter().zip(&rounded[next]).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    println!("bfloat16 states: logits of the second token differ by {worst}");
    assert!(worst > 0.0 && worst < 0.3, "{worst}");
}
