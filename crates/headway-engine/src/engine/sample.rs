//! From a step's logits to tokens, text and events.
//!
//! Lifetime: one step.

use super::{
    LogitsObserver,
    request::{Event, FinishReason},
    session::Session,
};
use crate::{
    sampling::{Row, Sampler},
    scheduler::{RequestId, ScheduledRequest, Scheduler, StepOutcome, StepPlan},
    speculation::{SpeculationStats, verify},
};
use std::{collections::HashMap, sync::Arc};

/// What sampling a step reads and changes.
pub(super) struct StepSampling<'a> {
    pub sampler: &'a mut Sampler,
    pub sessions: &'a mut HashMap<RequestId, Session>,
    pub scheduler: &'a Scheduler,
    pub eos_ids: &'a [u32],
    pub observer: &'a mut Option<LogitsObserver>,
    pub speculation: &'a mut SpeculationStats,
    pub events: &'a mut Vec<Event>,
    pub outcomes: &'a mut Vec<StepOutcome>,
}

impl StepSampling<'_> {
    /// Samples every request of the step that wants a token, from `logits` `[plan.num_logits(), vocab_size]`. Returns
    /// the requests that failed.
    pub fn run(&mut self, plan: &StepPlan, mut logits: &mut [f32]) -> Vec<RequestId> {
        self.outcomes.clear();
        let vocab_size = logits.len() / plan.num_logits().max(1);
        let mut failed = vec![];
        for scheduled in plan.sampled() {
            let (rows, rest) = logits.split_at_mut(scheduled.num_logits() * vocab_size);
            logits = rest;
            let outcome = self.request(scheduled, plan.drafts(scheduled), rows, &mut failed);
            self.outcomes.push(outcome);
        }
        failed
    }

    fn request(
        &mut self,
        scheduled: &ScheduledRequest,
        drafts: &[u32],
        rows: &mut [f32],
        failed: &mut Vec<RequestId>,
    ) -> StepOutcome {
        let id = scheduled.id;
        // Where there is no session: aborted while the step ran, and the scheduler ignores the outcome.
        let ended = StepOutcome::token(0, true);
        let Some(session) = self.sessions.get_mut(&id) else { return ended };
        let (params, seed) = (Arc::clone(&session.params), session.seed);
        let tokens = self.scheduler.tokens(id).unwrap_or(&[]);
        let row = Row { params: &params, tokens, drafted: &[], seed };
        let (mut taken, mut token, mut reason) = (0, 0, None::<FinishReason>);
        let look = |row: &[f32]| {
            if let Some(observer) = self.observer.as_mut() {
                observer(id, row);
            }
        };
        let take = |sampled| {
            taken += 1;
            let new;
            (new, reason) = session.accept(sampled, self.eos_ids, scheduled.remaining_tokens <= taken);
            token = new.token_id;
            self.events.push(Event::Token(id, new));
            reason.is_none()
        };
        if let Err(e) = verify(self.sampler, rows, &row, drafts, look, take) {
            self.sessions.remove(&id);
            failed.push(id);
            self.events.push(Event::Failed(id, e.into()));
            return ended;
        }
        // The last token may be a drafted one too: where the request ended with it.
        let right = taken - usize::from(drafts.get(taken - 1) != Some(&token));
        session.drafted(drafts.len(), right);
        self.speculation.record(drafts.len(), right);
        if let Some(reason) = reason
            && let Some(session) = self.sessions.remove(&id)
        {
            self.events.push(Event::Finished(id, session.finish(reason)));
        }
        StepOutcome { accepted_drafts: taken - 1, token, finished: reason.is_some() }
    }
}
