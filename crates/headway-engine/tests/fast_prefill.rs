//! `--kv-sharing-fast-prefill` (Gemma 4): the last layers compute the rows with logits alone, and every token, row of
//! logits and log-probability is the one of all rows: the golden, and bit by bit in chunks, batches, parts, with drafts
//! and cached prefixes; what is counted, reported and refused.

mod support;

use headway_engine::{
    Engine, EngineOptions, Event, GenerateRequest, LlmEngine, kv::RequestId, models::decoder::LayerRows,
    sampling::SamplingParams,
};
use headway_testkit::{
    golden::{check::Compute, walk::Table},
    testdata,
};
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex},
};
use support::options;

const MODEL: &str = "tiny-gemma4";

fn fast(options: EngineOptions) -> EngineOptions {
    EngineOptions { kv_sharing_fast_prefill: true, ..options }
}

fn open(options: &EngineOptions) -> LlmEngine {
    open_at(&testdata::model_dir(MODEL).unwrap(), options)
}

fn open_at(dir: &Path, options: &EngineOptions) -> LlmEngine {
    LlmEngine::open(dir, options, &mut |_, _| ()).unwrap()
}

#[test]
fn the_golden_alone_batched_and_in_chunks() {
    let mut table = Table::default();
    let mut walk = |compute, way: &str, o: EngineOptions| {
        table.extend(support::walk_of(MODEL, compute, way, &fast(o)));
    };
    walk(Compute::Half, "auto", options("auto"));
    for chunk in [5, 64, 512] {
        let batched = EngineOptions {
            max_num_batched_tokens: Some(chunk),
            max_num_seqs: Some(chunk.min(16)),
            ..options("float32")
        };
        walk(Compute::Float32, &format!("chunk {chunk}"), batched);
    }
    println!("{table}");
    assert!(table.ok(), "\n{table}");
}

/// Prompts of a token, of a block and around it, and longer than most steps; two begin alike, and some repeat
/// themselves.
fn requests() -> Vec<GenerateRequest> {
    let one = |(i, n): (usize, usize)| {
        let token = |t: usize| 3 + ((t % (5 + 40 * (i % 3)) * 13 + i % 6 * 31) % 120) as u32;
        let sampling = SamplingParams {
            max_tokens: Some(6 + i),
            ignore_eos: true,
            logprobs: Some(2),
            ..SamplingParams::greedy()
        };
        GenerateRequest { prompt_ids: (0..n).map(token).collect(), sampling, ..GenerateRequest::default() }
    };
    [1, 15, 16, 17, 33, 64, 97, 2].into_iter().enumerate().map(one).collect()
}

/// Tokens, the bits of every row of logits, and those of log-probabilities.
#[derive(Default, PartialEq)]
struct Answer {
    tokens: Vec<u32>,
    logits: Vec<u32>,
    logprobs: Vec<u32>,
    cached: usize,
}

struct Run {
    answers: Vec<Answer>,
    rows: LayerRows,
    engine: LlmEngine,
}

impl Run {
    /// Runs the requests together, `rounds` times over; the answers are the last round's.
    fn new(options: &EngineOptions, requests: &[GenerateRequest], rounds: usize) -> Self {
        Self::with(open(options), requests, rounds)
    }

    fn with(mut engine: LlmEngine, requests: &[GenerateRequest], rounds: usize) -> Self {
        let logits: Arc<Mutex<HashMap<RequestId, Vec<u32>>>> = Arc::default();
        let sink = logits.clone();
        engine.observe_logits(move |id, row| {
            sink.lock().unwrap().entry(id).or_default().extend(row.iter().map(|x| x.to_bits()));
        });
        let (mut answers, mut rows, mut events) = (vec![], LayerRows::default(), vec![]);
        for _ in 0..rounds {
            let before = engine.runner().layer_rows();
            let ids: Vec<_> = requests.iter().map(|r| engine.add(r.clone()).unwrap()).collect();
            let mut all: HashMap<RequestId, Answer> = HashMap::new();
            while !engine.is_idle() {
                engine.step(&mut events).unwrap();
                for e in events.drain(..) {
                    match e {
                        Event::Token(id, t) => {
                            let top = t.logprobs.unwrap().top;
                            let a = all.entry(id).or_default();
                            a.logprobs.extend(top.iter().map(|l| l.logprob.to_bits()));
                        }
                        Event::Finished(id, f) => {
                            let a = all.entry(id).or_default();
                            (a.tokens, a.cached) = (f.token_ids, f.cached_tokens);
                        }
                        Event::Failed(_, e) => panic!("{e}"),
                    }
                }
            }
            let mut logits = logits.lock().unwrap();
            let answer = |id| Answer { logits: logits.remove(id).unwrap(), ..all.remove(id).unwrap() };
            answers = ids.iter().map(answer).collect();
            let after = engine.runner().layer_rows();
            rows = LayerRows {
                first_layer: after.first_layer - before.first_layer,
                last_layer: after.last_layer - before.last_layer,
            };
        }
        let runner = engine.runner();
        assert_eq!(runner.input_reallocs(), 0, "buffers are recycled");
        Self { answers, rows, engine }
    }

