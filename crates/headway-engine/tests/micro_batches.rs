//! `--micro-batches`: a step in parts says what the whole step says. Bit for bit with `--batch-invariant`, within
//! rounding without; every part is built once a group by a builder of its own; small steps run whole.

mod support;

use headway_engine::{
    Engine, EngineOptions, Event, GenerateRequest, LlmEngine, kv::RequestId, sampling::SamplingParams,
};
use headway_testkit::testdata;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};
use support::options;

/// One group, windows beside full attention, layers that share caches, experts, latent attention, states beside
/// attention, both in one layer.
const MODELS: [&str; 7] = [
    "tiny-llama",
    "tiny-gemma3",
    "tiny-gemma4",
    "tiny-qwen3-moe",
    "tiny-deepseek-v2-yarn",
    "tiny-bamba",
    "tiny-falcon-h1",
];

/// Prompts of one token, of a block and around it, and longer than most steps; two begin alike.
fn requests() -> Vec<GenerateRequest> {
    let lengths = [1, 15, 16, 17, 33, 64, 97, 2];
    let prompt = |i: usize, n: usize| (0..n).map(|t| 3 + ((t * 13 + i % 6 * 31) % 120) as u32).collect();
    let sampling =
        |i: usize| SamplingParams { max_tokens: Some(6 + i), ignore_eos: true, ..SamplingParams::greedy() };
    lengths
        .into_iter()
        .enumerate()
        .map(|(i, n)| GenerateRequest {
            prompt_ids: prompt(i, n),
            sampling: sampling(i),
            ..GenerateRequest::default()
        })
        .collect()
}

struct Run {
    /// Tokens and the logits of each, by request.
    answers: Vec<(Vec<u32>, Vec<f32>)>,
    steps: u64,
    cut_steps: u64,
}

fn open(model: &str, options: &EngineOptions) -> LlmEngine {
    LlmEngine::open(&testdata::model_dir(model).unwrap(), options, &mut |_, _| ()).unwrap()
}

fn run(model: &str, options: &EngineOptions) -> Run {
    let mut engine = open(model, options);
    let rows: Arc<Mutex<HashMap<RequestId, Vec<f32>>>> = Arc::default();
    let sink = rows.clone();
    engine.observe_logits(move |id, row| sink.lock().unwrap().entry(id).or_default().extend(row));
    let ids: Vec<RequestId> = requests().into_iter().map(|r| engine.add(r).unwrap()).collect();
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
    let runner = engine.runner();
    let (steps, cut_steps) = (runner.times().steps, runner.cut_steps());
    let parts = options.micro_batches.unwrap_or(1) as u64;
    for g in runner.groups() {
        let built = (g.builds() + g.table_updates()) as u64;
        assert_eq!(built, steps + cut_steps * (parts - 1), "{model}: one build a group and micro-batch");
    }
    assert_eq!(runner.input_reallocs(), 0, "buffers are recycled");
    let mut rows = rows.lock().unwrap();
    let answers = ids.iter().map(|id| (said.remove(id).unwrap(), rows.remove(id).unwrap())).collect();
    Run { answers, steps, cut_steps }
}

fn cut(parts: usize, tokens: usize, chunk: usize, batch_invariant: bool) -> EngineOptions {
    let of = |n| (parts > 1).then_some(n);
    EngineOptions {
        batch_invariant,
        micro_batches: Some(parts),
        micro_batch_decode_tokens: of(tokens),
        micro_batch_prefill_tokens: of(tokens),
        max_num_batched_tokens: Some(chunk),
        max_num_seqs: Some(chunk.min(8)),
        threads: Some(2),
        ..options("float32")
    }
}

#[test]
fn parts_change_no_bit_under_batch_invariance() {
    for model in MODELS {
        let whole = run(model, &cut(1, 1, 512, true));
        assert_eq!(whole.cut_steps, 0);
        for (parts, chunk) in [(2, 512), (2, 40), (2, 7), (3, 64)] {
            let cut = run(model, &cut(parts, parts, chunk, true));
            println!("{model}: {parts} parts, {chunk} tokens: {} of {} steps cut", cut.cut_steps, cut.steps);
            assert!(cut.cut_steps > cut.steps / 2, "{model}: {} of {}", cut.cut_steps, cut.steps);
            for (i, (a, b)) in whole.answers.iter().zip(&cut.answers).enumerate() {
                assert_eq!(a.0, b.0, "{model}, request {i}, {parts} parts, {chunk} tokens");
                let same = a.1.iter().zip(&b.1).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same && a.1.len() == b.1.len(), "{model}, logits of request {i}, {parts} parts");
            }
        }
    }
}

#[test]
fn without_it_they_stay_within_rounding() {
    for model in MODELS {
        let whole = run(model, &cut(1, 1, 40, false));
        let cut = run(model, &cut(2, 2, 40, false));
        assert!(cut.cut_steps > cut.steps / 2);
        let mut worst = 0f32;
        for (i, (a, b)) in whole.answers.iter().zip(&cut.answers).enumerate() {
            assert_eq!(a.0, b.0, "{model}, request {i}");
            worst = a.1.iter().zip(&b.1).map(|(a, b)| (a - b).abs()).fold(worst, f32::max);
        }
        println!("{model}: logits differ by {worst:e} at most");
        assert!(worst < 2e-4, "{model}: {worst}");
    }
}

#[test]
fn small_steps_run_whole_and_nothing_is_cut_unasked() {
    let none = run("tiny-llama", &cut(2, 1000, 40, true));
    assert_eq!((none.cut_steps, none.steps > 0), (0, true));
    let o = EngineOptions { micro_batches: Some(2), ..options("float32") };
    assert_eq!(run("tiny-llama", &o).cut_steps, 0, "the thresholds' defaults are larger than these steps");
    let engine = open("tiny-llama", &options("float32"));
    assert_eq!(engine.report().options["micro_batches"].in_force, "1");
    assert_eq!(engine.report().options["micro_batch_prefill_tokens"].in_force, "512");
}

#[test]
fn the_report_counts_the_builders_of_every_micro_batch() {
    for model in ["tiny-gemma3", "tiny-deepseek-v2-yarn", "tiny-bamba"] {
        let [one, two] = [1, 2].map(|n| {
            let engine = open(model, &cut(n, 2, 64, false));
            let r = engine.report();
            (r.memory.metadata_bytes, r.groups.iter().map(|g| g.workspace_bytes).collect::<Vec<_>>())
        });
        assert!(one.0 > 0 && one.1.iter().all(|b| *b > 0), "{model}: {one:?}");
        let twice = one.1.iter().map(|b| 2 * b).collect::<Vec<_>>();
        assert_eq!((2 * one.0, twice), two, "{model}");
    }
}

#[test]
fn a_model_with_an_encoder_runs_whole() {
    let model = testdata::model_dir("tiny-bart").unwrap();
    let e = LlmEngine::open(&model, &cut(2, 2, 64, false), &mut |_, _| ()).err().unwrap().to_string();
    let words = ["--micro-batches 2", "has an encoder", "leave it out"];
    assert!(words.iter().all(|w| e.contains(w)), "{e}");
}
