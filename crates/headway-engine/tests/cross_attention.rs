//! A decoder that attends to its encoder (BART): the golden in every way, pages, preemption, and what is refused.

mod support;

use headway_engine::{
    Engine, EngineOptions, GenerateRequest, LlmEngine, engine::Event, options::LoadFormat,
    sampling::SamplingParams,
};
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

const MODEL: &str = "tiny-bart";

fn walk(compute: Compute, way: &str, options: &EngineOptions) -> Table {
    support::walk_of(MODEL, compute, way, options)
}

#[test]
fn the_golden_alone_batched_and_in_chunks() {
    let mut table = walk(Compute::Half, "auto", &options("auto"));
    for block_size in [16, 64] {
        // Prompts are cut by what others leave of a step; an encoder's input of 150 tokens is not.
        for chunk in [150, 160, 512] {
            for batch_invariant in [false, true] {
                let options = EngineOptions {
                    block_size: Some(block_size),
                    max_num_batched_tokens: Some(chunk),
                    batch_invariant,
                    ..options("float32")
                };
                table.extend(walk(Compute::Float32, &format!("block {block_size} chunk {chunk}"), &options));
            }
        }
    }
    println!("{table}");
    assert!(table.ok(), "\n{table}");
}

fn request(prompt: &[u32], encoder: &[u32], max_tokens: usize) -> GenerateRequest {
    let sampling =
        SamplingParams { max_tokens: Some(max_tokens), ignore_eos: true, ..SamplingParams::greedy() };
    GenerateRequest {
        prompt_ids: prompt.to_vec(),
        encoder_ids: encoder.to_vec(),
        sampling,
        ..GenerateRequest::default()
    }
}

#[test]
fn pages_hold_what_the_encoder_read_for_as_long_as_the_request_lives() {
    let dir = testdata::model_dir(MODEL).unwrap();
    let mut engine = LlmEngine::open(&dir, &options("float32"), &mut |_, _| ()).unwrap();
    let report = serde_json::to_value(engine.report()).unwrap();
    let group = |kind: &str| {
        let all = report["groups"].as_array().unwrap();
        let of_kind: Vec<_> = all.iter().filter(|g| g["kind"] == kind).collect();
        assert_eq!(of_kind.len(), 1, "{kind}: {all:?}");
        (of_kind[0]["kv_cache_group"].as_u64().unwrap() as usize, of_kind[0]["layers"].clone())
    };
    let ((own, _), (cross, _)) = (group("full attention"), group("cross attention"));
    let (nothing, _) = group("encoder only");
    assert_eq!(report["options"]["prefix_caching"]["in_force"], "false");
    let ids: Vec<_> = [33, 1].iter().map(|&n| engine.add(request(&[2], &vec![7; n], 20)).unwrap()).collect();
    let mut events = vec![];
    let mut steps = 0;
    while !engine.is_idle() {
        engine.step(&mut events).unwrap();
        steps += 1;
        let pages = |id, group| engine.scheduler().block_table(id, group).map(<[u32]>::len);
        if steps == 18 {
            assert_eq!([pages(ids[0], own), pages(ids[0], cross)], [Some(2), Some(3)]);
            assert_eq!([pages(ids[1], own), pages(ids[1], cross)], [Some(2), Some(1)]);
            assert_eq!(pages(ids[0], nothing), Some(0));
            assert_eq!(engine.scheduler().kv().usage().used_pages, 2 + 3 + 2 + 1);
        }
    }
    assert_eq!(engine.scheduler().kv().usage().used_pages, 0);
    // Every group builds once a step, whether or not an encoder reads something in it.
    let builds: Vec<_> = engine.runner().groups().iter().map(|g| g.builds()).collect();
    assert_eq!(builds, [steps, steps, steps]);
    assert_eq!(engine.runner().input_reallocs(), 0);
}

