//! A fake model and engine: each step is written to and read from the shadow of the KV cache, and the next token is made
//! from what was read. A wrong page, a lost token or a token computed twice gives another answer.

use std::collections::{BTreeMap, HashMap};

use crate::kv::tests::shadow::{Shadow, Work, check_pool, digest};
use crate::kv::{KvCacheManager, KvGroupPolicy};
use crate::scheduler::{
    NewRequest, RequestId, RequestState, ScheduledRequest, Scheduler, SchedulerConfig, SchedulerError,
    StepOutcome, StepPlan,
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
    /// Seed of the mistakes in drafts.
    mistakes: u64,
    pub(super) plan: StepPlan,
    /// Generated tokens of each request.
    pub(super) out: BTreeMap<RequestId, Vec<u32>>,
    /// Drafted tokens that stood.
    pub(super) accepted: usize,
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
            mistakes: 0,
            plan: StepPlan::default(),
            out: BTreeMap::new(),
            accepted: 0,
            first_tokens: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, prompt: Vec<u32>, max_tokens: usize) -> Result<RequestId, SchedulerError> {
        self.scheduler.add(NewRequest::new(prompt, max_tokens))
    }

    /// Makes other mistakes in its drafts.
    pub(super) fn with_mistakes(self, mistakes: u64) -> Self {
        Self { mistakes, ..self }
    }

    /// Plans a step. Drafts are the right answer with some wrong tokens in it, and sometimes too long or too short.
    pub(super) fn schedule(&mut self) -> Result<(), SchedulerError> {
        let mistakes = self.mistakes;
        self.scheduler.schedule_drafting(&mut self.plan, &mut |id, tokens, most, drafts| {
            let chance = tokens.iter().fold(digest(mistakes, id.0 as u32), |d, t| digest(d, *t));
            let right = answer(tokens, most + 1);
            let len = if chance.is_multiple_of(3) { chance as usize % (most + 2) } else { most };
            for (i, token) in right.into_iter().take(len).enumerate() {
                let wrong = (chance >> (i % 32)).is_multiple_of(4);
                drafts.push(if wrong { token + 1 } else { token });
            }
        })
    }

    /// Plans, plays and finishes one step; `false` when there was nothing to do.
    pub(super) fn step(&mut self) -> bool {
        self.schedule().expect("no step is under way");
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
        let with_drafts = |r: &ScheduledRequest| {
            let tokens = self.scheduler.tokens(r.id).expect("a scheduled request lives");
            [&tokens[..r.num_known_tokens()], self.plan.drafts(r)].concat()
        };
        let tokens: Vec<Vec<u32>> = self.plan.requests.iter().map(with_drafts).collect();
        let work = |(r, tokens)| {
            let r: &ScheduledRequest = r;
            Work { id: r.id, tokens, start: r.num_computed_tokens, len: r.num_new_tokens }
        };
        let all = self.plan.requests.iter().zip(tokens.iter().map(Vec::as_slice));
        let batch: Vec<Work<'_>> = all.map(work).collect();
        let values = self.shadow.run(self.scheduler.kv(), &batch);
        let mut outcomes = Vec::new();
        let known = self.first_tokens.len();
        let requests = self.plan.requests.iter().zip(tokens).zip(values);
        for ((scheduled, tokens), value) in requests.filter(|((r, _), _)| r.needs_logits) {
            let drafts = self.plan.drafts(scheduled);
            // What a row reads is the digest of the tokens up to it, as the shadow has checked.
            let row =
                |i: usize| tokens[..scheduled.num_known_tokens() + i].iter().fold(1, |d, t| digest(d, *t));
            assert_eq!(row(drafts.len()), value);
            let out = self.out.entry(scheduled.id).or_default();
            if out.is_empty() {
                self.first_tokens.push(scheduled.id);
            }
            let mut taken = 0;
            let (token, finished) = loop {
                let token = next_token(row(taken));
                out.push(token);
                taken += 1;
                let finished = scheduled.remaining_tokens == taken;
                if finished || drafts.get(taken - 1) != Some(&token) {
                    break (token, finished);
                }
            };
            self.accepted += taken - 1;
            outcomes.push(StepOutcome { accepted_drafts: taken - 1, token, finished });
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
            let (known, drafts) = (r.num_computed_tokens..r.num_known_tokens(), plan.drafts(r));
            assert_eq!(plan.token_ids[r.token_range.clone()], [&tokens[known], drafts].concat());
            assert_eq!(r.needs_logits, r.num_known_tokens() == tokens.len());
            assert_eq!(r.num_logits(), if r.needs_logits { 1 + drafts.len() } else { 0 });
            assert!(drafts.len() <= config.num_speculative_tokens, "drafts");
            assert!(drafts.len() < r.remaining_tokens, "a draft beyond the last token");
            let state = self.scheduler.state(r.id);
            assert_eq!(state == Some(RequestState::Prefilling), r.is_prefilling);
            let decodes = r.needs_logits && r.num_new_tokens == 1 + drafts.len();
            assert!(if r.is_prefilling { drafts.is_empty() } else { decodes });
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
