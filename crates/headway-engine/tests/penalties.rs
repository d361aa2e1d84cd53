//! Bias, penalties and minimal lengths through the engine: every token is the one that the definition, in float64, chooses
//! from the raw logits after the tokens before it, whether it was drafted or not, alone and together, preempted or
//! from a cached prefix.

mod support;

use headway_engine::{
    Engine, EngineOptions, Event, GenerateRequest, LlmEngine,
    engine::{FinishReason, Finished},
    kv::RequestId,
    sampling::SamplingParams,
};
use headway_testkit::testdata;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};
use support::options;

const MODEL: &str = "tiny-llama";

fn open(options: &EngineOptions) -> LlmEngine {
    let dir = testdata::model_dir(MODEL).unwrap();
    LlmEngine::open(&dir, options, &mut |_, _| ()).unwrap()
}

/// An answer with its text and the raw logits of each of its tokens.
struct Answer {
    finished: Finished,
    text: String,
    rows: Vec<Vec<f32>>,
}

/// Runs the requests; `together` queues all at once.
fn run(engine: &mut LlmEngine, requests: &[GenerateRequest], together: bool) -> Vec<Answer> {
    let rows = Arc::new(Mutex::new(HashMap::<RequestId, Vec<Vec<f32>>>::new()));
    let sink = Arc::clone(&rows);
    engine.observe_logits(move |id, row| sink.lock().unwrap().entry(id).or_default().push(row.to_vec()));
    let (mut ids, mut events, mut done, mut texts) = (vec![], vec![], HashMap::new(), HashMap::new());
    for request in requests {
        ids.push(engine.add(request.clone()).unwrap());
        while !(engine.is_idle() || together && ids.len() < requests.len()) {
            engine.step(&mut events).unwrap();
            for event in events.drain(..) {
                match event {
                    Event::Token(id, t) => texts.entry(id).or_insert_with(String::new).push_str(&t.text),
                    Event::Finished(id, f) => drop(done.insert(id, f)),
                    Event::Failed(_, e) => panic!("{e}"),
                }
            }
        }
    }
    let mut rows = rows.lock().unwrap();
    let mut answer = |id: &RequestId| Answer {
        finished: done.remove(id).unwrap(),
        text: texts.remove(id).unwrap_or_default(),
        rows: rows.remove(id).unwrap(),
    };
    ids.iter().map(&mut answer).collect()
}

/// The most likely token by the definition, and how far the next one is.
fn best(row: &[f32], p: &SamplingParams, prompt: &[u32], answer: &[u32], eos: &[u32]) -> (u32, f64) {
    let value = |t: u32| {
        if answer.len() < p.min_tokens && (eos.contains(&t) || p.stop_token_ids.contains(&t)) {
            return f64::NEG_INFINITY;
        }
        let bias: f64 = p.logit_bias.iter().filter(|(of, _)| *of == t).map(|(_, b)| f64::from(*b)).sum();
        let mut x = f64::from(row[t as usize]) + bias;
        if prompt.contains(&t) || answer.contains(&t) {
            let r = f64::from(p.repetition_penalty);
            x = if x > 0.0 { x / r } else { x * r };
        }
        let count = answer.iter().filter(|a| **a == t).count() as f64;
        x - f64::from(p.frequency_penalty) * count - f64::from(p.presence_penalty) * count.min(1.0)
    };
    let mut all: Vec<(f64, u32)> = (0..row.len() as u32).map(|t| (value(t), t)).collect();
    all.sort_by(|a, b| b.0.total_cmp(&a.0));
    (all[0].1, all[0].0 - all[1].0)
}

/// Greedy requests of every kind, with prompts that say things twice.
fn requests() -> Vec<GenerateRequest> {
    let base = SamplingParams { max_tokens: Some(48), ignore_eos: true, ..SamplingParams::greedy() };
    let ways = [
        SamplingParams { presence_penalty: 2.0, ..base.clone() },
        SamplingParams { frequency_penalty: 1.7, ..base.clone() },
        SamplingParams { frequency_penalty: -0.8, presence_penalty: 0.7, ..base.clone() },
        SamplingParams { logit_bias: [(17, -100.0), (30, 4.0), (31, 4.0)].into(), ..base.clone() },
        SamplingParams { min_tokens: 20, stop_token_ids: (0..300).collect(), ..base.clone() },
        SamplingParams {
            repetition_penalty: 1.2,
            presence_penalty: -0.6,
            frequency_penalty: 0.3,
            logit_bias: [(3, 3.0), (250, -2.0)].into(),
            min_tokens: 12,
            stop_token_ids: (100..220).collect(),
            ..base
        },
    ];
    let one = |(i, sampling)| {
        let prompt_ids = (0..30 + 9 * i).map(|t| ((t % (4 + 3 * i) * 13 + i) % 500) as u32).collect();
        GenerateRequest { prompt_ids, sampling, ..GenerateRequest::default() }
    };
    ways.into_iter().enumerate().map(one).collect()
}

