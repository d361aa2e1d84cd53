//! Drafted tokens in a step: which decodes take how many along.
//!
//! Lifetime: one step. Not for the guessing itself, which `crate::speculation` does, nor for what becomes of a draft
//! (`step.rs`).

use super::plan::StepPlan;
use super::schedule::Budget;
use super::{RequestId, Scheduler, SchedulerError};

/// Proposes tokens that may follow a request's: it is given the request, its tokens and the most tokens that are of use,
/// and appends its guesses.
pub type Draft<'a> = dyn FnMut(RequestId, &[u32], usize, &mut Vec<u32>) + 'a;

impl Scheduler {
    /// Gives the plan's decodes drafted tokens. Guesses come last: they take what budget prompts left (a step full of
    /// prompts is bound by arithmetic, where a guess costs as much as a sure token), and pages that are free and not
    /// promised to a prefill, so that nobody is preempted for a guess.
    pub(super) fn schedule_drafts(
        &mut self,
        plan: &mut StepPlan,
        budget: &mut Budget,
        draft: &mut Draft<'_>,
    ) -> Result<(), SchedulerError> {
        let most = self.config.num_speculative_tokens.min(self.config.max_chunk() - 1);
        if most == 0 {
            return Ok(());
        }
        let promised = self.pages_promised();
        let StepPlan { requests, draft_token_ids: drafts, .. } = plan;
        for scheduled in requests.iter_mut().filter(|r| !r.is_prefilling) {
            let (id, computed) = (scheduled.id, scheduled.num_computed_tokens);
            // The last token that a request may generate needs no guess after it.
            let most = most.min(budget.tokens).min(scheduled.remaining_tokens - 1);
            let room = self.kv.room(id, computed, 1 + most, promised).saturating_sub(1);
            if room == 0 {
                continue;
            }
            let start = drafts.len();
            draft(id, &self.requests[&id].tokens, room, drafts);
            drafts.truncate(start + room);
            let drafted = drafts.len() - start;
            if drafted == 0 {
                continue;
            }
            if !self.kv.allocate(id, computed, 1 + drafted)? {
                drafts.truncate(start);
                continue;
            }
            budget.tokens -= drafted;
            scheduled.draft_range = start..start + drafted;
            scheduled.num_new_tokens += drafted;
        }
        Ok(())
    }
}
