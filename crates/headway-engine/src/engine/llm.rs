//! [`LlmEngine`]: scheduler, model runner, sampler and tokenizer, joined by the step loop.

use super::{
    Engine, StepError,
    ranges::{self, RangeError},
    request::{Event, GenerateRequest, RequestError},
    sample::StepSampling,
    session::Session,
    stats::EngineStats,
};
use crate::{
    models::{ModelError, plan::CausalLayers},
    runner::{ModelRunner, StartupReport, step_times::Laps},
    sampling::{DeviceChoices, ParamsError, Sampler},
    scheduler::{NewRequest, RequestId, Scheduler, SchedulerStats, StepOutcome, StepPlan},
    speculation::{LookupSizes, SpeculationStats},
    text::{ChatTemplate, TextError, Tokenizer},
};
use headway_attention::KvCacheSpec;
use std::{collections::HashMap, sync::Arc, time::Duration};

/// An engine with a model.
pub struct LlmEngine {
    pub(super) runner: ModelRunner,
    pub(super) scheduler: Scheduler,
    pub(super) tokenizer: Option<Tokenizer>,
    pub(super) eos_ids: Vec<u32>,
    pub(super) sampler: Sampler,
    pub(super) choices: DeviceChoices,
    pub(super) lookup: Option<LookupSizes>,
    pub(super) speculation: SpeculationStats,
    pub(super) sessions: HashMap<RequestId, Session>,
    pub(super) plan: StepPlan,
    pub(super) outcomes: Vec<StepOutcome>,
    pub(super) load_time: Duration,
    pub(super) observer: Option<LogitsObserver>,
}

/// Sees every row of raw logits that is sampled from, after the model's own caps and before penalties and
/// sampling: one for each token of an answer.
pub type LogitsObserver = Box<dyn FnMut(RequestId, &[f32]) + Send>;

impl LlmEngine {
    /// What was decided at start-up.
    pub fn report(&self) -> &StartupReport {
        self.runner.report()
    }

    /// The runner, with its counters.
    pub fn runner(&self) -> &ModelRunner {
        &self.runner
    }

    /// The scheduler's counters.
    pub fn scheduler_stats(&self) -> SchedulerStats {
        self.scheduler.stats()
    }

    /// The scheduler, with its KV cache manager.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Whether tokens are drafted.
    pub fn drafts(&self) -> bool {
        self.lookup.is_some()
    }

    /// Tokens drafted and accepted since start-up.
    pub fn speculation_stats(&self) -> &SpeculationStats {
        &self.speculation
    }

    /// From opening the files to the end of start-up.
    pub fn load_time(&self) -> Duration {
        self.load_time
    }

    /// Has every row of logits shown to `observer` before it is sampled from.
    pub fn observe_logits(&mut self, observer: impl FnMut(RequestId, &[f32]) + Send + 'static) {
        self.observer = Some(Box::new(observer));
    }

    /// Ids that end an answer.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// The model's chat template.
    ///
    /// # Errors
    /// A model without a tokenizer or a template.
    pub fn chat_template(&self) -> Result<ChatTemplate, TextError> {
        match &self.tokenizer {
            Some(t) => t.chat_template(),
            None => Err(TextError::NoChatTemplate),
        }
    }

    /// Ends what a step without memory asked most for: its longest prefill, or without one its last request. The others
    /// are scheduled again; where layers keep states, which the step left half written, all of them end.
    fn give_up(&mut self, why: ModelError, events: &mut Vec<Event>) {
        let why = Arc::new(why);
        let states = self.runner.groups().iter().any(|g| matches!(g.info().spec, KvCacheSpec::Mamba(_)));
        let most =
            self.plan.requests.iter().max_by_key(|r| (r.is_prefilling, r.num_new_tokens)).map(|r| r.id);
        for id in self.plan.requests.iter().map(|r| r.id).filter(|id| states || Some(*id) == most) {
            self.sessions.remove(&id);
            self.scheduler.abort(id);
            events.push(Event::Failed(id, RequestError::OutOfMemory(why.clone())));
        }
    }

