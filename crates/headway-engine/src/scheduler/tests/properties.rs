//! Random requests, limits, pools, aborts and cancelled steps.

use proptest::prelude::*;

use super::fake::{Fake, answer};
use crate::kv::KvGroupPolicy;
use crate::scheduler::{RequestId, SchedulerConfig};

fn group_sets() -> impl Strategy<Value = Vec<KvGroupPolicy>> {
    use KvGroupPolicy as P;
    prop_oneof![
        Just(vec![P::full(4)]),
        Just(vec![P::full(1)]),
        Just(vec![P::full(4), P::sliding_window(4, 6)]),
        Just(vec![P::full(4), P::sliding_window(2, 3), P::sliding_window(8, 20)]),
        Just(vec![P::full(3), P::chunked_local(2, 5)]),
        Just(vec![P::sliding_window(4, 7)]),
    ]
}

prop_compose! {
    fn limits()(
        seqs in 1usize..6,
        spare in 0usize..20,
        threshold in prop::option::of(1usize..8),
        decode_first in prop::option::of(1usize..3),
        num_speculative_tokens in prop_oneof![Just(0), 1usize..6],
    ) -> SchedulerConfig {
        SchedulerConfig {
            max_num_batched_tokens: seqs + spare,
            max_num_seqs: seqs,
            max_model_len: 60,
            long_prefill_token_threshold: threshold,
            decode_first_threshold: decode_first.map(|t| t + num_speculative_tokens),
            num_speculative_tokens,
        }
    }
}

/// Prompts from few families, so that prefixes are shared.
fn prompt(seed: u16) -> Vec<u32> {
    let (family, len) = (u32::from(seed % 3), 1 + u32::from(seed / 3 % 30));
    (0..len).map(|i| family * 100 + i).collect()
}

#[derive(Clone, Debug)]
enum Event {
    Add(u16, usize),
    Abort(u16),
    AbortInStep(u16),
    Cancel,
    Step(u8),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (any::<u16>(), 1usize..25).prop_map(|(seed, max)| Event::Add(seed, max)),
        1 => any::<u16>().prop_map(Event::Abort),
        1 => any::<u16>().prop_map(Event::AbortInStep),
        1 => Just(Event::Cancel),
        6 => (1u8..12).prop_map(Event::Step),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]
    #[test]
    fn every_request_ends_with_its_own_answer(
        groups in group_sets(),
        limits in limits(),
        blocks in 8usize..50,
        caching in any::<bool>(),
        mistakes in any::<u64>(),
        events in prop::collection::vec(event(), 1..40),
    ) {
        let in_order = limits.long_prefill_token_threshold.is_none();
        let mut fake = Fake::new(limits, blocks, groups, caching).with_mistakes(mistakes);
        let mut asked: Vec<(Vec<u32>, usize)> = Vec::new();
        let mut aborted = Vec::new();
        for event in events {
            let some = |seed: u16| RequestId(u64::from(seed) % asked.len().max(1) as u64);
            match event {
                Event::Add(seed, max) => {
                    let total = prompt(seed).len() + max;
                    let added = fake.add(prompt(seed), max);
                    prop_assert_eq!(added.is_ok(), total <= fake.scheduler.max_total_tokens());
                    if added.is_ok() {
                        asked.push((prompt(seed), max));
                    }
                }
                Event::Abort(seed) => {
                    if fake.scheduler.abort(some(seed)) {
                        aborted.push(some(seed));
                        fake.check_pool();
                    }
                }
                Event::AbortInStep(seed) => {
                    fake.schedule().unwrap();
                    if !fake.plan.is_empty() {
                        if fake.scheduler.abort(some(seed)) {
                            aborted.push(some(seed));
                        }
                        let outcomes = fake.compute();
                        fake.scheduler.finish_step(&fake.plan, &outcomes).unwrap();
                        fake.check_pool();
                    }
                }
                Event::Cancel => {
                    fake.schedule().unwrap();
                    if !fake.plan.is_empty() {
                        fake.scheduler.cancel_step().unwrap();
                        fake.check_pool();
                    }
                }
                Event::Step(times) => (0..times).for_each(|_| { fake.step(); }),
            }
        }
        fake.run_to_end();
        for (id, (prompt, max_tokens)) in (0..).map(RequestId).zip(&asked) {
            let (expected, out) = (answer(prompt, *max_tokens), fake.out.remove(&id).unwrap_or_default());
            if aborted.contains(&id) {
                prop_assert_eq!(&expected[..out.len()], &out[..]);
            } else {
                prop_assert_eq!(expected, out);
            }
        }
        if in_order {
            prop_assert!(fake.first_tokens.is_sorted(), "first tokens come in the order of arrival");
        }
        let stats = fake.scheduler.stats();
        prop_assert_eq!(stats.finished + stats.aborted, asked.len() as u64);
    }

    /// Work is conserved: with a pool and sequence limits that hold nobody back, every step spends its whole budget or
    /// leaves no prefill and nobody waiting.
    #[test]
    fn no_budget_is_left_while_work_waits(
        seqs in 4usize..10,
        spare in 0usize..20,
        requests in prop::collection::vec((any::<u16>(), 1usize..20), 1..5),
    ) {
        let limits = SchedulerConfig {
            max_num_batched_tokens: seqs + spare,
            max_num_seqs: seqs,
            max_model_len: 60,
            ..SchedulerConfig::default()
        };
        let mut fake = Fake::new(limits, 400, vec![KvGroupPolicy::full(4)], false);
        for (seed, max) in requests {
            fake.add(prompt(seed), max).unwrap();
        }
        let budget = seqs + spare;
        while fake.step() {
            let all_done = fake.plan.requests.iter().all(|r| r.needs_logits);
            let stats = fake.scheduler.stats();
            prop_assert!(fake.plan.num_tokens() == budget || (all_done && stats.waiting == 0));
            prop_assert_eq!(stats.recomputed_tokens + stats.preemptions, 0);
        }
    }
}
