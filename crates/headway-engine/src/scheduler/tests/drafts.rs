//! Drafted tokens in a step: what budget, pages and lengths leave them, and what stands afterwards.

use super::fake::{Fake, answer, config};
use crate::kv::{Admission, KvGroupPolicy};
use crate::scheduler::{BatchClass, RequestId, SchedulerConfig, SchedulerError, StepOutcome, StepPlan};

fn drafting(tokens: usize, seqs: usize, k: usize) -> SchedulerConfig {
    SchedulerConfig { num_speculative_tokens: k, decode_first_threshold: Some(1 + k), ..config(tokens, seqs) }
}

/// Plans a step in which every decode is offered `token` over and over.
fn plan(fake: &mut Fake, token: u32) -> Vec<(RequestId, usize)> {
    let scheduler = &mut fake.scheduler;
    scheduler
        .schedule_drafting(&mut fake.plan, &mut |_, _, most, out| out.extend(vec![token; most]))
        .unwrap();
    fake.plan.requests.iter().map(|r| (r.id, r.num_draft_tokens())).collect()
}

#[test]
fn answers_are_those_without_drafts_in_fewer_steps() {
    let run = |k: usize, blocks: usize, groups: &[KvGroupPolicy], caching: bool| {
        let mut fake = Fake::new(drafting(24, 4, k), blocks, groups.to_vec(), caching).with_mistakes(7);
        let asked: Vec<(Vec<u32>, usize)> = (0..6).map(|i| ((i..i + 9).collect(), 30)).collect();
        let ids: Vec<_> = asked.iter().map(|(p, n)| fake.add(p.clone(), *n).unwrap()).collect();
        fake.run_to_end();
        for (id, (prompt, max_tokens)) in ids.iter().zip(&asked) {
            assert_eq!(fake.out[id], answer(prompt, *max_tokens), "k {k}");
        }
        let stats = fake.scheduler.stats();
        (stats.steps, stats.preemptions, fake.accepted)
    };
    let window = [KvGroupPolicy::full(4), KvGroupPolicy::sliding_window(2, 3)];
    for groups in [&window[..1], &window] {
        for caching in [false, true] {
            let (plain, _, none) = run(0, 400, groups, caching);
            let (drafted, _, accepted) = run(4, 400, groups, caching);
            assert_eq!(none, 0);
            assert!(drafted * 2 < plain && accepted > 60, "{plain} steps, {drafted} with drafts, {accepted}");
            let (_, preemptions, accepted) = run(4, 30, groups, caching);
            assert!(preemptions > 0 && accepted > 0, "the small pool preempts requests that draft");
        }
    }
}

#[test]
fn prompts_come_before_drafts_and_decodes_before_both() {
    let mut fake = Fake::new(drafting(10, 8, 4), 200, vec![KvGroupPolicy::full(4)], false);
    let a = fake.add((0..4).collect(), 20).unwrap();
    assert!(fake.step());
    assert_eq!(plan(&mut fake, 99), [(a, 4)]);
    fake.scheduler.cancel_step().unwrap();
    let b = fake.add((100..117).collect(), 20).unwrap();
    assert_eq!(plan(&mut fake, 99), [(a, 0), (b, 0)], "the prompt takes the rest of the budget");
    let outcomes = fake.compute();
    fake.scheduler.finish_step(&fake.plan, &outcomes).unwrap();
    assert_eq!(plan(&mut fake, 99), [(a, 1), (b, 0)], "what its end leaves goes to the draft");
    assert_eq!(fake.plan.requests[0].class(5), BatchClass::Decode);
    assert_eq!(fake.plan.requests[1].num_new_tokens, 8);
    let outcomes = fake.compute();
    fake.scheduler.finish_step(&fake.plan, &outcomes).unwrap();
    assert_eq!(plan(&mut fake, 99), [(a, 4), (b, 4)]);
}

#[test]
fn no_token_is_drafted_after_the_last() {
    let mut fake = Fake::new(drafting(64, 8, 6), 200, vec![KvGroupPolicy::full(4)], false);
    let id = fake.add((0..4).collect(), 4).unwrap();
    assert!(fake.step());
    // One of four tokens is there; a step yields at most three.
    assert_eq!(plan(&mut fake, 99), [(id, 2)]);
    fake.scheduler.cancel_step().unwrap();
    fake.run_to_end();
    assert_eq!(fake.out[&id], answer(&[0, 1, 2, 3], 4));
}

