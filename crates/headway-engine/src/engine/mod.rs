//! The engine: requests in, tokens and text out. [`Engine`] is what the CLI and a server call;
//! [`LlmEngine`] is the one with a model behind it.

mod embed;
mod llm;
mod open;
mod ranges;
mod request;
mod sample;
mod session;
mod stats;

pub use embed::{EmbedError, EmbedOptions, Embedder};
pub use llm::{LlmEngine, LogitsObserver};
pub use open::OpenProgress;
pub(crate) use open::refusal as open_refusal;
pub use ranges::RangeError;
pub use request::{Event, FinishReason, Finished, GenerateRequest, NewToken, RequestError, Timings};
pub use stats::EngineStats;

use crate::{
    models::ModelError,
    scheduler::{RequestId, SchedulerError},
    text::Tokenizer,
};

/// How the encoder of an encoder-decoder is reached.
pub const ENCODER_INPUT: &str =
    "its input comes with each request, as encoder_ids of GenerateRequest, which the Rust API alone takes";

/// Why a step failed. Requests stay queued; the same error may come back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The scheduler.
    #[error(transparent)]
    Scheduler(#[from] SchedulerError),
    /// The model's step.
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// An engine that runs requests together, step by step. One thread drives it.
///
/// Two requests with one model in memory, until both have ended (the model is one of the project's test data; any
/// folder with a `config.json` and weights does):
///
/// ```
/// use headway_engine::{Engine, EngineOptions, Event, GenerateRequest, LlmEngine};
/// let model = headway_testkit::testdata::model_dir("tiny-llama")?;
/// let options = EngineOptions { kv_cache_memory: Some(1 << 20), ..EngineOptions::default() };
/// let mut engine = LlmEngine::open(&model, &options, &mut |_, _| ())?;
/// for prompt_ids in [vec![1, 2, 3], vec![4, 5]] {
///     let mut request = GenerateRequest { prompt_ids, ..GenerateRequest::default() };
///     (request.sampling.max_tokens, request.sampling.ignore_eos) = (Some(4), true);
///     engine.add(request)?;
/// }
/// let (mut events, mut answers) = (vec![], vec![]);
/// while !engine.is_idle() {
///     engine.step(&mut events)?;
///     for event in events.drain(..) {
///         match event {
///             Event::Token(id, token) => println!("{id:?}: {}", token.token_id),
///             Event::Finished(_, answer) => answers.push(answer.token_ids.len()),
///             Event::Failed(_, error) => return Err(error.into()),
///         }
///     }
/// }
/// assert_eq!(answers, [4, 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Engine {
    /// Queues a request.
    ///
    /// # Errors
    /// What can never run: parameters out of range, too long, ids outside the vocabulary. Other requests
    /// are not touched.
    fn add(&mut self, request: GenerateRequest) -> Result<RequestId, RequestError>;

    /// Ends a request; `false` when there is none of that id. Its pages go back to the pool.
    fn abort(&mut self, id: RequestId) -> bool;

    /// Runs one step and appends what came of it. Without work it does nothing. A step that memory doesn't suffice for
    /// ends the request that asked most of it ([`RequestError::OutOfMemory`]); the others are computed later.
    ///
    /// # Errors
    /// A step that failed as a whole; nothing of it counts.
    fn step(&mut self, events: &mut Vec<Event>) -> Result<(), StepError>;

    /// Whether the last step computed tokens of a request: where that step failed as a whole, those that it failed for. The others
    /// lost nothing and can go on.
    fn took_part(&self, id: RequestId) -> bool;

    /// Whether no request is queued or running.
    fn is_idle(&self) -> bool;

    /// The model's tokenizer, where it has one.
    fn tokenizer(&self) -> Option<&Tokenizer>;

    /// The most tokens of a request, prompt and answer.
    fn max_request_tokens(&self) -> usize;

    /// How it stands now.
    fn stats(&self) -> EngineStats;
}