fn check(what: &str, engine: &mut LlmEngine, together: bool) -> Vec<Vec<u32>> {
    let (requests, eos) = (requests(), engine.eos_ids().to_vec());
    let answers = run(engine, &requests, together);
    let (mut near, mut tokens) = (0, 0);
    for (i, (request, answer)) in requests.iter().zip(&answers).enumerate() {
        let ids = &answer.finished.token_ids;
        assert_eq!(answer.rows.len(), ids.len(), "{what}, request {i}: a row a token");
        for (n, (row, token)) in answer.rows.iter().zip(ids).enumerate() {
            let (expected, apart) = best(row, &request.sampling, &request.prompt_ids, &ids[..n], &eos);
            tokens += 1;
            near += usize::from(apart < 1e-4);
            assert!(
                *token == expected || apart < 1e-4,
                "{what}, request {i}, token {n}: {token} for {expected}"
            );
        }
        let ended = answer.finished.reason == FinishReason::Stop;
        assert!(ids.len() >= if ended { request.sampling.min_tokens + 1 } else { 48 }, "{what}, request {i}");
    }
    assert!(near * 20 < tokens, "{what}: {near} of {tokens} tokens can't be told");
    answers.into_iter().map(|a| a.finished.token_ids).collect()
}

fn invariant(drafts: usize, memory: u64) -> EngineOptions {
    EngineOptions {
        batch_invariant: true,
        speculative_tokens: Some(drafts),
        prompt_lookup_min: (drafts > 0).then_some(1),
        kv_cache_memory: Some(memory),
        max_num_seqs: Some(6),
        ..options("bfloat16")
    }
}

#[test]
fn every_token_is_the_definition_s() {
    let plain = check("alone", &mut open(&invariant(0, 64 << 20)), false);
    // Without any of it the answers are others.
    let free = |r: GenerateRequest| GenerateRequest {
        sampling: SamplingParams { max_tokens: Some(48), ignore_eos: true, ..SamplingParams::greedy() },
        ..r
    };
    let free: Vec<_> = requests().into_iter().map(free).collect();
    let unchanged = run(&mut open(&invariant(0, 64 << 20)), &free, false);
    for (i, (with, without)) in plain.iter().zip(&unchanged).enumerate() {
        assert_ne!(*with, without.finished.token_ids, "request {i}");
    }
    let mut engine = open(&invariant(0, 64 << 20));
    assert_eq!(check("together", &mut engine, true), plain);
    assert_eq!(check("from cached prefixes", &mut engine, true), plain);
    for together in [false, true] {
        let mut engine = open(&invariant(4, 64 << 20));
        assert_eq!(check("drafted", &mut engine, together), plain);
        let s = engine.speculation_stats().summary();
        assert!(s.accepted_tokens > 0 && s.acceptance_rate < 1.0, "{s}");
    }
    for drafts in [0, 3] {
        let pool = 16 * 3 * 2 * 16 * 128 * 2;
        let mut engine = open(&EngineOptions { no_prefix_caching: true, ..invariant(drafts, pool) });
        assert_eq!(check("preempted", &mut engine, true), plain);
        assert!(engine.scheduler_stats().preemptions > 0, "the small pool forces preemption");
    }
}

/// Stop strings in the first tokens' text are none.
#[test]
fn a_stop_string_counts_after_the_fewest_tokens() {
    let mut engine = open(&options("float32"));
    let ask = |change: &dyn Fn(&mut SamplingParams)| {
        let mut sampling =
            SamplingParams { max_tokens: Some(40), ignore_eos: true, ..SamplingParams::greedy() };
        change(&mut sampling);
        vec![GenerateRequest { prompt_ids: vec![1, 2, 3], sampling, ..GenerateRequest::default() }]
    };
    let mut said = |change: &dyn Fn(&mut SamplingParams)| run(&mut engine, &ask(change), false).remove(0);
    let first = said(&|s| s.max_tokens = Some(6));
    let free = said(&|_| ());
    let letter =
        first.text.chars().find(|c| c.is_ascii_alphanumeric()).expect("a letter in six tokens").to_string();
    let stop = |s: &mut SamplingParams| s.stop = vec![letter.clone()];
    let short = said(&stop);
    assert!(!short.text.contains(&letter) && short.finished.token_ids.len() <= 6);
    let held = said(&|s| {
        stop(s);
        s.min_tokens = 6;
    });
    assert!(held.text.starts_with(&first.text), "{:?} after {:?}", held.text, first.text);
    let rest = &held.text[first.text.len()..];
    assert!(!rest.contains(&letter), "{rest:?}");
    let after = &free.text[first.text.len()..];
    assert_eq!(rest, after.split(&letter).next().unwrap(), "up to the next one");
}

#[test]
fn what_can_not_be_is_refused() {
    let mut engine = open(&options("float32"));
    let mut refused = |sampling: SamplingParams| {
        let request = GenerateRequest { prompt_ids: vec![1, 2, 3], sampling, ..GenerateRequest::default() };
        engine.add(request).unwrap_err().to_string()
    };
    let base = SamplingParams::greedy();
    let e = refused(SamplingParams { logit_bias: [(3, 1.0), (512, 1.0)].into(), ..base.clone() });
    assert_eq!(e, "--logit-bias: token 512 is outside the vocabulary of 512; ids go from 0 to 511");
    let e = refused(SamplingParams { min_tokens: 1_000_000, ..base.clone() });
    assert_eq!(e, "--min-tokens must be at most what there is room for, got 1000000");
    let e = refused(SamplingParams { min_tokens: 9, max_tokens: Some(8), ..base.clone() });
    assert_eq!(e, "--min-tokens must be at most --max-tokens, got 9");
    let e = refused(SamplingParams { presence_penalty: 3.0, ..base });
    assert!(e.starts_with("--presence-penalty must be from -2 to 2"), "{e}");
    assert!(engine.is_idle());
}
