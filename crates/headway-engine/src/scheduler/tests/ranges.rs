//! Ranges that are computed whole: where steps end, who waits for room, what never fits.

use super::fake::config;
use crate::kv::{KvCacheManager, KvGroupPolicy};
use crate::scheduler::{NewRequest, Scheduler, SchedulerError, StepOutcome, StepPlan};
use std::ops::Range;

fn scheduler(budget: usize, seqs: usize) -> Scheduler {
    let kv = KvCacheManager::new(200, vec![KvGroupPolicy::full(4)], true).unwrap();
    Scheduler::new(config(budget, seqs), kv).unwrap()
}

fn asked(prompt: usize, max_tokens: usize, ranges: &[Range<usize>]) -> NewRequest {
    let tokens = (0..prompt as u32).map(|t| t * 3 + prompt as u32).collect();
    NewRequest { bidirectional_ranges: ranges.into(), ..NewRequest::new(tokens, max_tokens) }
}

/// Runs all; of each step the requests' numbers with their first and last position.
fn steps(s: &mut Scheduler) -> Vec<Vec<(u64, Range<usize>)>> {
    let (mut all, mut plan) = (vec![], StepPlan::default());
    loop {
        s.schedule(&mut plan).unwrap();
        if plan.is_empty() {
            return all;
        }
        assert!(plan.num_tokens() <= s.config().max_num_batched_tokens);
        all.push(plan.requests.iter().map(|r| (r.id.0, r.num_computed_tokens..r.seq_len())).collect());
        let outcome = |r: &crate::scheduler::ScheduledRequest| StepOutcome {
            accepted_drafts: 0,
            token: 1,
            finished: r.remaining_tokens == 1,
        };
        let outcomes: Vec<_> = plan.sampled().map(outcome).collect();
        s.finish_step(&plan, &outcomes).unwrap();
    }
}

#[test]
fn chunks_end_at_ranges_or_outside() {
    let mut s = scheduler(10, 4);
    s.add(asked(30, 1, &[3..5, 8..14, 14..20, 29..30])).unwrap();
    let ends: Vec<_> = steps(&mut s).iter().map(|step| step[0].1.clone()).collect();
    assert_eq!(ends, [0..8, 8..14, 14..24, 24..30]);
}

#[test]
fn a_range_without_room_waits_and_nobody_is_let_in_before_it() {
    let mut s = scheduler(10, 4);
    s.add(asked(4, 4, &[])).unwrap();
    s.add(asked(20, 1, std::slice::from_ref(&(6..16)))).unwrap();
    s.add(asked(5, 1, &[])).unwrap();
    let steps = steps(&mut s);
    // Request 0 decodes, and leaves 9 tokens a step, where 10 are needed; the last one waits meanwhile.
    assert_eq!(steps[0], [(0, 0..4), (1, 0..6)]);
    assert!(steps[1..4].iter().all(|s| s.len() == 1 && s[0].0 == 0), "{steps:?}");
    assert_eq!(steps[4], [(1, 6..16)]);
    assert_eq!(steps[5], [(1, 16..20), (2, 0..5)]);
}

#[test]
fn a_whole_prompt_has_its_step_apart() {
    let mut s = scheduler(10, 4);
    for n in [9, 6] {
        s.add(NewRequest { whole_prompt: true, ..asked(n, 2, &[]) }).unwrap();
    }
    assert_eq!(steps(&mut s), [vec![(0, 0..9)], vec![(0, 9..10), (1, 0..6)], vec![(1, 6..7)]]);
}

#[test]
fn what_no_step_has_room_for_is_refused() {
    let mut s = scheduler(10, 4);
    let e = s.add(asked(30, 1, &[1..3, 4..15])).unwrap_err();
    assert_eq!(e, SchedulerError::RangeTooLong { range: 4..15, room: 10 });
    assert!(e.to_string().contains("raise --max-num-batched-tokens to 11"), "{e}");
    let e = s.add(NewRequest { whole_prompt: true, ..asked(11, 1, &[]) }).unwrap_err();
    assert_eq!(e, SchedulerError::RangeTooLong { range: 0..11, room: 10 });
}
