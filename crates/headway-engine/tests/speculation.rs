//! Speculative decoding through the engine: the answers are those of plain decoding, token for token and, with
//! `--batch-invariant`, logit for logit, in chunks and batches, preempted, with cached prefixes, ended by stop strings
//! and end-of-sequence tokens; and what start-up refuses.

mod support;

use headway_attention::{AttentionBackend, Registry, RuleBook, Standard, process::rules::KernelBlockSize};
use headway_cpu::{
    CpuAttn, CpuExec,
    backends::cpu_attn::{CpuAttnBuilder, CpuAttnConfig, CpuAttnLayer},
};
use headway_engine::{
    Engine, EngineOptions, Event, GenerateRequest, LlmEngine, engine::FinishReason, engine::Finished,
    kv::RequestId, sampling::SamplingParams, speculation::SpeculationStats,
};
use headway_testkit::testdata;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};
use support::options;

/// What came of a request: its account, its text, its log-probabilities, and a digest of the logits it was sampled from.
struct Answer {
    finished: Finished,
    text: String,
    logprobs: Vec<Vec<(u32, u32)>>,
    digest: u64,
}

/// Text, tokens, and for each token the most likely ones with the bits of their log-probabilities.
type Said = (String, Vec<u32>, Vec<Vec<(u32, u32)>>);

struct Run {
    answers: Vec<Answer>,
    stats: SpeculationStats,
    steps: u64,
    preemptions: u64,
}

fn open(model: &str, options: &EngineOptions) -> Result<LlmEngine, String> {
    let dir = testdata::model_dir(model).unwrap();
    LlmEngine::open(&dir, options, &mut |_, _| ()).map_err(|e| e.to_string())
}

/// Runs the requests; `together` queues all at once, otherwise one after the other.
fn run(engine: &mut LlmEngine, requests: &[GenerateRequest], together: bool) -> Run {
    let digests = Arc::new(Mutex::new(HashMap::<RequestId, u64>::new()));
    let sink = digests.clone();
    engine.observe_logits(move |id, row| {
        let mut all = sink.lock().unwrap();
        let h = all.entry(id).or_insert(0xcbf2_9ce4_8422_2325);
        *h = row.iter().fold(*h, |h, x| (h ^ u64::from(x.to_bits())).wrapping_mul(0x0000_0100_0000_01b3));
    });
    let (mut ids, mut events) = (vec![], vec![]);
    let mut done: HashMap<RequestId, Finished> = HashMap::new();
    let mut said: HashMap<RequestId, Said> = HashMap::new();
    for request in requests {
        ids.push(engine.add(request.clone()).unwrap());
        if together && ids.len() < requests.len() {
            continue;
        }
        while !engine.is_idle() {
            engine.step(&mut events).unwrap();
            for event in events.drain(..) {
                match event {
                    Event::Token(id, t) => {
                        assert!(!done.contains_key(&id), "a token after the end");
                        let (text, ids, logprobs) = said.entry(id).or_default();
                        text.push_str(&t.text);
                        ids.push(t.token_id);
                        let row = t.logprobs.map(|l| l.top);
                        let bits = |row: Vec<headway_engine::sampling::TokenLogprob>| {
                            row.iter().map(|t| (t.token_id, t.logprob.to_bits())).collect()
                        };
                        logprobs.extend(row.map(bits));
                    }
                    Event::Finished(id, f) => drop(done.insert(id, f)),
                    Event::Failed(_, e) => panic!("{e}"),
                }
            }
        }
    }
    let digests = digests.lock().unwrap();
    let answer = |id: &RequestId| {
        let (text, ids, logprobs) = said.remove(id).unwrap();
        let finished = done.remove(id).unwrap();
        assert_eq!(finished.token_ids, ids, "every token was told");
        Answer { finished, text, logprobs, digest: digests[id] }
    };
    let stats = engine.scheduler_stats();
    Run {
        answers: ids.iter().map(answer).collect(),
        stats: engine.speculation_stats().clone(),
        steps: stats.steps,
        preemptions: stats.preemptions,
    }
}

