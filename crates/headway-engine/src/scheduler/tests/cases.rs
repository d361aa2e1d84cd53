//! Named cases: order, refusals with numbers, aborts, cancelled steps, wrong calls.

use super::fake::{Fake, answer, config};
use crate::kv::{KvCacheManager, KvGroupPolicy};
use crate::scheduler::{
    BatchClass, NewRequest, RequestId, Scheduler, SchedulerConfig, SchedulerError, StepOutcome, StepPlan,
};

fn full(block: usize) -> Vec<KvGroupPolicy> {
    vec![KvGroupPolicy::full(block)]
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (seed * 1000..seed * 1000 + len).collect()
}

#[test]
fn decodes_come_first_then_running_prefills_then_waiting_requests() {
    let mut fake = Fake::new(config(16, 8), 200, full(4), false);
    let a = fake.add(prompt(1, 4), 10).unwrap();
    assert!(fake.step());
    let b = fake.add(prompt(2, 40), 10).unwrap();
    let c = fake.add(prompt(3, 4), 10).unwrap();
    let shape =
        |fake: &Fake| -> Vec<_> { fake.plan.requests.iter().map(|r| (r.id, r.num_new_tokens)).collect() };
    let mut shapes = Vec::new();
    for _ in 0..4 {
        assert!(fake.step());
        shapes.push(shape(&fake));
    }
    assert_eq!(shapes[0], [(a, 1), (b, 15)]);
    assert_eq!(shapes[1], [(a, 1), (b, 15)]);
    assert_eq!(shapes[2], [(a, 1), (b, 10), (c, 4)], "what the prefill leaves goes to the next in line");
    assert_eq!(shapes[3], [(a, 1), (b, 1), (c, 1)]);
    fake.run_to_end();
    assert_eq!(fake.first_tokens, [a, b, c]);
}

#[test]
fn a_threshold_lets_short_prompts_by_a_long_one() {
    let limits = SchedulerConfig { long_prefill_token_threshold: Some(8), ..config(16, 8) };
    let mut fake = Fake::new(limits, 200, full(4), false);
    let (long, short) = (fake.add(prompt(1, 40), 4).unwrap(), fake.add(prompt(2, 6), 4).unwrap());
    fake.run_to_end();
    assert_eq!(fake.first_tokens, [short, long]);
}

#[test]
fn a_prefill_tail_of_one_token_is_no_decode() {
    let limits = SchedulerConfig { decode_first_threshold: Some(1), ..config(16, 8) };
    let mut fake = Fake::new(limits, 200, full(4), false);
    let a = fake.add(prompt(1, 17), 10).unwrap();
    assert!(fake.step());
    let b = fake.add(prompt(2, 3), 10).unwrap();
    assert!(fake.step());
    let tail = &fake.plan.requests[0];
    assert_eq!((tail.id, tail.num_computed_tokens, tail.num_new_tokens), (a, 16, 1));
    assert!(tail.is_prefilling && tail.needs_logits);
    assert_eq!(tail.class(1), BatchClass::ShortExtend);
    assert_eq!((fake.plan.requests[1].id, fake.plan.requests[1].class(1)), (b, BatchClass::Prefill));
    assert!(fake.step());
    assert!(fake.plan.requests.iter().all(|r| r.class(1) == BatchClass::Decode));
}

#[test]
fn classes_follow_the_field() {
    let class = |computed, new, prefilling, threshold| {
        let r = crate::scheduler::ScheduledRequest {
            encoder_len: 0,
            encoder_range: 0..0,
            id: RequestId(0),
            num_computed_tokens: computed,
            num_new_tokens: new,
            draft_range: 0..0,
            token_range: 0..new,
            is_prefilling: prefilling,
            needs_logits: true,
            remaining_tokens: 1,
            num_cached_tokens: 0,
            num_prompt_tokens: 1,
            bidirectional_ranges: None,
        };
        r.class(threshold)
    };
    assert_eq!(class(10, 1, false, 1), BatchClass::Decode);
    assert_eq!(class(10, 3, false, 3), BatchClass::Decode);
    assert_eq!(class(10, 4, false, 3), BatchClass::LongExtend);
    assert_eq!(class(10, 1, true, 1), BatchClass::ShortExtend);
    assert_eq!(class(10, 2, true, 1), BatchClass::LongExtend);
    assert_eq!(class(0, 1, true, 1), BatchClass::Prefill);
    assert_eq!(class(0, 100, true, 1), BatchClass::Prefill);
}

