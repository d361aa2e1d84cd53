//! The answer to a request does not depend on its neighbours, on chunking, on preemption, on caching or on
//! threads: with `--batch-invariant`, token for token and logit for logit, sampled with a seed.

mod support;

use headway_engine::{
    Engine, EngineOptions, Event, GenerateRequest, LlmEngine, kv::RequestId, sampling::SamplingParams,
};
use headway_testkit::testdata;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

/// Prompts of many lengths, some with a common beginning of several blocks.
fn requests() -> Vec<GenerateRequest> {
    let lengths = [1, 2, 15, 16, 17, 31, 33, 50, 64, 97];
    let prompt = |i: usize, n: usize| -> Vec<u32> {
        (0..n)
            .map(|t| if i.is_multiple_of(2) { (t * 13 + 5) % 500 } else { (t * 7 + i * 31) % 500 } as u32)
            .collect()
    };
    let sampling = |i: usize| SamplingParams {
        max_tokens: Some(12 + i),
        temperature: 0.9,
        top_p: 0.95,
        seed: Some(i as u64),
        ignore_eos: true,
        ..SamplingParams::default()
    };
    let one = |(i, n): (usize, usize)| GenerateRequest {
        prompt_ids: prompt(i, n),
        sampling: sampling(i),
        ..GenerateRequest::default()
    };
    lengths.into_iter().enumerate().map(one).collect()
}

/// Token ids, and the bits of every row of logits in a digest.
type Answer = (Vec<u32>, u64);

fn digest(seed: u64, row: &[f32]) -> u64 {
    row.iter().fold(seed, |h, x| (h ^ u64::from(x.to_bits())).wrapping_mul(0x0000_0100_0000_01b3))
}

struct Run {
    answers: Vec<Answer>,
    preemptions: u64,
    largest_batch: usize,
}

/// Runs the requests; `together` queues all at once, otherwise one after the other.
fn run(model: &str, options: &EngineOptions, together: bool) -> Run {
    let dir = testdata::model_dir(model).unwrap();
    let mut engine = LlmEngine::open(&dir, options, &mut |_, _| ()).unwrap();
    let digests = Arc::new(Mutex::new(HashMap::<RequestId, u64>::new()));
    let sink = digests.clone();
    engine.observe_logits(move |id, row| {
        let mut all = sink.lock().unwrap();
        let entry = all.entry(id).or_insert(0xcbf2_9ce4_8422_2325);
        *entry = digest(*entry, row);
    });
    let (mut ids, mut done, mut events) = (vec![], HashMap::new(), vec![]);
    let drain = |engine: &mut LlmEngine, done: &mut HashMap<RequestId, Vec<u32>>, events: &mut Vec<Event>| {
        while !engine.is_idle() {
            engine.step(events).unwrap();
            for event in events.drain(..) {
                match event {
                    Event::Finished(id, f) => drop(done.insert(id, f.token_ids)),
                    Event::Failed(_, e) => panic!("{e}"),
                    Event::Token(..) => {}
                }
            }
        }
    };
    for request in requests() {
        ids.push(engine.add(request).unwrap());
        if !together {
            drain(&mut engine, &mut done, &mut events);
        }
    }
    drain(&mut engine, &mut done, &mut events);
    let stats = engine.scheduler_stats();
    let digests = digests.lock().unwrap();
    Run {
        answers: ids.iter().map(|id| (done[id].clone(), digests[id])).collect(),
        preemptions: stats.preemptions,
        largest_batch: stats.batch_sizes.iter().rposition(|n| *n > 0).unwrap_or(0),
    }
}

fn options(chunk: usize, no_prefix_caching: bool, threads: usize, memory: u64) -> EngineOptions {
    EngineOptions {
        batch_invariant: true,
        max_num_batched_tokens: Some(chunk),
        max_num_seqs: Some(chunk.min(10)),
        no_prefix_caching,
        threads: Some(threads),
        kv_cache_memory: Some(memory),
        ..EngineOptions::default()
    }
}

fn sameness(model: &str, small_pool: u64) {
    let reference = run(model, &options(512, true, 1, 64 << 20), false);
    let same = |what: &str, run: Run| {
        for (i, (got, want)) in run.answers.iter().zip(&reference.answers).enumerate() {
            assert_eq!(got, want, "{model}, request {i}, {what}");
        }
        run
    };
    let together = same("together", run(model, &options(512, true, 1, 64 << 20), true));
    assert!(together.largest_batch > 5, "they ran together: {}", together.largest_batch);
    same("two threads", run(model, &options(512, true, 2, 64 << 20), true));
    for chunk in [1, 7, 40] {
        same(&format!("chunks of {chunk}"), run(model, &options(chunk, true, 1, 64 << 20), true));
    }
    same("cached prefixes, one by one", run(model, &options(512, false, 1, 64 << 20), false));
    same("cached prefixes, together", run(model, &options(64, false, 2, 64 << 20), true));
    let preempted = same("a pool too small for all", run(model, &options(64, true, 1, small_pool), true));
    assert!(preempted.preemptions > 0, "the small pool forces preemption");
}

#[test]
fn full_attention() {
    // 12 pages of 3 layers x 2 heads x 16 tokens x 128 bfloat16.
    sameness("tiny-llama", 14 * 3 * 2 * 16 * 128 * 2);
}

#[test]
fn windows_and_full_attention() {
    sameness("tiny-gemma3", 26 * 2 * 2 * 16 * 128 * 2);
}

#[test]
fn experts_and_sinks() {
    sameness("tiny-qwen3-moe", 14 * 3 * 2 * 16 * 64 * 2);
    sameness("tiny-gpt-oss", 26 * 2 * 2 * 16 * 64 * 2);
}

/// Under batch invariance every row of latent attention is computed as a decode.
#[test]
fn latent_attention() {
    sameness("tiny-deepseek-v2-yarn", 14 * 2 * 16 * 64 * 2);
}
