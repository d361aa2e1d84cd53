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
mod schema;
mod stream;
mod tokenize;
mod tokens;

use crate::{
    ApiError,
    driver::{EngineHandle, Model, State as Engine, SubmitError},
    error::shown,
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
use grammar::Grammars;
use headway_engine::{GenerateRequest, text::Tokenizer};
use sampling::MAX_N;
use std::{
    fmt::Display,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};
use tokio::sync::{Semaphore, watch};

/// Updates of an answer that may wait for a client to read them, before it counts as too slow.
const WAITING_UPDATES: usize = 1024;

/// Requests that are read and tokenised at a time. Their texts take many times their size meanwhile, and cores that the
/// engine's threads run on.
const PREPARED_AT_ONCE: usize = 2;

/// Bytes up to which a body waits for small ones alone, and that are tokenised in one turn.
const SMALL: usize = 64 << 10;

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
    /// Set when the server is asked to end: requests that come then are not taken.
    pub draining: AtomicBool,
    /// Calls that came and whose answers are not written yet.
    pub calls: AtomicUsize,
    /// Set when the server's time to end is over: what isn't running by then is refused.
    pub over: watch::Sender<bool>,
    /// Turns of requests that are read and tokenised; small ones have their own.
    pub(crate) preparing: Arc<Semaphore>,
    pub(crate) preparing_small: Arc<Semaphore>,
    /// Turns of texts that are tokenised for their ids alone; they may be of any length, and hold no answer up.
    pub(crate) tokenizing: Arc<Semaphore>,
    /// Turns of schemas that are compiled.
    pub(crate) compiling: Arc<Semaphore>,
}

impl App {
    /// What handlers of a server share.
    pub fn new(engine: EngineHandle, metrics: Arc<Metrics>, options: ServeOptions) -> Self {
        Self {
            engine,
            metrics,
            options,
            grammars: OnceLock::new(),
            draining: AtomicBool::new(false),
            calls: AtomicUsize::new(0),
            over: watch::Sender::new(false),
            preparing: Arc::new(Semaphore::new(PREPARED_AT_ONCE)),
            preparing_small: Arc::new(Semaphore::new(PREPARED_AT_ONCE)),
            tokenizing: Arc::new(Semaphore::new(1)),
            compiling: Arc::new(Semaphore::new(1)),
        }
    }

    /// Runs what takes long for a request (reading its body of `bytes`, its template, its tokens) when it is its turn.
    ///
    /// # Errors
    /// `work`'s; 500 where it panicked.
    async fn prepare<T: Send + 'static>(
        self: &Arc<Self>,
        bytes: usize,
        work: impl FnOnce(&Self) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let app = Arc::clone(self);
        let turns = if bytes <= SMALL { &self.preparing_small } else { &self.preparing };
        in_turn(turns, move || work(&app)).await
    }

    /// Refuses what comes while the server ends.
    ///
    /// # Errors
    /// 503.
    pub fn open(&self) -> Result<(), ApiError> {
        match self.draining.load(Ordering::SeqCst) {
            true => Err(ending()),
            false => Ok(()),
        }
    }

    /// The model, where there is one.
    ///
    /// # Errors
    /// 503 while it loads, 500 where it broke.
    pub fn model(&self) -> Result<Arc<Model>, ApiError> {
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
            let asked = shown(asked.unwrap_or(""));
            let why = format!("the model {asked:?} is not served; {} is", names.join(", "));
            ApiError { param: Some("model".into()), ..ApiError::new(StatusCode::NOT_FOUND, why) }
                .with_code("model_not_found")
        })
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
            Some(len) => Err(too_long(prompt, len, room)),
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

    /// The ids of a prompt's text, which came in the parameter `prompt`. Tokenising takes a hundred times a text's memory, so
    /// one that is far too long is told by its beginning.
    ///
    /// # Errors
    /// 400 for text that the vocabulary can't express or that is too long, 422 without a tokenizer.
    pub(crate) fn encode(
        &self,
        text: &str,
        special: bool,
        prompt: &'static str,
    ) -> Result<Vec<u32>, ApiError> {
        let (tokenizer, room) = (self.tokenizer()?, self.max_request_tokens);
        let encode =
            |text: &str| tokenizer.encode(text, special).map_err(|e| ApiError::param(prompt, e.to_string()));
        // Most tokens have four bytes or so; a text of longer ones is looked at again, further on.
        let mut end = room.saturating_mul(16);
        while end < text.len() {
            let boundary = (0..=end).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
            // Twice, since a text's tokens are not quite its beginning's and more.
            if encode(&text[..boundary])?.len() > room.saturating_mul(2) {
                return Err(too_long(prompt, format_args!("more than {room}"), room));
            }
            end = end.saturating_mul(4);
        }
        encode(text)
    }
}

/// 400 for a prompt that no answer fits behind.
fn too_long(prompt: &'static str, tokens: impl Display, room: usize) -> ApiError {
    let why = format!(
        "the prompt has {tokens} tokens, and a request at most {room} with its answer; shorten it, or serve with a larger \
         --max-model-len"
    );
    ApiError::param(prompt, why).with_code("context_length_exceeded")
}

/// 503 for what comes, or isn't running yet, when the server ends.
fn ending() -> ApiError {
    ApiError::unavailable("the server is ending; try another one").with_code("draining")
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

/// Runs what takes long when it is its turn, which it has until it is done, whether somebody waits for it or not.
async fn in_turn<T: Send + 'static>(
    turns: &Arc<Semaphore>,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    // Nobody closes it.
    let turn = Arc::clone(turns).acquire_owned().await.ok();
    blocking(move || {
        let _turn = turn;
        work()
    })
    .await
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_is_far_too_long_is_told_by_its_beginning() {
        let dir = headway_testkit::testdata::model_dir("tiny-llama").unwrap();
        let tokenizer = Tokenizer::from_dir(&dir).unwrap();
        let model = Model {
            template: tokenizer.chat_template(),
            tokenizer: Some(tokenizer.clone()),
            max_request_tokens: 50,
            startup: serde_json::Value::Null,
            created: 0,
        };
        // As long as it may be, and a little longer: the tokens are the tokenizer's, and what they are too many for is
        // told where they are counted.
        for words in [1, 20, 60] {
            let text = "über sieben ".repeat(words);
            assert_eq!(model.encode(&text, true, "prompt").unwrap(), tokenizer.encode(&text, true).unwrap());
        }
        let e = model.encode(&"über sieben ".repeat(10_000), true, "prompt").unwrap_err();
        assert_eq!((e.status, e.param.as_deref()), (StatusCode::BAD_REQUEST, Some("prompt")));
        assert!(
            e.code == Some("context_length_exceeded") && e.message.contains("more than 50 tokens"),
            "{e:?}"
        );
    }

    /// Who leaves while his work is done does not make room for more of it.
    #[test]
    fn work_has_its_turn_until_it_is_done() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let turns = Arc::new(Semaphore::new(1));
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let first = in_turn(&turns, move || wait.recv().map_err(|_| ApiError::unavailable("gone")));
        let short = std::time::Duration::from_millis(30);
        assert!(runtime.block_on(async { tokio::time::timeout(short, first).await }).is_err());
        assert_eq!(turns.available_permits(), 0, "it goes on");
        go.send(()).unwrap();
        assert_eq!(runtime.block_on(in_turn(&turns, || Ok(7))).unwrap(), 7);
    }
}
