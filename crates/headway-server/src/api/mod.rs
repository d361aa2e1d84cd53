//! HTTP: a folder or file an endpoint. Handlers read a body, ask the engine, and shape its answer.

mod answer;
mod body;
mod call;
mod chat;
mod completions;
mod fields;
mod grammar;
mod guard;
mod info;
mod sampling;
mod stream;
mod tokenize;
mod tokens;

use crate::{
    ApiError,
    driver::{EngineHandle, Model, State as Engine, SubmitError},
    metrics::Metrics,
    options::ServeOptions,
};
use answer::Answer;
use axum::{
    Router,
    http::StatusCode,
    routing::{get, post},
};
use completions::MAX_LOGPROBS;
use grammar::{Format, Grammars};
use headway_engine::{GenerateRequest, sampling::Constraint, text::Tokenizer};
use sampling::MAX_N;
use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

/// Updates of an answer that may wait for a client to read them, before it counts as too slow.
const WAITING_UPDATES: usize = 1024;

/// What handlers share.
pub struct App {
    /// Runs requests.
    pub engine: EngineHandle,
    /// What `/metrics` shows.
    pub metrics: Arc<Metrics>,
    /// As the command line has them.
    pub options: ServeOptions,
    /// Made for the first request that wants one.
    pub(crate) grammars: OnceLock<Result<Grammars, ApiError>>,
    /// Set when the server is asked to end: requests are not taken any more.
    pub draining: AtomicBool,
}

impl App {
    /// The model, where requests are taken.
    ///
    /// # Errors
    /// 503 while it loads or the server ends, 500 where it broke.
    pub fn model(&self) -> Result<Arc<Model>, ApiError> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(ApiError::unavailable("the server is ending; try another one").with_code("draining"));
        }
        match self.engine.state() {
            Engine::Ready(model) => Ok(model),
            Engine::Loading { done, total } => {
                let text = format!("the model is loading ({done} of {total} layers); try again soon");
                Err(ApiError::unavailable(text).with_code("loading"))
            }
            Engine::Ended | Engine::Broken(_) => {
                Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the engine ended"))
            }
        }
    }

    /// The name of the model that a request means.
    ///
    /// # Errors
    /// 404 for one that isn't served.
    pub fn served(&self, asked: Option<&str>) -> Result<&str, ApiError> {
        let names = &self.options.served_names;
        let found = match asked {
            None => names.first(),
            Some(name) => names.iter().find(|n| *n == name),
        };
        found.map(String::as_str).ok_or_else(|| {
            let why = format!("the model {:?} is not served; {} is", asked.unwrap_or(""), names.join(", "));
            ApiError { param: Some("model".into()), ..ApiError::new(StatusCode::NOT_FOUND, why) }
                .with_code("model_not_found")
        })
    }

    /// The constraint that a format puts on an answer. May take a while: not for the tasks of other requests.
    ///
    /// # Errors
    /// A schema that is none, a model without a tokenizer.
    fn constraint(
        &self,
        format: Option<&Format>,
        model: &Model,
    ) -> Result<Option<Box<dyn Constraint>>, ApiError> {
        let Some(format) = format else { return Ok(None) };
        let grammars = self.grammars.get_or_init(|| Grammars::new(model.tokenizer()?));
        grammars.as_ref().map_err(Clone::clone)?.constraint(format).map(Some)
    }

    /// Whether a call may be put to the engine: nothing is copied for one that may not.
    ///
    /// # Errors
    /// 400 for more answers than a call may have, or a prompt that no answer would fit behind; `prompt` is the parameter
    /// that holds the prompts.
    fn admit(
        &self,
        prompts: &[Vec<u32>],
        n: usize,
        prompt: &'static str,
        model: &Model,
    ) -> Result<(), ApiError> {
        let (answers, most) = (prompts.len() * n, self.options.max_queue.max(MAX_N));
        if answers > most {
            let why = format!(
                "{} prompts with {n} answers each are {answers}; a call has at most {most}",
                prompts.len()
            );
            return Err(ApiError::param("n", why));
        }
        let room = model.max_request_tokens;
        match prompts.iter().map(Vec::len).find(|len| *len >= room) {
            None => Ok(()),
            Some(len) => {
                let why = format!(
                    "the prompt has {len} tokens, and a request at most {room} with its answer; shorten it, or serve with a \
                     larger --max-model-len"
                );
                Err(ApiError::param(prompt, why).with_code("context_length_exceeded"))
            }
        }
    }

    /// Has the engine run `requests`.
    async fn submit(&self, requests: Vec<GenerateRequest>) -> Result<Answer, SubmitError> {
        let capacity = WAITING_UPDATES.max(8 * requests.len());
        let ticket = self.engine.submit(requests, capacity).await?;
        Ok(Answer::new(ticket, self.options.request_timeout))
    }
}

impl Model {
    /// The tokenizer.
    ///
    /// # Errors
    /// 422 where the model came without one.
    pub(crate) fn tokenizer(&self) -> Result<&Tokenizer, ApiError> {
        self.tokenizer.as_ref().ok_or_else(|| {
            let why = "the model came without a tokenizer; give token ids as the prompt of /v1/completions";
            ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, why)
        })
    }
}

/// `n` copies of a request; with a seed, each has one of its own.
fn copies(request: &GenerateRequest, n: usize) -> impl Iterator<Item = GenerateRequest> {
    let request = request.clone();
    (0..n).map(move |i| {
        let mut copy = request.clone();
        copy.sampling.seed = copy.sampling.seed.map(|s| s.wrapping_add(i as u64));
        copy
    })
}

/// Runs what takes long away from the tasks of other requests.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| {
        tracing::error!(error = %e, "a handler failed");
        Err(ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the request's handling failed; the server goes on",
        ))
    })
}

/// Every endpoint.
pub fn router(app: Arc<App>) -> Router {
    let answers = Router::new()
        .route("/v1/completions", post(completions::handle))
        .route("/v1/chat/completions", post(chat::handle))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/v1/models", get(info::models))
        .route("/v1/models/{*name}", get(info::model))
        .route("/v1/headway/startup", get(info::startup));
    let open = Router::new()
        .route("/", get(info::page))
        .route("/health", get(info::health))
        .route("/version", get(info::version))
        .route("/metrics", get(info::metrics))
        .route("/openapi.json", get(info::openapi));
    guard::around(answers, open, Arc::clone(&app)).with_state(app)
}