    #[track_caller]
    fn same_as(&self, want: &Self, what: &str) {
        for (i, (a, b)) in self.answers.iter().zip(&want.answers).enumerate() {
            assert_eq!(a.tokens, b.tokens, "{what}: tokens of request {i}");
            assert!(a.logits == b.logits, "{what}: logits of request {i}");
            assert!(a.logprobs == b.logprobs, "{what}: log-probabilities of request {i}");
        }
    }
}

fn exactly(chunk: usize) -> EngineOptions {
    EngineOptions {
        batch_invariant: true,
        no_prefix_caching: true,
        max_num_batched_tokens: Some(chunk),
        max_num_seqs: Some(chunk.min(8)),
        threads: Some(2),
        ..options("float32")
    }
}

#[test]
fn no_bit_changes_and_the_last_layers_compute_the_rows_with_logits() {
    let requests = requests();
    let tokens = |of: fn(&GenerateRequest) -> usize| requests.iter().map(of).sum::<usize>() as u64;
    let (prompts, answers) = (tokens(|r| r.prompt_ids.len()), tokens(|r| r.sampling.max_tokens.unwrap_or(0)));
    let all = Run::new(&exactly(512), &requests, 1);
    // The last token of an answer is never computed.
    assert_eq!(all.rows.first_layer, prompts + answers - requests.len() as u64);
    assert_eq!(all.rows.last_layer, all.rows.first_layer);
    for (chunk, dtype) in [(512, "float32"), (40, "float32"), (7, "float32"), (40, "bfloat16")] {
        let o = EngineOptions { kv_cache_dtype: Some(dtype.into()), ..exactly(chunk) };
        let (plain, run) = (Run::new(&o, &requests, 1), Run::new(&fast(o), &requests, 1));
        run.same_as(&plain, &format!("steps of {chunk}, cache of {dtype}"));
        println!("steps of {chunk}, cache of {dtype}: {:?}, without {:?}", run.rows, plain.rows);
        assert_eq!(run.rows, LayerRows { first_layer: all.rows.first_layer, last_layer: answers });
    }
}

#[test]
fn without_batch_invariance_logits_stay_within_rounding() {
    let o = EngineOptions { batch_invariant: false, ..exactly(64) };
    let (plain, run) = (Run::new(&o, &requests(), 1), Run::new(&fast(o), &requests(), 1));
    let mut worst = 0f32;
    for (a, b) in plain.answers.iter().zip(&run.answers) {
        assert_eq!(a.tokens, b.tokens);
        let off = |(a, b): (&u32, &u32)| (f32::from_bits(*a) - f32::from_bits(*b)).abs();
        worst = a.logits.iter().zip(&b.logits).map(off).fold(worst, f32::max);
    }
    println!("logits differ by {worst:e} at most");
    assert!(worst < 2e-4, "{worst}");
}

#[test]
fn with_cached_prefixes_drafts_and_micro_batches() {
    let requests = requests();
    let plain = Run::new(&exactly(512), &requests, 1);
    let cached = EngineOptions { no_prefix_caching: false, ..exactly(40) };
    let again = Run::new(&fast(cached), &requests, 2);
    again.same_as(&plain, "cached prefixes");
    assert!(again.answers[6].cached > 0 && again.rows.first_layer < plain.rows.first_layer);

    let drafts = EngineOptions { speculative_tokens: Some(3), ..exactly(40) };
    let drafted = Run::new(&fast(drafts), &requests, 1);
    drafted.same_as(&plain, "drafts");
    assert!(drafted.engine.speculation_stats().accepted.iter().sum::<u64>() > 0);

    for parts in [2, 3] {
        let cut = EngineOptions {
            micro_batches: Some(parts),
            micro_batch_decode_tokens: Some(parts),
            micro_batch_prefill_tokens: Some(parts),
            ..exactly(40)
        };
        let run = Run::new(&fast(cut), &requests, 1);
        run.same_as(&plain, &format!("{parts} micro-batches"));
        assert!(run.engine.runner().cut_steps() > 0);
        assert_eq!(
            run.rows.last_layer,
            requests.iter().map(|r| r.sampling.max_tokens.unwrap() as u64).sum::<u64>()
        );
    }
}

