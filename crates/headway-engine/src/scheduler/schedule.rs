//! [`Scheduler`]: planning a step. What happens after it is in `step.rs`.
//!
//! Lifetime: the model. `running` is ordered by arrival, and so is `waiting`; every running request arrived before every
//! waiting one, because requests are admitted in order and the latest is preempted first. So the last of `running` is
//! always the one to preempt, and first come first served needs no sorting.

use std::collections::{HashMap, VecDeque};

use super::drafts::Draft;
use super::plan::{ScheduledRequest, StepPlan};
use super::request::{NewRequest, Request, RequestState};
use super::{RequestId, SchedulerConfig, SchedulerError, SchedulerStats};
use crate::kv::{Admission, CachedPrefix, KvCacheManager, KvGroupKind};

/// Plans the steps of continuous batching over a [`KvCacheManager`], which it owns.
///
/// ```
/// use headway_engine::kv::{KvCacheManager, KvGroupPolicy};
/// use headway_engine::scheduler::{NewRequest, Scheduler, SchedulerConfig, StepOutcome, StepPlan};
///
/// let kv = KvCacheManager::new(64, vec![KvGroupPolicy::full(16)], true)?;
/// let mut scheduler = Scheduler::new(SchedulerConfig::default(), kv)?;
/// scheduler.add(NewRequest::new(vec![1, 2, 3], 2))?;
/// let mut plan = StepPlan::default();
/// let mut generated = Vec::new();
/// loop {
///     scheduler.schedule(&mut plan)?;
///     if plan.is_empty() {
///         break;
///     }
///     // The runner computes plan.token_ids, and the sampler chooses a token for each of plan.sampled().
///     let outcomes: Vec<_> = plan
///         .sampled()
///         .map(|r| StepOutcome::token(r.seq_len() as u32, r.remaining_tokens == 1))
///         .collect();
///     generated.extend(outcomes.iter().map(|o| o.token));
///     scheduler.finish_step(&plan, &outcomes)?;
/// }
/// assert_eq!(generated, [3, 4]);
/// # Ok::<(), headway_engine::scheduler::SchedulerError>(())
/// ```
#[derive(Debug)]
pub struct Scheduler {
    pub(super) config: SchedulerConfig,
    pub(super) kv: KvCacheManager,
    pub(super) requests: HashMap<RequestId, Request>,
    pub(super) running: Vec<RequestId>,
    pub(super) waiting: VecDeque<RequestId>,
    /// The step under way, by number.
    pub(super) step: Option<u64>,
    pub(super) last_step: u64,
    pub(super) next_id: u64,
    /// Aborted during the step under way.
    pub(super) aborting: Vec<RequestId>,
    pub(super) stats: SchedulerStats,
}

/// The token budget of a step that is being planned.
pub(super) struct Budget {
    pub(super) tokens: usize,
    /// Of encoders' inputs, which come on top and are never cut.
    encoder_tokens: usize,
    /// A running request waits for a step with more room.
    held: bool,
}

impl Scheduler {
    /// # Errors
    /// Limits that make no sense, or a cache that cannot hold one token.
    pub fn new(config: SchedulerConfig, kv: KvCacheManager) -> Result<Self, SchedulerError> {
        config.validate()?;
        if kv.max_request_tokens(config.max_chunk()) == 0 {
            let needed_pages = kv.peak_pages(1, 1);
            return Err(SchedulerError::CacheTooSmall { total_pages: kv.usage().total_pages, needed_pages });
        }
        let stats = SchedulerStats { batch_sizes: vec![0; config.max_num_seqs + 1], ..Default::default() };
        Ok(Self {
            config,
            kv,
            requests: HashMap::new(),
            running: Vec::new(),
            waiting: VecDeque::new(),
            step: None,
            last_step: 0,
            next_id: 0,
            aborting: Vec::new(),
            stats,
        })
    }

    /// The longest request that will be accepted, prompt and generated tokens together.
    pub fn max_total_tokens(&self) -> usize {
        let cached = self.kv.max_request_tokens(self.config.max_chunk());
        self.config.max_model_len.min(cached.saturating_add(1))
    }

