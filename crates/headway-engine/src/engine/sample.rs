//! From a step's logits to tokens, text and events.
//!
//! Lifetime: one step.

use super::{
    LogitsObserver,
    request::{Event, FinishReason, RequestError},
    session::Session,
};
use crate::{
    models::ModelError,
    runner::StepLogits,
    sampling::{DeviceChoices, Row, Sampled, Sampler},
    scheduler::{RequestId, ScheduledRequest, Scheduler, StepOutcome, StepPlan},
    speculation::{SpeculationStats, verify_by},
};
use std::{collections::HashMap, sync::Arc};

/// What sampling a step reads and changes.
pub(super) struct StepSampling<'a> {
    pub sampler: &'a mut Sampler,
    pub choices: &'a mut DeviceChoices,
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
    ///
    /// # Errors
    /// The device's; nothing was sampled then.
    pub fn run(&mut self, plan: &StepPlan, mut logits: StepLogits<'_>) -> Result<Vec<RequestId>, ModelError> {
        self.outcomes.clear();
        self.ask(plan, &mut logits);
        let mut logits = logits.settle(self.choices, self.observer.is_some())?;
        let vocab_size = logits.len() / plan.num_logits().max(1);
        let (mut failed, mut first_row) = (vec![], 0);
        for scheduled in plan.sampled() {
            let num_rows = scheduled.num_logits();
            let (rows, rest) = logits.split_at_mut(num_rows * vocab_size);
            logits = rest;
            let outcome = self.request(scheduled, plan.drafts(scheduled), first_row, rows, &mut failed);
            first_row += num_rows;
            self.outcomes.push(outcome);
        }
        Ok(failed)
    }

    /// Gives the device the rows that it can choose from.
    fn ask(&mut self, plan: &StepPlan, logits: &mut StepLogits<'_>) {
        self.choices.begin(plan.num_logits());
        let Some(device) = logits.sampler() else { return };
        device.clear();
        let mut index = 0;
        for scheduled in plan.sampled() {
            let (id, drafts) = (scheduled.id, plan.drafts(scheduled));
            // What a grammar allows is the host's to ask.
            if let Some(session) = self.sessions.get(&id).filter(|s| s.constraint.is_none()) {
                let tokens = self.scheduler.tokens(id).unwrap_or(&[]);
                for i in 0..scheduled.num_logits() {
                    let row = Row { drafted: &drafts[..i], ..session.row(tokens, self.eos_ids) };
                    self.choices.ask(device, index + i, &row);
                }
            }
            index += scheduled.num_logits();
        }
    }

    fn request(
        &mut self,
        scheduled: &ScheduledRequest,
        drafts: &[u32],
        first_row: usize,
        rows: &mut [f32],
        failed: &mut Vec<RequestId>,
    ) -> StepOutcome {
        let id = scheduled.id;
        // Where there is no session: aborted while the step ran, and the scheduler ignores the outcome.
        let ended = StepOutcome::token(0, true);
        let Some(session) = self.sessions.get_mut(&id) else { return ended };
        let (params, seed, prompt_len) = (Arc::clone(&session.params), session.seed, session.prompt_tokens);
        let mut constraint = session.constraint.take();
        let allowed = match constraint.as_mut().map(|c| c.allowed()).transpose() {
            Ok(allowed) => allowed,
            Err(why) => {
                self.fail(id, RequestError::Constraint(why), failed);
                return ended;
            }
        };
        let tokens = self.scheduler.tokens(id).unwrap_or(&[]);
        let row = Row { prompt_len, eos_ids: self.eos_ids, ..Row::new(&params, tokens, seed) };
        let (mut taken, mut token, mut reason) = (0, 0, None::<FinishReason>);
        let vocab_size = rows.len() / (1 + drafts.len());
        let sample = |i: usize| {
            let logits = &mut rows[i * vocab_size..(i + 1) * vocab_size];
            if let Some(observer) = self.observer.as_mut() {
                observer(id, logits);
            }
            match self.choices.token(first_row + i) {
                Some(token) => Ok(Sampled { token, logprobs: None }),
                None => self.sampler.sample_among(logits, &Row { drafted: &drafts[..i], ..row }, allowed),
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
        if let Err(e) = verify_by(drafts, sample, take) {
            self.fail(id, e.into(), failed);
            return ended;
        }
        if let Some(mut constraint) = constraint {
            match constraint.accept(token) {
                // A last token may end what the grammar has not ended; nobody asks it any more.
                Err(why) if reason.is_none() => {
                    self.fail(id, RequestError::Constraint(why), failed);
                    return ended;
                }
                _ => session.constraint = Some(constraint),
            }
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

    /// Ends a request by an error of its own.
    fn fail(&mut self, id: RequestId, error: RequestError, failed: &mut Vec<RequestId>) {
        self.sessions.remove(&id);
        failed.push(id);
        self.events.push(Event::Failed(id, error));
    }
}