/// Prompts that say things twice; a third greedy, the others sampled with a seed, some with penalties, a bias, or held open.
fn requests() -> Vec<GenerateRequest> {
    let lengths = [5, 17, 33, 48, 64, 97];
    let one = |(i, n): (usize, usize)| {
        let prompt_ids = (0..n).map(|t| ((t % (3 + 5 * i) * 13 + i) % 500) as u32).collect();
        let base = SamplingParams {
            max_tokens: Some(40 + i),
            ignore_eos: true,
            logprobs: Some(3),
            ..SamplingParams::greedy()
        };
        let sampling = match i % 3 {
            0 => base,
            1 if i > 3 => SamplingParams {
                temperature: 0.3,
                presence_penalty: 0.2,
                frequency_penalty: 0.1,
                seed: Some(i as u64),
                ..base
            },
            1 => SamplingParams { temperature: 0.4, top_k: 20, seed: Some(i as u64), ..base },
            2 if i > 3 => SamplingParams {
                temperature: 0.3,
                logit_bias: [(7, 1.5), (11, -100.0)].into(),
                min_tokens: 30,
                stop_token_ids: (0..250).collect(),
                seed: Some(i as u64),
                ..base
            },
            _ => SamplingParams {
                temperature: 0.6,
                top_p: 0.9,
                repetition_penalty: 0.8,
                seed: Some(i as u64),
                ..base
            },
        };
        GenerateRequest { prompt_ids, sampling, ..GenerateRequest::default() }
    };
    lengths.into_iter().enumerate().map(one).collect()
}

fn drafting(k: usize, base: EngineOptions) -> EngineOptions {
    EngineOptions {
        speculative_tokens: Some(k),
        // Single tokens too, so that many drafts are wrong.
        prompt_lookup_min: (k > 0).then_some(1),
        ..base
    }
}

fn invariant(chunk: usize, caching: bool, memory: u64) -> EngineOptions {
    EngineOptions {
        batch_invariant: true,
        max_num_batched_tokens: Some(chunk),
        max_num_seqs: Some(chunk.min(6)),
        no_prefix_caching: !caching,
        kv_cache_memory: Some(memory),
        ..EngineOptions::default()
    }
}

fn assert_same(what: &str, got: &Run, want: &Run) {
    for (i, (g, w)) in got.answers.iter().zip(&want.answers).enumerate() {
        assert_eq!(g.finished.token_ids, w.finished.token_ids, "{what}, request {i}");
        assert_eq!(g.logprobs, w.logprobs, "{what}, request {i}");
        assert_eq!(g.digest, w.digest, "{what}, request {i}: logits");
        assert_eq!((&g.text, g.finished.reason), (&w.text, w.finished.reason), "{what}, request {i}");
        assert_eq!(g.finished.timings.decode_tokens, w.finished.timings.decode_tokens);
    }
}

/// Whatever surrounds a request, its answer is the plain one.
fn sameness(model: &str, small_pool: u64) {
    let of = |k: usize, base: EngineOptions, together: bool| {
        run(&mut open(model, &drafting(k, base)).unwrap(), &requests(), together)
    };
    let plain = of(0, invariant(512, false, 64 << 20), false);
    assert_eq!(plain.stats, SpeculationStats::default());
    for k in [1, 4] {
        let alone = of(k, invariant(512, false, 64 << 20), false);
        println!("{model}, k {k}: {} steps of {}; {}", alone.steps, plain.steps, alone.stats.summary());
        assert_same(&format!("{model} alone, k {k}"), &alone, &plain);
        let s = alone.stats.summary();
        assert!(s.accepted_tokens > 0 && s.acceptance_rate < 1.0 && alone.steps < plain.steps);
        let own: u64 = alone.answers.iter().map(|a| a.finished.speculation.drafts).sum();
        assert_eq!(own, alone.stats.drafts);
    }
    for (what, chunk, caching, together) in [
        ("together", 512, false, true),
        ("chunks of 7", 7, false, true),
        ("chunks of 40", 40, false, true),
        ("cached prefixes", 512, true, false),
        ("cached prefixes together", 64, true, true),
    ] {
        let r = of(4, invariant(chunk, caching, 64 << 20), together);
        assert_same(&format!("{model}, {what}"), &r, &plain);
        assert!(r.stats.summary().accepted_tokens > 0, "{what}");
    }
    let preempted = of(4, invariant(64, false, small_pool), true);
    assert_same(&format!("{model}, a pool too small for all"), &preempted, &plain);
    assert!(preempted.preemptions > 0, "the small pool forces preemption");
    assert!(preempted.stats.summary().accepted_tokens > 0);
}