    /// Queues a request.
    ///
    /// # Errors
    /// An empty prompt, nothing to generate, or a request that is longer than the model takes or than can ever fit the
    /// cache: refused at once, with the numbers.
    pub fn add(&mut self, request: NewRequest) -> Result<RequestId, SchedulerError> {
        self.check(&request)?;
        let rswa = self.kv.groups().iter().any(|g| g.kind == KvGroupKind::Rswa);
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.requests.insert(id, Request::new(id, request, rswa));
        self.waiting.push_back(id);
        Ok(id)
    }

    fn check(&self, request: &NewRequest) -> Result<(), SchedulerError> {
        let (prompt_tokens, max_tokens) = (request.prompt.len(), request.max_tokens);
        if prompt_tokens == 0 {
            return Err(SchedulerError::EmptyPrompt);
        }
        if max_tokens == 0 {
            return Err(SchedulerError::NothingToGenerate);
        }
        let total = prompt_tokens.saturating_add(max_tokens);
        let max_model_len = self.config.max_model_len;
        if total > max_model_len {
            return Err(SchedulerError::TooLongForModel { prompt_tokens, max_tokens, total, max_model_len });
        }
        let (cached_tokens, max_chunk) = (total - 1, self.config.max_chunk());
        let encoder_tokens = request.encoder_ids.len();
        if encoder_tokens > self.config.max_num_batched_tokens {
            let max_num_batched_tokens = self.config.max_num_batched_tokens;
            return Err(SchedulerError::EncoderInputTooLong { encoder_tokens, max_num_batched_tokens });
        }
        let max_cached_tokens = self.kv.max_request_tokens_beside(encoder_tokens, max_chunk);
        if cached_tokens > max_cached_tokens {
            return Err(SchedulerError::NeverFits {
                prompt_tokens,
                max_tokens,
                cached_tokens,
                max_cached_tokens,
                needed_pages: self.kv.peak_pages(cached_tokens, max_chunk),
                total_pages: self.kv.usage().total_pages,
            });
        }
        let room = self.config.max_chunk();
        if let Some(range) = request.whole_ranges().into_iter().find(|r| r.len() > room) {
            return Err(SchedulerError::RangeTooLong { range, room });
        }
        Ok(())
    }

    /// Plans the next step into `plan`, whose old content is dropped. An empty plan means that there is nothing to do,
    /// and no step is under way then.
    ///
    /// # Errors
    /// The last step is still under way.
    pub fn schedule(&mut self, plan: &mut StepPlan) -> Result<(), SchedulerError> {
        self.schedule_drafting(plan, &mut |_, _, _, _| ())
    }

    /// As [`Self::schedule`], and has `draft` propose tokens for the decodes of the step, at most
    /// [`SchedulerConfig::num_speculative_tokens`] each.
    ///
    /// # Errors
    /// The last step is still under way.
    pub fn schedule_drafting(
        &mut self,
        plan: &mut StepPlan,
        draft: &mut Draft<'_>,
    ) -> Result<(), SchedulerError> {
        if self.step.is_some() {
            return Err(SchedulerError::StepUnderWay);
        }
        plan.clear();
        let mut budget = Budget {
            tokens: self.config.max_num_batched_tokens,
            encoder_tokens: self.config.max_num_batched_tokens,
            held: false,
        };
        self.schedule_running(plan, &mut budget, false)?;
        self.schedule_running(plan, &mut budget, true)?;
        if plan.preempted.is_empty() && !budget.held {
            self.schedule_waiting(plan, &mut budget)?;
            self.schedule_drafts(plan, &mut budget, draft)?;
        }
        if plan.is_empty() {
            return self.check_idle();
        }
        self.open_step(plan);
        Ok(())
    }