#[test]
fn what_can_never_fit_is_refused_with_numbers_and_blocks_nobody() {
    let limits = SchedulerConfig { max_model_len: 4096, ..config(2048, 8) };
    let mut fake = Fake::new(limits, 11, full(16), true);
    assert_eq!(fake.scheduler.max_total_tokens(), 161);
    let error = fake.add(prompt(1, 200), 10).unwrap_err();
    assert!(matches!(
        error,
        SchedulerError::NeverFits {
            cached_tokens: 209,
            max_cached_tokens: 160,
            needed_pages: 14,
            total_pages: 10,
            ..
        }
    ));
    assert!(error.to_string().contains("200 prompt + 10 generated"), "{error}");
    let error = fake.add(prompt(1, 4000), 97).unwrap_err();
    assert!(
        error.to_string().contains("4000 prompt + 97 generated = 4097 tokens, more than the 4096"),
        "{error}"
    );
    let short = fake.add(prompt(2, 20), 5).unwrap();
    let whole = fake.add(prompt(3, 150), 11).unwrap();
    fake.run_to_end();
    assert_eq!(fake.out[&short], answer(&prompt(2, 20), 5));
    assert_eq!(fake.out[&whole], answer(&prompt(3, 150), 11));
    assert_eq!(fake.add(Vec::new(), 5), Err(SchedulerError::EmptyPrompt));
    assert_eq!(fake.add(vec![1], 0), Err(SchedulerError::NothingToGenerate));
    assert!(matches!(fake.add(vec![1], usize::MAX), Err(SchedulerError::TooLongForModel { .. })));
}

#[test]
fn cached_prefixes_give_way_to_a_big_request() {
    let mut fake = Fake::new(config(256, 8), 17, full(4), true);
    for i in 0..4 {
        fake.add(prompt(i, 16), 1).unwrap();
        fake.run_to_end();
    }
    assert_eq!(fake.scheduler.kv().usage().cached_free_pages, 16);
    let big = fake.add(prompt(9, 60), 5).unwrap();
    fake.run_to_end();
    assert_eq!(fake.out[&big], answer(&prompt(9, 60), 5));
}

#[test]
fn answers_do_not_depend_on_what_ran_before() {
    for caching in [false, true] {
        let mut fake = Fake::new(config(8, 4), 40, full(4), caching);
        for (seed, len) in [(1, 12), (1, 12), (2, 12), (1, 16), (1, 9)] {
            let id = fake.add(prompt(seed, len), 9).unwrap();
            fake.run_to_end();
            assert_eq!(fake.out[&id], answer(&prompt(seed, len), 9));
        }
        let gone = fake.add(prompt(1, 20), 9).unwrap();
        assert!(fake.step());
        assert!(fake.scheduler.abort(gone));
        let id = fake.add(prompt(1, 20), 9).unwrap();
        fake.run_to_end();
        assert_eq!(fake.out[&id], answer(&prompt(1, 20), 9));
        assert_eq!(fake.scheduler.kv().stats().hit_tokens > 0, caching);
    }
}

#[test]
fn a_request_may_keep_out_of_the_prefix_cache() {
    let mut fake = Fake::new(config(64, 4), 40, full(16), true);
    for _ in 0..2 {
        fake.scheduler
            .add(NewRequest { use_prefix_cache: false, ..NewRequest::new(prompt(1, 33), 1) })
            .unwrap();
        assert!(fake.step());
        assert_eq!(fake.plan.requests[0].num_computed_tokens, 0);
    }
    fake.add(prompt(1, 33), 1).unwrap();
    assert!(fake.step());
    assert_eq!(
        (fake.plan.requests[0].num_computed_tokens, fake.plan.requests[0].num_cached_tokens),
        (32, 32)
    );
}

#[test]
fn an_abort_during_a_step_waits_for_its_end() {
    let mut fake = Fake::new(config(64, 4), 40, full(4), true);
    let (a, b) = (fake.add(prompt(1, 8), 1).unwrap(), fake.add(prompt(2, 8), 3).unwrap());
    let waiting = fake.add(prompt(3, 100), 3).unwrap();
    fake.scheduler.schedule(&mut fake.plan).unwrap();
    let used = fake.scheduler.kv().usage().used_pages;
    assert!(fake.scheduler.abort(a) && fake.scheduler.abort(waiting));
    assert!(!fake.scheduler.abort(a), "once only");
    assert_eq!(fake.scheduler.kv().usage().used_pages, used, "the step may be writing");
    let mut outcomes = fake.compute();
    outcomes[0].finished = false; // what is said of an aborted request does not matter
    fake.scheduler.finish_step(&fake.plan, &outcomes).unwrap();
    assert_eq!(fake.scheduler.state(a), None);
    assert_eq!(fake.scheduler.kv().usage().used_pages, 2);
    fake.run_to_end();
    assert_eq!(fake.out[&b], answer(&prompt(2, 8), 3));
    let stats = fake.scheduler.stats();
    assert_eq!((stats.aborted, stats.finished), (2, 1));
    assert!(!fake.scheduler.abort(b) && !fake.scheduler.abort(RequestId(99)));
}