#[test]
fn preempted_requests_are_computed_again_the_same() {
    let requests = requests();
    let plain = Run::new(&exactly(64), &requests, 1);
    let memory = &plain.engine.report().memory;
    let page = memory.kv_cache_bytes / memory.kv_cache_blocks as u64;
    let tight = EngineOptions { kv_cache_memory: Some(page * 16), max_model_len: Some(160), ..exactly(64) };
    let run = Run::new(&fast(tight), &requests, 1);
    run.same_as(&plain, "preempted");
    assert!(run.engine.scheduler_stats().preemptions > 0, "{:?}", run.engine.scheduler_stats());
}

#[test]
fn masks_of_each_group_hold_for_the_rows_too() {
    // Full layers see a prompt both ways, those with windows don't; or none is causal.
    let fields = [("dflash_config", json!({})), ("is_causal", json!(false))];
    for field in fields {
        let dir = tempfile::tempdir().unwrap();
        for file in std::fs::read_dir(testdata::model_dir(MODEL).unwrap()).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
        }
        let path = dir.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config[field.0] = field.1;
        std::fs::write(&path, config.to_string()).unwrap();
        let requests = requests();
        let plain = Run::with(open_at(dir.path(), &exactly(128)), &requests, 1);
        let run = Run::with(open_at(dir.path(), &fast(exactly(128))), &requests, 1);
        run.same_as(&plain, field.0);
        assert!(run.rows.last_layer < plain.rows.last_layer);
        // The one full layer is the last that writes a cache: what its other rows see reaches no logits.
        if field.0 == "is_causal" {
            let causal = Run::new(&exactly(128), &requests, 1);
            assert!(causal.answers[6].logits != plain.answers[6].logits);
        }
    }
}

#[test]
fn a_group_is_built_once_a_step_whatever_the_layers() {
    let run = Run::new(&fast(exactly(40)), &requests(), 1);
    let runner = run.engine.runner();
    let steps = runner.times().steps;
    let groups: Vec<_> =
        runner.groups().iter().map(|g| (g.info().fast_prefill, g.info().layers.len())).collect();
    println!("{groups:?}, {steps} steps");
    assert_eq!(groups.iter().filter(|g| g.0).map(|g| g.1).sum::<usize>(), 3);
    for g in runner.groups() {
        assert_eq!((g.builds() + g.table_updates()) as u64, steps);
    }
    // Steps of decodes alone want every row: the owners' metadata serve.
    assert!(runner.groups().iter().filter(|g| g.info().fast_prefill).all(|g| g.table_updates() > 0));
}

#[test]
fn the_report_says_what_is_in_force_and_what_could_be() {
    let said = |o: &EngineOptions| open(o).report().options["kv_sharing_fast_prefill"].clone();
    let off = said(&options("auto"));
    assert_eq!((off.requested, &*off.in_force), (None, "false"));
    assert!(off.because.unwrap().contains("layers 3-5 read earlier layers' caches"));
    let on = said(&fast(options("auto")));
    assert_eq!((on.requested.as_deref(), &*on.in_force, on.because), (Some("true"), "true", None));
    let engine = open(&fast(options("auto")));
    let groups = engine.report().groups.iter().filter(|g| g.fast_prefill);
    let mut layers: Vec<_> = groups.flat_map(|g| g.layers.clone()).collect();
    layers.sort_unstable();
    assert_eq!(layers, [3, 4, 5]);
}

#[test]
fn models_whose_last_layer_keeps_something_are_refused_by_name() {
    for model in ["tiny-llama", "tiny-bamba", "tiny-mamba2", "tiny-bart"] {
        let dir = testdata::model_dir(model).unwrap();
        let o = fast(options("auto"));
        let e = LlmEngine::open(&dir, &o, &mut |_, _| ()).err().unwrap().to_string();
        let words = ["--kv-sharing-fast-prefill true: is not supported with", "of its own", "leave it out"];
        assert!(words.iter().all(|w| e.contains(w)), "{model}: {e}");
    }
}