#[test]
fn full_attention() {
    sameness("tiny-llama", 14 * 3 * 2 * 16 * 128 * 2);
}

#[test]
fn windows_and_full_attention() {
    sameness("tiny-gemma3", 26 * 2 * 2 * 16 * 128 * 2);
}

#[test]
fn latent_attention() {
    sameness("tiny-deepseek-v2-yarn", 14 * 2 * 16 * 64 * 2);
}

/// Every other architecture: in its own type, without batch invariance the tokens alone, and with it everything.
/// Those with states are refused with the way out.
#[test]
fn every_tiny_architecture() {
    let mut drafted = 0;
    for model in testdata::model_names().unwrap() {
        let base = || EngineOptions { kv_cache_memory: Some(64 << 20), ..options("float32") };
        let mut engine = match open(&model, &drafting(3, base())) {
            Ok(engine) => engine,
            Err(e) => {
                let plain = open(&model, &base()).err();
                match plain {
                    Some(plain) => assert_eq!(e, plain, "{model}: not because of the drafts"),
                    None => assert!(
                        e.contains("MAMBA2_ATTN") && e.contains("--speculative-tokens 0"),
                        "{model}: {e}"
                    ),
                }
                continue;
            }
        };
        let thresholds = engine.report().groups.iter().filter_map(|g| g.reorder_batch_threshold);
        assert!(thresholds.min().is_none_or(|t| t == 4), "{model}: a decode has 1 + 3 query tokens");
        let (vocab, encodes) =
            (engine.runner().vocab_size() as u32, engine.runner().model().encoder.is_some());
        let of_model = |mut r: GenerateRequest| {
            r.sampling.stop_token_ids.retain(|id| *id < vocab / 2);
            GenerateRequest {
                prompt_ids: r.prompt_ids.iter().map(|id| id % vocab).collect(),
                encoder_ids: if encodes { (5..25).collect() } else { vec![] },
                ..r
            }
        };
        let all: Vec<_> = requests().into_iter().map(of_model).collect();
        let greedy: Vec<_> = all.iter().step_by(3).cloned().collect();
        let got = run(&mut engine, &greedy, true);
        let want = run(&mut open(&model, &base()).unwrap(), &greedy, true);
        for (i, (g, w)) in got.answers.iter().zip(&want.answers).enumerate() {
            assert_eq!(g.finished.token_ids, w.finished.token_ids, "{model}, request {i}");
        }
        let invariant = || EngineOptions { batch_invariant: true, ..base() };
        let exact = run(&mut open(&model, &drafting(3, invariant())).unwrap(), &all, true);
        let want = run(&mut open(&model, &invariant()).unwrap(), &all, true);
        assert_same(&model, &exact, &want);
        println!("{model}: {} steps of {}; {}", exact.steps, want.steps, exact.stats.summary());
        drafted += 1;
    }
    assert!(drafted >= 5, "{drafted} models were drafted for");
}