#[test]
fn drafts_take_free_pages_alone() {
    // Two requests of 4 tokens fill the pool but for one page, of one token each.
    let mut fake = Fake::new(drafting(64, 8, 3), 12, vec![KvGroupPolicy::full(1)], false);
    let ids = [0, 10].map(|first| fake.add((first..first + 4).collect(), 5).unwrap());
    assert!(fake.step());
    // 3 pages are free: the decodes take two of them.
    assert_eq!(plan(&mut fake, 99), [(ids[0], 1), (ids[1], 0)]);
    assert!(fake.plan.preempted.is_empty());
    fake.scheduler.cancel_step().unwrap();
    fake.run_to_end();
    for (id, first) in ids.into_iter().zip([0, 10]) {
        assert_eq!(fake.out[&id], answer(&(first..first + 4).collect::<Vec<_>>(), 5));
    }
}

#[test]
fn only_accepted_tokens_are_kept_and_hashed() {
    let mut fake = Fake::new(drafting(64, 8, 4), 50, vec![KvGroupPolicy::full(4)], true);
    let id = fake.add((0..6).collect(), 20).unwrap();
    assert!(fake.step());
    let first = fake.out[&id][0];
    assert_eq!(plan(&mut fake, 77), [(id, 4)]);
    // One draft stands: 8 tokens are computed, two whole blocks, the second with token 77 at its end.
    let outcome = StepOutcome { accepted_drafts: 1, token: 5, finished: false };
    fake.scheduler.finish_step(&fake.plan, &[outcome]).unwrap();
    assert_eq!(fake.scheduler.tokens(id).unwrap(), [0, 1, 2, 3, 4, 5, first, 77, 5]);
    assert_eq!(fake.scheduler.kv().num_computed_tokens(id), Some(8));
    fake.check_pool();
    fake.scheduler.abort(id);
    let found = |tail: &[u32]| {
        let prompt = [&[0, 1, 2, 3, 4, 5, first, 77][..], tail].concat();
        fake.scheduler.kv().lookup(&mut crate::kv::BlockHashes::default(), &prompt).num_tokens()
    };
    assert_eq!(found(&[5, 1]), 8);
    assert_eq!(found(&[77, 77, 77, 77]), 8, "the block of rejected tokens has no name");
}

#[test]
fn more_accepted_than_drafted_tokens_are_refused() {
    let mut fake = Fake::new(drafting(64, 8, 2), 50, vec![KvGroupPolicy::full(4)], false);
    let id = fake.add((0..6).collect(), 20).unwrap();
    assert!(fake.step());
    plan(&mut fake, 99);
    let outcome = |accepted_drafts| StepOutcome { accepted_drafts, token: 1, finished: false };
    let refused = SchedulerError::NotDrafted { request: id, drafted: 2, accepted: 3 };
    assert_eq!(fake.scheduler.finish_step(&fake.plan, &[outcome(3)]), Err(refused));
    assert_eq!(fake.scheduler.finish_step(&fake.plan, &[outcome(2)]), Ok(()));
    assert!(fake.scheduler.schedule(&mut StepPlan::default()).is_ok());
}

#[test]
fn room_is_what_free_pages_and_own_pages_hold() {
    use crate::kv::{BlockHashes, CachedPrefix, KvCacheManager};
    let mut kv = KvCacheManager::new(6, vec![KvGroupPolicy::full(4)], false).unwrap();
    let id = RequestId(0);
    assert_eq!(kv.room(id, 0, 3, 0), 0);
    assert!(kv.admit(id, CachedPrefix::none(), 5, Admission::New).unwrap());
    kv.advance(id, &mut BlockHashes::default(), &[0; 5], 5).unwrap();
    // Three pages are free; its own two hold three tokens more.
    assert_eq!([1, 3, 4, 15].map(|n| kv.room(id, 5, n, 0)), [1, 3, 4, 15]);
    assert_eq!(kv.room(id, 5, 16, 0), 15);
    assert_eq!([3, 4, 8].map(|n| kv.room(id, 5, n, 2)), [3, 4, 7]);
    assert_eq!([4, 9].map(|n| kv.room(id, 5, n, 3)), [3, 3]);
    assert_eq!(kv.room(id, 5, 4, 9), 3);
}