#[test]
fn a_cancelled_step_is_done_again() {
    let mut fake = Fake::new(config(10, 4), 40, full(4), true);
    let ids = [fake.add(prompt(1, 13), 4).unwrap(), fake.add(prompt(2, 8), 4).unwrap()];
    loop {
        fake.scheduler.schedule(&mut fake.plan).unwrap();
        if fake.plan.is_empty() {
            break;
        }
        fake.scheduler.cancel_step().unwrap();
        fake.check_pool();
        assert!(fake.step());
    }
    assert_eq!(fake.out[&ids[0]], answer(&prompt(1, 13), 4));
    assert_eq!(fake.out[&ids[1]], answer(&prompt(2, 8), 4));
}

#[test]
fn wrong_calls_change_nothing() {
    let mut fake = Fake::new(config(64, 4), 40, full(4), true);
    assert_eq!(fake.scheduler.finish_step(&StepPlan::default(), &[]), Err(SchedulerError::NoStep));
    assert_eq!(fake.scheduler.cancel_step(), Err(SchedulerError::NoStep));
    let id = fake.add(prompt(1, 8), 1).unwrap();
    fake.scheduler.schedule(&mut fake.plan).unwrap();
    assert_eq!(fake.scheduler.schedule(&mut StepPlan::default()), Err(SchedulerError::StepUnderWay));
    assert_eq!(fake.scheduler.finish_step(&StepPlan::default(), &[]), Err(SchedulerError::WrongPlan));
    let wrong = SchedulerError::WrongOutcomes { expected: 1, got: 0 };
    assert_eq!(fake.scheduler.finish_step(&fake.plan, &[]), Err(wrong));
    let on = StepOutcome::token(1, false);
    let past = SchedulerError::PastMaxTokens { request: id, max_tokens: 1 };
    assert_eq!(fake.scheduler.finish_step(&fake.plan, &[on]), Err(past));
    let outcomes = fake.compute();
    fake.scheduler.finish_step(&fake.plan, &outcomes).unwrap();
    assert_eq!(fake.out[&id], answer(&prompt(1, 8), 1));
}

#[test]
fn limits_without_sense_are_refused() {
    let refused = |config: SchedulerConfig, blocks| {
        let groups = vec![KvGroupPolicy::full(4), KvGroupPolicy::sliding_window(4, 4)];
        Scheduler::new(config, KvCacheManager::new(blocks, groups, true).unwrap()).map(|_| ()).unwrap_err()
    };
    let base = SchedulerConfig::default();
    for (limits, option) in [
        (SchedulerConfig { max_num_batched_tokens: 0, ..base.clone() }, "--max-num-batched-tokens"),
        (SchedulerConfig { max_num_seqs: 0, ..base.clone() }, "--max-num-seqs"),
        (SchedulerConfig { max_model_len: 0, ..base.clone() }, "--max-model-len"),
    ] {
        assert_eq!(refused(limits, 10), SchedulerError::ZeroLimit { option });
    }
    assert!(matches!(
        refused(SchedulerConfig { max_num_batched_tokens: 4, ..base.clone() }, 10),
        SchedulerError::BudgetBelowSeqs { max_num_batched_tokens: 4, max_num_seqs: 128 }
    ));
    assert_eq!(refused(base, 2), SchedulerError::CacheTooSmall { total_pages: 1, needed_pages: 2 });
}

#[test]
fn the_histogram_shows_real_batches() {
    let mut fake = Fake::new(config(64, 32), 400, full(4), true);
    for i in 0..32 {
        fake.add(prompt(i, 4), 8).unwrap();
    }
    fake.run_to_end();
    let stats = fake.scheduler.stats();
    assert!(stats.batch_sizes[32] >= 6, "{:?}", stats.batch_sizes);
    assert_eq!(stats.batch_sizes.iter().sum::<u64>(), stats.steps);
    assert_eq!(stats.computed_tokens, 32 * (4 + 7));
    assert_eq!((stats.finished, stats.recomputed_tokens, stats.running, stats.waiting), (32, 0, 0, 0));
}
