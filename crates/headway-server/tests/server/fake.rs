//! An engine without a model: every step gives each running request a word. Tests slow it down and break it.

use headway_engine::{
    Engine, Event, GenerateRequest,
    engine::{EngineStats, FinishReason, Finished, NewToken, RequestError, StepError, Timings},
    kv::KvUsage,
    sampling::{Logprobs, TokenLogprob},
    scheduler::{RequestId, SchedulerError},
    speculation::SpeculationStats,
    text::Tokenizer,
};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

/// A prompt with this id fails after its first token.
pub const FAILS: u32 = 13;
/// The most tokens of a request.
pub const MAX_TOKENS: usize = 100_000;

/// What a test turns while the engine runs.
pub struct Knobs {
    pub step_time: Mutex<Duration>,
    pub word_bytes: AtomicUsize,
    pub failing_steps: AtomicUsize,
    pub panics: AtomicBool,
    pub max_running: AtomicUsize,
    /// Requests that the engine has.
    pub alive: AtomicUsize,
    pub aborted: AtomicUsize,
    pub steps: AtomicUsize,
}

impl Default for Knobs {
    fn default() -> Self {
        Self {
            step_time: Mutex::new(Duration::from_millis(1)),
            word_bytes: AtomicUsize::new(2),
            failing_steps: AtomicUsize::new(0),
            panics: AtomicBool::new(false),
            max_running: AtomicUsize::new(64),
            alive: AtomicUsize::new(0),
            aborted: AtomicUsize::new(0),
            steps: AtomicUsize::new(0),
        }
    }
}

/// The engine.
pub struct Fake {
    knobs: Arc<Knobs>,
    tokenizer: Tokenizer,
    requests: BTreeMap<RequestId, (GenerateRequest, usize)>,
    next: u64,
}

impl Fake {
    pub fn new(knobs: Arc<Knobs>, tokenizer: Tokenizer) -> Self {
        Self { knobs, tokenizer, requests: BTreeMap::new(), next: 0 }
    }

    fn running(&self) -> usize {
        self.requests.len().min(self.knobs.max_running.load(SeqCst))
    }

    fn word(&self, request: &GenerateRequest, i: usize) -> NewToken {
        let mut text = format!("{} ", (b'a' + (i % 26) as u8) as char);
        text.extend(std::iter::repeat_n('x', self.knobs.word_bytes.load(SeqCst).saturating_sub(2)));
        let logprobs = request.sampling.logprobs.map(|n| Logprobs {
            top: (0..n as u32).map(|t| TokenLogprob { token_id: t, logprob: -1.0 - t as f32 }).collect(),
            log_sum_exp: 0.0,
        });
        let (token_id, logprob) = (40 + (i % 26) as u32, logprobs.as_ref().map(|_| -1.5));
        NewToken { token_id, text_offset: i * text.chars().count(), text, logprob, logprobs }
    }
}

impl Engine for Fake {
    fn add(&mut self, request: GenerateRequest) -> Result<RequestId, RequestError> {
        request.sampling.validate()?;
        let (prompt_tokens, max_tokens) =
            (request.prompt_ids.len(), request.sampling.max_tokens.unwrap_or(8));
        let total = prompt_tokens + max_tokens;
        if total > MAX_TOKENS {
            let max_model_len = MAX_TOKENS;
            return Err(
                SchedulerError::TooLongForModel { prompt_tokens, max_tokens, total, max_model_len }.into()
            );
        }
        self.next += 1;
        self.requests.insert(RequestId(self.next), (request, 0));
        self.knobs.alive.store(self.requests.len(), SeqCst);
        Ok(RequestId(self.next))
    }

    fn abort(&mut self, id: RequestId) -> bool {
        let found = self.requests.remove(&id).is_some();
        self.knobs.alive.store(self.requests.len(), SeqCst);
        self.knobs.aborted.fetch_add(usize::from(found), SeqCst);
        found
    }

    fn step(&mut self, events: &mut Vec<Event>) -> Result<(), StepError> {
        std::thread::sleep(*self.knobs.step_time.lock().unwrap());
        self.knobs.steps.fetch_add(1, SeqCst);
        assert!(!self.knobs.panics.load(SeqCst), "the fake engine was told to panic");
        let left = self.knobs.failing_steps.load(SeqCst);
        if left > 0 {
            self.knobs.failing_steps.store(left - 1, SeqCst);
            return Err(SchedulerError::NoStep.into());
        }
        let running: Vec<RequestId> = self.requests.keys().copied().take(self.running()).collect();
        for id in running {
            let (request, done) = &self.requests[&id];
            let (done, most) = (*done, request.sampling.max_tokens.unwrap_or(8));
            if done == 1 && request.prompt_ids.contains(&FAILS) {
                self.requests.remove(&id);
                events.push(Event::Failed(id, SchedulerError::EmptyPrompt.into()));
                continue;
            }
            events.push(Event::Token(id, self.word(request, done)));
            if done + 1 < most {
                self.requests.get_mut(&id).unwrap().1 += 1;
                continue;
            }
            self.requests.remove(&id);
            events.push(Event::Finished(
                id,
                Finished {
                    reason: FinishReason::Length,
                    token_ids: vec![40; most],
                    cached_tokens: 1,
                    seed: 0,
                    timings: Timings::default(),
                    speculation: SpeculationStats::default(),
                },
            ));
        }
        self.knobs.alive.store(self.requests.len(), SeqCst);
        Ok(())
    }

    fn took_part(&self, id: RequestId) -> bool {
        self.requests.keys().take(self.running()).any(|r| *r == id)
    }

    fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    fn tokenizer(&self) -> Option<&Tokenizer> {
        Some(&self.tokenizer)
    }

    fn max_request_tokens(&self) -> usize {
        MAX_TOKENS
    }

    fn stats(&self) -> EngineStats {
        let running = self.running();
        EngineStats {
            running,
            waiting: self.requests.len() - running,
            steps: self.knobs.steps.load(SeqCst) as u64,
            kv: KvUsage {
                total_pages: 64,
                used_pages: running,
                free_pages: 64 - running,
                cached_free_pages: 0,
            },
            ..EngineStats::default()
        }
    }
}