#[test]
fn preempted_requests_read_their_inputs_again() {
    let dir = testdata::model_dir(MODEL).unwrap();
    let goldens = golden::tiny().unwrap();
    let golden = goldens.iter().find(|g| g.model.name == MODEL).unwrap();
    let prompts: Vec<_> = golden.cases.iter().map(|c| c.prompt()).collect();
    let roomy = options("float32");
    let mut first = UnderTest::open(&dir, &roomy).unwrap();
    let memory = &first.engine.report().memory;
    let page = memory.kv_cache_bytes / memory.kv_cache_blocks as u64;
    let tight = EngineOptions { kv_cache_memory: Some(page * 25), ..roomy };
    let mut second = UnderTest::open(&dir, &tight).unwrap();
    let (many, few) = (first.run_batch(&prompts).unwrap(), second.run_batch(&prompts).unwrap());
    let stats = second.engine.scheduler_stats();
    println!("{} preemptions, {} tokens again", stats.preemptions, stats.recomputed_tokens);
    assert!(stats.preemptions > 0);
    for ((a, b), c) in many.iter().zip(&few).zip(&golden.cases) {
        assert_eq!((&a.ids, &b.ids), (&c.greedy_ids, &c.greedy_ids), "{}", c.name);
    }
}

#[test]
fn requests_and_configs_that_can_not_be_say_what_to_change() {
    let dir = testdata::model_dir(MODEL).unwrap();
    let small = EngineOptions { max_num_batched_tokens: Some(64), ..options("float32") };
    let mut engine = LlmEngine::open(&dir, &small, &mut |_, _| ()).unwrap();
    let mut says = |encoder: Vec<u32>, words: &[&str]| {
        let e = engine.add(request(&[2], &encoder, 4)).unwrap_err().to_string();
        assert!(words.iter().all(|w| e.contains(w)), "{e}");
    };
    says(vec![], &["encoder input of 0 tokens", "at least one token"]);
    says(vec![5; 201], &["201 tokens", "at most 200"]);
    says(vec![5; 65], &["65 tokens", "--max-num-batched-tokens to 65"]);
    says(vec![500], &["500", "vocabulary of 128"]);
    let page = engine.report().memory.kv_cache_bytes / engine.report().memory.kv_cache_blocks as u64;
    let tiny = EngineOptions { kv_cache_memory: Some(page * 5), ..options("float32") };
    let mut engine = LlmEngine::open(&dir, &tiny, &mut |_, _| ()).unwrap();
    let e = engine.add(request(&[2], &[5; 60], 40)).unwrap_err().to_string();
    assert!(e.contains("40"), "{e}");
    engine.add(request(&[2], &[5; 40], 8)).unwrap();
    let mut events = vec![];
    while !engine.is_idle() {
        engine.step(&mut events).unwrap();
    }
    assert!(events.iter().any(|e| matches!(e, Event::Finished(..))));
    let llama = testdata::model_dir("tiny-llama").unwrap();
    let mut engine = LlmEngine::open(&llama, &options("auto"), &mut |_, _| ()).unwrap();
    let e = engine.add(request(&[2], &[5], 4)).unwrap_err().to_string();
    assert!(e.contains("has no encoder"), "{e}");
    let scratch = tempfile::tempdir().unwrap();
    let config = |changes: Value, words: &[&str]| {
        changed(&dir, &changes, scratch.path());
        let dummy = EngineOptions { load_format: LoadFormat::Dummy, ..options("auto") };
        let e = LlmEngine::open(scratch.path(), &dummy, &mut |_, _| ()).err().unwrap().to_string();
        assert!(words.iter().all(|w| e.contains(w)), "{e}");
    };
    config(
        json!({"encoder_attention_heads": 5}),
        &["encoder_attention_heads", "5 does not divide d_model 32"],
    );
    config(json!({"decoder_ffn_dim": null}), &["decoder_ffn_dim", "missing"]);
    config(json!({"normalize_before": true}), &["normalize_before", "after each block"]);
    config(json!({"activation_function": "relu"}), &["relu", "supported: gelu"]);
}

fn changed(from: &Path, changes: &Value, dir: &Path) {
    let text = std::fs::read_to_string(from.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    changes.as_object().unwrap().iter().for_each(|(k, v)| config[k] = v.clone());
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
}