    /// Plans the running decodes (`prefills` false) or the next chunks of running prefills.
    fn schedule_running(
        &mut self,
        plan: &mut StepPlan,
        budget: &mut Budget,
        prefills: bool,
    ) -> Result<(), SchedulerError> {
        let mut at = 0;
        while at < self.running.len() && budget.tokens > 0 {
            let id = self.running[at];
            at += 1;
            let request = &self.requests[&id];
            if request.is_prefilling() != prefills || request.encodes() > budget.encoder_tokens {
                continue;
            }
            let computed = request.num_computed;
            let num_new = self.chunk(request, computed, budget);
            if num_new == 0 {
                // A range that needs more room than this step has left: nobody is let in before it has run.
                budget.held = true;
                continue;
            }
            while !self.kv.allocate(id, computed, num_new)? {
                let last = self.preempt_last(plan, budget);
                if last.is_none_or(|last| last == id) {
                    return Ok(());
                }
            }
            self.push(plan, budget, id, num_new);
        }
        Ok(())
    }

    /// Admits waiting requests in order until one does not fit; none overtakes it.
    fn schedule_waiting(&mut self, plan: &mut StepPlan, budget: &mut Budget) -> Result<(), SchedulerError> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let mut promised = self.pages_promised();
        while budget.tokens > 0 && self.running.len() < self.config.max_num_seqs {
            let Some(&id) = self.waiting.front() else { break };
            let Some(prefix) = self.prefix_with_room(id, promised) else { break };
            let (computed, request) = (prefix.num_tokens(), &self.requests[&id]);
            if request.encodes() > budget.encoder_tokens {
                break;
            }
            let num_new = self.chunk(request, computed, budget);
            if num_new == 0 {
                break;
            }
            let admission = if request.admitted_before { Admission::Resumed } else { Admission::New };
            if !self.kv.admit(id, prefix, num_new, admission)? {
                break;
            }
            self.waiting.pop_front();
            self.start(id, computed);
            self.push(plan, budget, id, num_new);
            promised += self.pages_outstanding(id);
        }
        Ok(())
    }

    /// The cached prefix of a waiting request, if the pages of all its known tokens are free on top of those that
    /// running prefills still take: a prefill that is started can be finished unless decodes grow into it.
    fn prefix_with_room(&mut self, id: RequestId, promised: usize) -> Option<CachedPrefix> {
        let request = self.requests.get_mut(&id)?;
        let prefix = match request.use_prefix_cache {
            true => self.kv.lookup(&mut request.hashes, &request.tokens),
            false => CachedPrefix::none(),
        };
        let prefix = prefix.with_encoder_tokens(request.encoder_ids.len());
        // A request that comes back leaves each running one a page of every group to grow into, so that it is not
        // preempted again at once.
        let headroom = if request.admitted_before { self.running.len() * self.kv.groups().len() } else { 0 };
        let needed = self.kv.pages_to_admit(&prefix, request.tokens.len(), self.config.max_chunk());
        // Alone in the pool a request always fits, which `add` checked.
        let fits = needed + promised + headroom <= self.kv.usage().free_pages;
        (fits || self.running.is_empty()).then_some(prefix)
    }

    /// Pages that running prefills still take until their known tokens are computed.
    pub(super) fn pages_promised(&self) -> usize {
        let prefilling = self.running.iter().filter(|id| self.requests[id].is_prefilling());
        prefilling.map(|id| self.pages_outstanding(*id)).sum()
    }

    fn pages_outstanding(&self, id: RequestId) -> usize {
        self.kv.pages_outstanding(id, self.requests[&id].tokens.len(), self.config.max_chunk())
    }

    /// Tokens after `computed` that the step computes; 0 where a range that may not be cut has no room.
    fn chunk(&self, request: &Request, computed: usize, budget: &Budget) -> usize {
        let most = (request.tokens.len() - computed).min(budget.tokens).min(self.config.max_chunk());
        request.uncut(computed, most)
    }

    fn start(&mut self, id: RequestId, num_computed: usize) {
        self.running.push(id);
        if let Some(request) = self.requests.get_mut(&id) {
            request.num_computed = num_computed;
            request.prefill_target = request.tokens.len();
            request.running = true;
            if !request.admitted_before {
                request.num_cached = num_computed;
            }
            request.admitted_before = true;
        }
    }

    fn push(&self, plan: &mut StepPlan, budget: &mut Budget, id: RequestId, num_new_tokens: usize) {
        let request = &self.requests[&id];
        budget.tokens -= num_new_tokens;
        budget.encoder_tokens -= request.encodes();
        plan.requests.push(ScheduledRequest {
            id,
            num_computed_tokens: request.num_computed,
            num_new_tokens,
            draft_range: 0..0,
            token_range: 0..0,
            is_prefilling: request.is_prefilling(),
            needs_logits: request.num_uncomputed() == num_new_tokens,
            remaining_tokens: request.max_tokens - request.num_generated(),
            num_cached_tokens: request.num_cached,
            encoder_len: request.encoder_ids.len(),
            encoder_range: 0..0,
            num_prompt_tokens: request.num_prompt_tokens,
            bidirectional_ranges: request
                .ranges_in(request.num_computed, request.num_computed + num_new_tokens),
        });
    }

    /// Takes the pages of the running request that arrived last, and its place in the plan if it has one.
    fn preempt_last(&mut self, plan: &mut StepPlan, budget: &mut Budget) -> Option<RequestId> {
        let id = self.running.pop()?;
        if let Some(at) = plan.requests.iter().rposition(|r| r.id == id) {
            budget.tokens += plan.requests.remove(at).num_new_tokens;
            budget.encoder_tokens += self.requests[&id].encodes();
        }
        self.kv.free(id);
        if let Some(request) = self.requests.get_mut(&id) {
            request.num_computed = 0;
            request.prefill_target = 0;
            request.running = false;
            request.preemptions += 1;
        }
        self.waiting.push_front(id);
        plan.preempted.push(id);
        self.stats.preemptions += 1;
        Some(id)
    }

    fn check_idle(&self) -> Result<(), SchedulerError> {
        match self.requests.is_empty() {
            true => Ok(()),
            false => Err(SchedulerError::Stalled {
                waiting: self.waiting.len(),
                free_pages: self.kv.usage().free_pages,
            }),
        }
    }

    /// Orders the plan, fills in its tokens and marks the step as under way.
    fn open_step(&mut self, plan: &mut StepPlan) {
        if let Some(threshold) = self.config.decode_first_threshold {
            plan.requests.sort_by_key(|r| r.class(threshold));
        }
        let StepPlan { requests, token_ids, draft_token_ids, encoder_ids, .. } = plan;
        for scheduled in requests {
            let tokens = &self.requests[&scheduled.id].tokens;
            let start = token_ids.len();
            let known = scheduled.num_computed_tokens..scheduled.num_known_tokens();
            token_ids.extend_from_slice(&tokens[known]);
            token_ids.extend_from_slice(&draft_token_ids[scheduled.draft_range.clone()]);
            scheduled.token_range = start..token_ids.len();
            let encodes = self.requests[&scheduled.id].encodes();
            let start = encoder_ids.len();
            encoder_ids.extend_from_slice(&self.requests[&scheduled.id].encoder_ids[..encodes]);
            scheduled.encoder_range = start..encoder_ids.len();
        }
        self.last_step += 1;
        plan.step = self.last_step;
        self.step = Some(self.last_step);
    }

    /// The KV cache manager.
    pub fn kv(&self) -> &KvCacheManager {
        &self.kv
    }

    /// The limits in force.
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// A running request's block table in one KV cache group: block ids by block number, valid until the next call of
    /// [`Self::schedule`]. `None` for a request without pages.
    pub fn block_table(&self, id: RequestId, group: usize) -> Option<&[u32]> {
        self.kv.block_table(id, group)
    }

    /// All tokens of a request, prompt and generated. `None` once it has ended.
    pub fn tokens(&self, id: RequestId) -> Option<&[u32]> {
        Some(&self.requests.get(&id)?.tokens)
    }

    /// Tokens of a request's prompt. `None` once it has ended.
    pub fn num_prompt_tokens(&self, id: RequestId) -> Option<usize> {
        Some(self.requests.get(&id)?.num_prompt_tokens)
    }

    /// Where a request stands. `None` once it has ended.
    pub fn state(&self, id: RequestId) -> Option<RequestState> {
        Some(self.requests.get(&id)?.state())
    }

    /// Whether no request is left.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// The counters, as of now.
    pub fn stats(&self) -> SchedulerStats {
        let (waiting, running) = (self.waiting.len(), self.running.len());
        SchedulerStats { waiting, running, ..self.stats.clone() }
    }
}
