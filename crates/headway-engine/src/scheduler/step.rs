//! After a step: its results are applied, or it is cancelled; and requests are aborted.
//!
//! Lifetime: one step. Planning is in `schedule.rs`.

use super::plan::{ScheduledRequest, StepPlan};
use super::{RequestId, Scheduler, SchedulerError};

/// What came of a request that needed logits: the accepted ones of its drafted tokens, and one token after them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepOutcome {
    /// Drafted tokens before `token` that stand.
    pub accepted_drafts: usize,
    /// The last sampled token.
    pub token: u32,
    /// Whether the engine ends the request with this token (end of sequence, stop string, length).
    pub finished: bool,
}

impl StepOutcome {
    /// One token, without speculation.
    pub const fn token(token: u32, finished: bool) -> Self {
        Self { accepted_drafts: 0, token, finished }
    }
}

impl Scheduler {
    /// Applies a computed step: every scheduled token counts as computed, but for drafted ones that were not accepted;
    /// `outcomes` (one for each of [`StepPlan::sampled`], in that order) are appended, finished and aborted requests give their pages back. The
    /// outcome of a request that was aborted meanwhile (its sampling failed, its client left) is ignored.
    ///
    /// # Errors
    /// No step under way, a plan of another step, a wrong number of outcomes, more accepted than drafted tokens, a
    /// request that goes on after its last allowed token. The step is then still under way and nothing was changed.
    pub fn finish_step(&mut self, plan: &StepPlan, outcomes: &[StepOutcome]) -> Result<(), SchedulerError> {
        self.check_outcomes(plan, outcomes)?;
        self.step = None;
        let mut outcomes = outcomes.iter();
        for scheduled in &plan.requests {
            let outcome = if scheduled.needs_logits { outcomes.next() } else { None };
            self.apply(scheduled, plan.drafts(scheduled), outcome)?;
        }
        self.stats.steps += 1;
        self.stats.computed_tokens += plan.num_tokens() as u64;
        if let Some(count) = self.stats.batch_sizes.get_mut(plan.requests.len()) {
            *count += 1;
        }
        self.release_aborted();
        Ok(())
    }

    /// Drops the step under way: nothing of it counts as computed, and its requests are scheduled again. For a step
    /// that failed.
    ///
    /// # Errors
    /// No step under way.
    pub fn cancel_step(&mut self) -> Result<(), SchedulerError> {
        self.step.take().ok_or(SchedulerError::NoStep)?;
        self.release_aborted();
        Ok(())
    }

    /// Ends a request, whatever its state, and gives its pages back: at once, or if a step is under way, when that step
    /// is finished or cancelled (it may be writing to them). `false` when there is no such request.
    pub fn abort(&mut self, id: RequestId) -> bool {
        let Some(request) = self.requests.get_mut(&id) else { return false };
        if request.aborted {
            return false;
        }
        request.aborted = true;
        self.stats.aborted += 1;
        match self.step {
            None => self.remove(id),
            Some(_) => self.aborting.push(id),
        }
        true
    }

    fn check_outcomes(&self, plan: &StepPlan, outcomes: &[StepOutcome]) -> Result<(), SchedulerError> {
        let step = self.step.ok_or(SchedulerError::NoStep)?;
        if step != plan.step {
            return Err(SchedulerError::WrongPlan);
        }
        let expected = plan.num_sampled();
        if expected != outcomes.len() {
            return Err(SchedulerError::WrongOutcomes { expected, got: outcomes.len() });
        }
        for (scheduled, outcome) in plan.sampled().zip(outcomes) {
            let request = self.requests.get(&scheduled.id).ok_or(SchedulerError::WrongPlan)?;
            let (drafted, accepted) = (scheduled.num_draft_tokens(), outcome.accepted_drafts);
            if accepted > drafted {
                return Err(SchedulerError::NotDrafted { request: request.id, drafted, accepted });
            }
            if scheduled.remaining_tokens <= 1 + accepted && !outcome.finished && !request.aborted {
                return Err(SchedulerError::PastMaxTokens {
                    request: request.id,
                    max_tokens: request.max_tokens,
                });
            }
        }
        Ok(())
    }

    fn apply(
        &mut self,
        scheduled: &ScheduledRequest,
        drafts: &[u32],
        outcome: Option<&StepOutcome>,
    ) -> Result<(), SchedulerError> {
        let request = self.requests.get_mut(&scheduled.id).ok_or(SchedulerError::WrongPlan)?;
        let accepted = outcome.map_or(0, |o| o.accepted_drafts);
        let (start, end) = (scheduled.num_computed_tokens, scheduled.num_known_tokens() + accepted);
        // What was not accepted is in the cache, but no block with it is filed, and its slots are written again.
        request.tokens.extend_from_slice(&drafts[..accepted]);
        self.kv.advance(scheduled.id, &mut request.hashes, &request.tokens, end)?;
        self.stats.recomputed_tokens += request.high_water.min(end).saturating_sub(start) as u64;
        request.num_computed = end;
        request.high_water = request.high_water.max(end);
        let Some(outcome) = outcome else { return Ok(()) };
        request.tokens.push(outcome.token);
        if outcome.finished && !request.aborted {
            self.stats.finished += 1;
            self.remove(scheduled.id);
        }
        Ok(())
    }

    fn release_aborted(&mut self) {
        while let Some(id) = self.aborting.pop() {
            self.remove(id);
        }
    }

    fn remove(&mut self, id: RequestId) {
        self.requests.remove(&id);
        self.kv.free(id);
        self.running.retain(|other| *other != id);
        self.waiting.retain(|other| *other != id);
    }
}