/// A stop string, a stop token and the last allowed token inside what was accepted at once.
#[test]
fn an_answer_ends_at_the_same_token() {
    let model = "tiny-llama";
    // A penalty below 1 favours tokens that came before: the answer goes round in circles, so drafts are accepted in
    // full.
    let ask = |n: usize, change: &dyn Fn(&mut SamplingParams)| {
        let prompt_ids = (0..40).map(|t| (t % 7 * 13) as u32).collect();
        let mut sampling = SamplingParams {
            max_tokens: Some(n),
            ignore_eos: true,
            repetition_penalty: 0.3,
            ..SamplingParams::greedy()
        };
        change(&mut sampling);
        GenerateRequest { prompt_ids, sampling, ..GenerateRequest::default() }
    };
    let memory = || EngineOptions { kv_cache_memory: Some(64 << 20), ..options("float32") };
    let mut plain = open(model, &memory()).unwrap();
    let mut engine = open(model, &drafting(6, memory())).unwrap();
    let long = run(&mut plain, &[ask(120, &|_| ())], false).answers.remove(0);
    let has_text = !long.text.is_empty();
    let mut inside = 0;
    for cut in 60..90 {
        let token = long.finished.token_ids[cut];
        let tail = long.text.char_indices().nth(cut).map(|(at, _)| long.text[at..].chars().take(4).collect());
        let mut all = vec![ask(cut, &|_| ()), ask(120, &|s| s.stop_token_ids = vec![token])];
        if let Some(tail) = tail.filter(|t: &String| has_text && !t.is_empty()) {
            all.push(ask(120, &|s| s.stop = vec![tail.clone()]));
        }
        let (got, want) = (run(&mut engine, &all, true), run(&mut plain, &all, true));
        for (i, (g, w)) in got.answers.iter().zip(&want.answers).enumerate() {
            assert_eq!(g.finished.token_ids, w.finished.token_ids, "cut {cut}, request {i}");
            assert_eq!((&g.text, g.finished.reason), (&w.text, w.finished.reason), "cut {cut}, request {i}");
            assert_eq!(g.finished.timings.decode_tokens, w.finished.timings.decode_tokens);
            let n = w.finished.token_ids.len();
            inside += usize::from(g.finished.speculation.accepted.iter().sum::<u64>() as usize * 2 > n);
        }
        assert_eq!(want.answers[0].finished.reason, FinishReason::Length);
        assert_eq!(got.answers[0].finished.token_ids.len(), cut);
    }
    assert!(inside > 10, "{inside} answers came mostly out of drafts");
}

/// `CPU_ATTN` under a name and a rule of its own: decodes of one query token.
enum OneToken {}

impl AttentionBackend for OneToken {
    const CONTRACT: u32 = 1;
    type Exec = CpuExec;
    type Kind = Standard;
    type Config = CpuAttnConfig;
    type Builder = CpuAttnBuilder;
    type Impl = CpuAttnLayer;

    fn rules() -> RuleBook {
        let kernel_block_sizes = vec![KernelBlockSize::Exact(16)];
        let name = "ONE_TOKEN".into();
        RuleBook { name, kernel_block_sizes, reorder_batch_threshold: Some(1), ..CpuAttn::rules() }
    }
}

#[test]
fn a_backend_of_one_query_token_is_refused_before_weights_are_loaded() {
    let mut registry = Registry::default();
    registry.register::<OneToken>().unwrap();
    headway_cpu::register(&mut registry).unwrap();
    let with = |k: usize, backend: Option<&str>| EngineOptions {
        registry: Some(registry.clone()),
        attention_backend: backend.map(str::to_owned),
        ..drafting(k, options("float32"))
    };
    let e = open("tiny-llama", &with(2, None)).err().unwrap();
    for words in ["--speculative-tokens 2", "ONE_TOKEN", "takes 1 query token", "set --speculative-tokens 0"]
    {
        assert!(e.contains(words), "{e}");
    }
    assert!(e.contains("--attention-backend"), "{e}");
    assert!(open("tiny-llama", &with(0, None)).is_ok());
    assert!(open("tiny-llama", &with(2, Some("CPU_ATTN"))).is_ok());
}

#[test]
fn a_step_must_hold_a_decode_with_its_drafts() {
    let few = EngineOptions {
        max_num_batched_tokens: Some(4),
        max_num_seqs: Some(2),
        ..drafting(4, options("float32"))
    };
    let e = open("tiny-llama", &few).err().unwrap();
    assert!(e.contains("--speculative-tokens 4") && e.contains("--max-num-batched-tokens"), "{e}");
    let huge = EngineOptions {
        max_num_batched_tokens: Some(usize::MAX),
        ..drafting(usize::MAX - 1, options("float32"))
    };
    assert!(open("tiny-llama", &huge).is_err(), "an absurd number is no panic");
}