    fn check(&self, request: &GenerateRequest) -> Result<usize, RequestError> {
        request.sampling.validate()?;
        let vocab_size = self.runner.vocab_size();
        let tokens = request.encoder_ids.len();
        let why = match (self.runner.max_encoder_tokens(), tokens) {
            (None, 0) => None,
            (None, _) => Some("the model has no encoder; leave it out".to_owned()),
            (Some(_), 0) => {
                Some("the model's decoder attends to its encoder's input; give at least one token".into())
            }
            (Some(most), n) if n > most => Some(format!("the encoder takes at most {most}; shorten it")),
            (Some(_), _) => None,
        };
        if let Some(why) = why {
            return Err(RequestError::EncoderInput { tokens, why });
        }
        let mut ids = request.prompt_ids.iter().chain(&request.encoder_ids);
        if let Some(&id) = ids.find(|id| **id as usize >= vocab_size) {
            return Err(RequestError::IdOutOfRange { id, vocab_size });
        }
        if !request.bidirectional_ranges.is_empty() {
            let plan = self.runner.model();
            if !plan.masks.mm_prefix {
                return Err(RangeError::NotThisModel { architecture: plan.architecture.clone() }.into());
            }
            ranges::check(&request.bidirectional_ranges, request.prompt_ids.len())?;
        }
        if let Some(&(id, _)) = request.sampling.logit_bias.iter().find(|(id, _)| *id as usize >= vocab_size)
        {
            return Err(RequestError::BiasOutOfRange { id, vocab_size });
        }
        if let Some(&id) = request.sampling.stop_token_ids.iter().find(|id| **id as usize >= vocab_size) {
            return Err(RequestError::StopOutOfRange { id, vocab_size });
        }
        let room = self.max_request_tokens().saturating_sub(request.prompt_ids.len()).max(1);
        let (min, max) = (request.sampling.min_tokens, request.sampling.max_tokens.unwrap_or(room));
        if min > max {
            let range = "at most what there is room for";
            return Err(ParamsError { option: "--min-tokens", range, got: min.to_string() }.into());
        }
        Ok(max)
    }
}

impl Engine for LlmEngine {
    fn add(&mut self, request: GenerateRequest) -> Result<RequestId, RequestError> {
        let max_tokens = self.check(&request)?;
        let session = Session::new(&request, self.tokenizer.as_ref(), self.lookup)?;
        let id = self.scheduler.add(NewRequest {
            encoder_ids: request.encoder_ids,
            bidirectional_ranges: request.bidirectional_ranges.into(),
            whole_prompt: self.runner.model().masks.causal != CausalLayers::All,
            ..NewRequest::new(request.prompt_ids, max_tokens)
        })?;
        self.sessions.insert(id, session);
        Ok(id)
    }

    fn abort(&mut self, id: RequestId) -> bool {
        self.sessions.remove(&id);
        self.scheduler.abort(id)
    }

    fn step(&mut self, events: &mut Vec<Event>) -> Result<(), StepError> {
        let mut laps = Laps::start();
        let sessions = &mut self.sessions;
        self.scheduler.schedule_drafting(&mut self.plan, &mut |id, tokens, most, drafts| {
            if let Some(session) = sessions.get_mut(&id) {
                session.draft(tokens, most, drafts);
            }
        })?;
        if self.plan.is_empty() {
            return Ok(());
        }
        for r in &self.plan.requests {
            if let Some(s) = self.sessions.get_mut(&r.id) {
                s.begin(r.num_cached_tokens);
            }
        }
        let (mut schedule, mut sample) = (Duration::ZERO, Duration::ZERO);
        laps.lap(&mut schedule);
        let (scheduler, waited) = (&self.scheduler, self.runner.times.wait);
        let logits = self.runner.execute(&self.plan, |id, group| scheduler.block_table(id, group));
        let mut laps = Laps::start();
        let sampled = logits.and_then(|logits| {
            StepSampling {
                sampler: &mut self.sampler,
                choices: &mut self.choices,
                sessions: &mut self.sessions,
                scheduler: &self.scheduler,
                eos_ids: &self.eos_ids,
                observer: &mut self.observer,
                speculation: &mut self.speculation,
                events,
                outcomes: &mut self.outcomes,
            }
            .run(&self.plan, logits)
        });
        let failed = match sampled {
            Ok(failed) => failed,
            Err(e) => {
                self.scheduler.cancel_step()?;
                if e.out_of_memory().is_none() {
                    return Err(e.into());
                }
                self.give_up(e, events);
                return Ok(());
            }
        };
        for id in failed {
            self.scheduler.abort(id);
        }
        self.scheduler.finish_step(&self.plan, &self.outcomes)?;
        laps.lap(&mut sample);
        self.runner.times.schedule += schedule;
        self.runner.times.sample += sample.saturating_sub(self.runner.times.wait - waited);
        Ok(())
    }

    fn took_part(&self, id: RequestId) -> bool {
        self.plan.requests.iter().any(|r| r.id == id)
    }

    fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }

    fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    fn max_request_tokens(&self) -> usize {
        self.scheduler.max_total_tokens()
    }

    fn stats(&self) -> EngineStats {
        let (s, kv) = (self.scheduler.stats(), self.scheduler.kv());
        EngineStats {
            waiting: s.waiting,
            running: s.running,
            steps: s.steps,
            computed_tokens: s.computed_tokens,
            preemptions: s.preemptions,
            drafted_tokens: self.speculation.drafted.iter().sum(),
            accepted_tokens: self.speculation.accepted.iter().sum(),
            kv: kv.usage(),
            prefix: kv.stats(),
        }
    }
}
