//! What a step costs outside kernels: each builder runs once per attention group and step whatever the
//! number of layers, no allocation grows with the layers, and no input buffer is allocated anew.
#![expect(unsafe_code, reason = "a counting allocator is an unsafe trait by nature")]

mod support;

use headway_engine::{Engine, EngineOptions, GenerateRequest, LlmEngine, sampling::SamplingParams};
use headway_testkit::testdata;
use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    fs,
    path::{Path, PathBuf},
};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
}

// SAFETY: every call is handed to the system's allocator unchanged; only a thread-local counter is added.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, l: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(l) }
    }
    unsafe fn alloc_zeroed(&self, l: Layout) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(l) }
    }
    unsafe fn realloc(&self, p: *mut u8, l: Layout, n: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(p, l, n) }
    }
    unsafe fn dealloc(&self, p: *mut u8, l: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(p, l) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A copy of a checkpoint with its first `layers` layers alone.
fn shortened(name: &str, layers: usize, dir: &Path) -> PathBuf {
    let (from, to) = (testdata::model_dir(name).unwrap(), dir.join(format!("{name}-{layers}")));
    fs::create_dir_all(&to).unwrap();
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let all = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let is_kept = |name: &str| {
        let rest = ["model.layers.", "backbone.layers."].iter().find_map(|p| name.strip_prefix(p));
        let layer = rest.and_then(|r| r.split('.').next());
        layer.and_then(|n| n.parse::<usize>().ok()).is_none_or(|n| n < layers)
    };
    let kept: Vec<_> = all.tensors().into_iter().filter(|(name, _)| is_kept(name)).collect();
    fs::write(to.join("model.safetensors"), safetensors::serialize(kept, None).unwrap()).unwrap();
    // Python's writer has a word for an open limit that JSON hasn't.
    let text = fs::read_to_string(from.join("config.json")).unwrap().replace("Infinity", "1e38");
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    config["num_hidden_layers"] = layers.into();
    if let Some(types) = config["layer_types"].as_array_mut() {
        types.truncate(layers);
    }
    fs::write(to.join("config.json"), config.to_string()).unwrap();
    to
}

struct Cost {
    allocations: Vec<usize>,
    builds: usize,
    groups: usize,
    layers: usize,
    reallocs: usize,
    drafted: u64,
}

/// Runs 4 requests together and counts what each decode step costs once all are decoding.
fn measure(model: &Path) -> Cost {
    measure_with(model, EngineOptions::default(), SamplingParams::greedy())
}

fn measure_with(model: &Path, base: EngineOptions, sampling: SamplingParams) -> Cost {
    let options =
        EngineOptions { kv_cache_memory: Some(16 << 20), threads: Some(1), no_prefix_caching: true, ..base };
    let mut engine = LlmEngine::open(model, &options, &mut |_, _| ()).unwrap();
    for i in 0..4u32 {
        let prompt_ids: Vec<u32> = (0..20).map(|t| (t * 7 + i) % 500).collect();
        let sampling = SamplingParams { max_tokens: Some(12), ignore_eos: true, ..sampling.clone() };
        engine.add(GenerateRequest { prompt_ids, sampling, ..GenerateRequest::default() }).unwrap();
    }
    let (mut events, mut allocations, mut steps) = (Vec::with_capacity(64), vec![], 0);
    while !engine.is_idle() {
        let before = ALLOCATIONS.with(Cell::get);
        engine.step(&mut events).unwrap();
        allocations.push(ALLOCATIONS.with(Cell::get) - before);
        events.clear();
        steps += 1;
    }
    let groups = engine.runner().groups();
    for g in groups {
        assert_eq!(g.builds() + g.table_updates(), steps, "one build a group and step: {}", g.backend());
    }
    Cost {
        allocations,
        builds: groups.iter().map(|g| g.builds()).sum(),
        groups: groups.len(),
        layers: groups.iter().map(|g| g.info().layers.len()).sum(),
        reallocs: engine.runner().input_reallocs(),
        drafted: engine.speculation_stats().summary().drafted_tokens,
    }
}

#[test]
fn a_step_costs_the_same_for_any_number_of_layers() {
    let dir = tempfile::tempdir().unwrap();
    for model in ["tiny-llama", "tiny-qwen3-moe", "tiny-mamba2"] {
        let (one, three) = (shortened(model, 1, dir.path()), shortened(model, 3, dir.path()));
        let (one, three) = (measure(&one), measure(&three));
        println!(
            "{model}: allocations a step: 1 layer {:?}, 3 layers {:?}",
            one.allocations, three.allocations
        );
        assert_eq!((one.layers, three.layers), (1, 3));
        assert_eq!(one.builds, three.builds, "builders run per group and step");
        // The first step grows scratch that later ones use again.
        assert_eq!(one.allocations[1..], three.allocations[1..], "allocations in a step");
        assert_eq!((one.reallocs, three.reallocs), (0, 0), "input buffers are recycled");
    }
}

#[test]
fn each_group_of_a_hybrid_builds_once_a_step() {
    let cost = measure(&testdata::model_dir("tiny-gemma3").unwrap());
    println!("{} groups for {} layers, {} builds", cost.groups, cost.layers, cost.builds);
    assert!(cost.groups < cost.layers);
    assert_eq!(cost.reallocs, 0);
}

/// Answers differ with the layers, and with them what is drafted and when a vector grows: the step in which none does
/// is compared.
#[test]
fn drafts_cost_no_allocation_a_layer() {
    let dir = tempfile::tempdir().unwrap();
    let run = |layers: usize, k: usize| {
        let options = EngineOptions {
            speculative_tokens: Some(k),
            prompt_lookup_min: (k > 0).then_some(1),
            ..EngineOptions::default()
        };
        // A penalty below 1 makes the answer repeat itself, so that every step has drafts.
        let sampling = SamplingParams { repetition_penalty: 0.3, ..SamplingParams::greedy() };
        let cost = measure_with(&shortened("tiny-llama", layers, dir.path()), options, sampling);
        println!("{layers} layers, {k} drafts: {:?}, {} drafted", cost.allocations, cost.drafted);
        assert_eq!(cost.reallocs, 0, "input buffers are recycled");
        assert_eq!(cost.drafted > 0, k > 0);
        *cost.allocations.iter().min().unwrap()
    };
    assert_eq!(run(1, 3), run(3, 3));
    let (plain, drafted) = (run(3, 0), run(3, 3));
    assert!(drafted <= plain + 1, "{drafted} allocations with drafts, {plain} without");
}
