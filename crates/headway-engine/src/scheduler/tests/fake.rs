//! A fake model and engine: each step is written to and read from the shadow of the KV cache, and the next token is made
//! from what was read. A wrong page, a lost token or a token computed twice gives another answer.

use std::collections::{BTreeMap, HashMap};

use crate::kv::tests::shadow::{Shadow, Work, check_pool, digest};
use crate::kv::{KvCacheManager, KvGroupPolicy};
use crate::scheduler::{
    NewRequest, RequestId, RequestState, Scheduler, SchedulerConfig, SchedulerError, StepOutcome, StepPlan,
};

/// The token that follows what was read.
pub(super) fn next_token(value: u64) -> u32 {
    (value % 50) as u32
}

/// The answer to a prompt, without any scheduler or cache.
pub(super) fn answer(prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    let mut state = prompt.iter().fold(1, |d, t| digest(d, *t));
    let mut out = Vec::new();
    for _ in 0..max_tokens {
        let token = next_token(state);
        out.push(token);
        state = digest(state, token);
    }
    out
}

pub(super) struct Fake {
    pub(super) scheduler: Scheduler,
    shadow: Shadow,
    pub(super) plan: StepPlan,
    /// Generated tokens of each request.
    pub(super) out: BTreeMap<RequestId, Vec<u32>>,
    /// Requests in the order of the steps of their first tokens, of one step in the order of ids.
    pub(super) first_tokens: Vec<RequestId>,
}

pub(super) fn config(max_num_batched_tokens: usize, max_num_seqs: usize) -> SchedulerConfig {
    SchedulerConfig {
        max_num_batched_tokens,
        max_num_seqs,
        max_model_len: 1000,
        ..SchedulerConfig::default()
    }
}

impl Fake {
    pub(super) fn new(
        config: SchedulerConfig,
        blocks: usize,
        groups: Vec<KvGroupPolicy>,
        caching: bool,
    ) -> Self {
        let kv = KvCacheManager::new(blocks, groups, caching).expect("a valid cache");
        Self {
            scheduler: Scheduler::new(config, kv).expect("valid limits"),
            shadow: Shadow::default(),
            plan: StepPlan::default(),
            out: BTreeMap::new(),
            first_tokens: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, prompt: Vec<u32>, max_tokens: usize) -> Result<RequestId, SchedulerError> {
        self.scheduler.add(NewRequest::new(prompt, max_tokens))
    }

    /// Plans, plays and finishes one step; `false` when there was nothing to do.
    pub(super) fn step(&mut self) -> bool {
        self.scheduler.schedule(&mut self.plan).expect("no step is under way");
        if self.plan.is_empty() {
            return false;
        }
        self.check_plan();
        let outcomes = self.compute();
        self.scheduler.finish_step(&self.plan, &outcomes).expect("the plan's own step");
        self.check_pool();
        true
    }

    pub(super) fn compute(&mut self) -> Vec<StepOutcome> {
        let work = |r: &crate::scheduler::ScheduledRequest| Work {
            id: r.id,
            tokens: self.scheduler.tokens(r.id).expect("a scheduled request lives"),
            start: r.num_computed_tokens,
            len: r.num_new_tokens,
        };
        let batch: Vec<Work<'_>> = self.plan.requests.iter().map(work).collect();
        let values = self.shadow.run(self.scheduler.kv(), &batch);
        let mut outcomes = Vec::new();
        let known = self.first_tokens.len();
        for (scheduled, value) in self.plan.requests.iter().zip(values).filter(|(r, _)| r.needs_logits) {
            let token = next_token(value);
            let out = self.out.entry(scheduled.id).or_default();
            if out.is_empty() {
                self.first_tokens.push(scheduled.id);
            }
            out.push(token);
            outcomes.push(StepOutcome { token, finished: scheduled.remaining_tokens == 1 });
        }
        self.first_tokens[known..].sort_unstable();
        outcomes
    }

    pub(super) fn run_to_end(&mut self) {
        let mut steps = 0;
        while self.step() {
            steps += 1;
            assert!(steps < 100_000, "the requests do not end");
        }
        assert!(self.scheduler.is_idle());
        let usage = self.scheduler.kv().usage();
        assert_eq!(usage.free_pages, usage.total_pages, "every page is back");
    }

    pub(super) fn check_pool(&self) {
        let ids = (0..self.scheduler.next_id).map(RequestId);
        let tokens: HashMap<_, _> =
            ids.filter_map(|id| Some((id, self.scheduler.tokens(id)?.to_vec()))).collect();
        check_pool(self.scheduler.kv(), &tokens);
        let in_line: Vec<_> = self.scheduler.running.iter().chain(&self.scheduler.waiting).collect();
        assert!(in_line.is_sorted(), "everyone is in the order of arrival, the running before the waiting");
        assert_eq!(in_line.len(), tokens.len(), "every request is in one line");
    }

    /// What holds of every plan.
    fn check_plan(&self) {
        let (plan, config) = (&self.plan, self.scheduler.config());
        assert!(plan.num_tokens() <= config.max_num_batched_tokens, "token budget");
        assert!(plan.requests.len() <= config.max_num_seqs, "sequence limit");
        assert!(self.scheduler.stats().running <= config.max_num_seqs, "sequence limit");
        let mut at = 0;
        for r in &plan.requests {
            let tokens = self.scheduler.tokens(r.id).expect("a scheduled request lives");
            assert!(r.num_new_tokens >= 1 && r.num_new_tokens <= config.max_chunk());
            assert_eq!(r.token_range, at..at + r.num_new_tokens);
            assert_eq!(plan.token_ids[r.token_range.clone()], tokens[r.num_computed_tokens..r.seq_len()]);
            assert_eq!(r.needs_logits, r.seq_len() == tokens.len());
            let state = self.scheduler.state(r.id);
            assert_eq!(state == Some(RequestState::Prefilling), r.is_prefilling);
            assert!(r.is_prefilling || (r.needs_logits && r.num_new_tokens == 1));
            at = r.token_range.end;
        }
        assert_eq!(at, plan.num_tokens());
        for (i, r) in plan.requests.iter().enumerate() {
            assert!(plan.requests[..i].iter().all(|other| other.id != r.id), "a request is twice in a plan");
        }
        if let Some(threshold) = config.decode_first_threshold {
            assert!(plan.requests.is_sorted_by_key(|r| r.class(threshold)));
        }
    }
}
