//! Tiny pools that force preemption at chosen moments: the answers are those of a large pool.

use super::fake::{Fake, answer, config};
use crate::kv::KvGroupPolicy;
use crate::scheduler::{RequestId, RequestState};

/// Two requests of 40 + 40 tokens in a pool of pages of one token each, so that the second loses its pages exactly when
/// the pool is full. Returns how many tokens each preempted request had generated.
fn run(pages: usize, caching: bool) -> Vec<usize> {
    let mut fake = Fake::new(config(128, 8), pages + 1, vec![KvGroupPolicy::full(1)], caching);
    let prompts: [Vec<u32>; 2] = [(0..40).collect(), (50..90).collect()];
    for prompt in &prompts {
        fake.add(prompt.clone(), 40).expect("fits alone");
    }
    let mut generated_at_preemption = Vec::new();
    while fake.step() {
        let generated = |id| fake.out.get(id).map_or(0, Vec::len);
        generated_at_preemption.extend(fake.plan.preempted.iter().map(generated));
    }
    fake.run_to_end();
    for (id, prompt) in prompts.iter().enumerate() {
        assert_eq!(fake.out[&RequestId(id as u64)], answer(prompt, 40));
    }
    generated_at_preemption
}

#[test]
fn preempted_after_1_16_and_17_tokens_the_answer_is_the_same() {
    for caching in [false, true] {
        for generated in [1, 16, 17] {
            // After g tokens each request has 40 + g - 1 in the cache, and the next step needs one more of each.
            assert_eq!(run(2 * (40 + generated - 1) + 1, caching)[0], generated);
        }
        assert!(run(2 * 79, caching).is_empty());
    }
}

/// Three requests overfill the pool, so the third is preempted; it resumes when the second has ended, is preempted again
/// when it and the first have grown, and ends after the first.
#[test]
fn a_request_is_preempted_twice() {
    for (caching, block) in [(false, 1), (false, 4), (false, 16), (true, 1), (true, 4), (true, 16)] {
        let mut fake = Fake::new(config(512, 8), 360 / block + 1, vec![KvGroupPolicy::full(block)], caching);
        let requests = [(0..80, 240), (100..180, 80), (200..280, 240)];
        for (prompt, max_tokens) in requests.clone() {
            fake.add(prompt.collect(), max_tokens).expect("fits alone");
        }
        let mut preempted = Vec::new();
        while fake.step() {
            preempted.extend(fake.plan.preempted.iter().map(|id| id.0));
        }
        fake.run_to_end();
        assert_eq!(preempted, [2, 2], "caching {caching}, block {block}");
        for (id, (prompt, max_tokens)) in (0..).map(RequestId).zip(requests) {
            let prompt: Vec<u32> = prompt.collect();
            assert_eq!(fake.out[&id], answer(&prompt, max_tokens), "caching {caching}, block {block}");
        }
        let stats = fake.scheduler.stats();
        assert_eq!(stats.preemptions, 2);
        assert!(caching || stats.recomputed_tokens > 2 * 80);
    }
}

#[test]
fn recomputing_is_prefilling_prompt_and_generated_tokens() {
    let mut fake = Fake::new(config(64, 8), 60, vec![KvGroupPolicy::full(1)], false);
    fake.add((0..20).collect(), 40).expect("fits alone");
    let second = fake.add((50..70).collect(), 20).expect("fits alone");
    while fake.plan.preempted.is_empty() {
        assert!(fake.step());
    }
    assert_eq!(fake.plan.preempted, [second]);
    assert_eq!(fake.scheduler.state(second), Some(RequestState::Preempted));
    let known = fake.scheduler.tokens(second).map_or(0, <[u32]>::len);
    assert!(known > 20, "generated tokens are kept");
    let resumed = loop {
        assert!(fake.step());
        if let Some(r) = fake.plan.requests.iter().find(|r| r.id == second) {
            break r.clone();
        }
    };
    assert_eq!((resumed.num_computed_tokens, resumed.num_new_tokens), (0, known));
    assert!(resumed.is_prefilling && resumed.needs_logits);
    assert_eq!(resumed.remaining_tokens, 40 - known);
    fake.run_to_end();
    assert_eq!(fake.scheduler.stats().recomputed_tokens, known as u64 - 1);
}

#[test]
fn random_prompts_have_no_hits_however_often_they_are_preempted() {
    let mut fake = Fake::new(config(32, 8), 12, vec![KvGroupPolicy::full(4)], true);
    for i in 0..6u32 {
        fake.add((i * 1000..i * 1000 + 9).collect(), 25).expect("fits alone");
    }
    fake.run_to_end();
    assert!(fake.scheduler.stats().preemptions > 0);
    let stats = fake.scheduler.kv().stats();
    assert_eq!((stats.requests, stats.queried_tokens, stats.hit_tokens), (6, 54, 0));
    assert!(stats.resumed_requests > 0);
}

#[test]
fn a_preempted_request_resumes_before_those_that_arrived_after_it() {
    let mut fake = Fake::new(config(64, 2), 60, vec![KvGroupPolicy::full(1)], false);
    let ids = [0, 50, 100].map(|start| fake.add((start..start + 20).collect(), 40).expect("fits alone"));
    while fake.plan.preempted.is_empty() {
        assert!(fake.step());
    }
    assert_eq!(fake.plan.preempted, [ids[1]]);
    while !fake.plan.requests.iter().any(|r| r.id == ids[2]) {
        assert!(fake.step());
    }
    assert_eq!(fake.scheduler.state(ids[1]), Some(RequestState::Decoding), "the second came back before");
    fake.run_to_end();
    assert_eq!(fake.first_tokens, ids);
}
