//! [`Answer`]: a call's updates as they come, within its time; [`whole`] waits for all of them.

use crate::{
    ApiError,
    driver::{Ended, SubmitError, Ticket, Update, What},
};
use axum::http::StatusCode;
use headway_engine::{
    engine::{Finished, NewToken, RequestError},
    scheduler::SchedulerError,
};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::Instant;

/// Tokens of a call.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Of the prompts, each once.
    pub prompt_tokens: usize,
    /// Of all answers.
    pub completion_tokens: usize,
    /// Of the prompts, tokens found in the prefix cache.
    pub cached_tokens: usize,
}

impl Usage {
    /// As the API has it.
    pub fn json(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        })
    }

    /// Counts a token.
    pub fn token(&mut self) {
        self.completion_tokens += 1;
    }

    /// Counts what the first answer to a prompt found cached.
    pub fn finished(&mut self, index: usize, n: usize, finished: &Finished) {
        if index.is_multiple_of(n) {
            self.cached_tokens += finished.cached_tokens;
        }
    }
}

/// Updates of a call, until its time is over.
pub struct Answer {
    ticket: Ticket,
    deadline: Option<(Instant, Duration)>,
}

impl Answer {
    /// With at most `limit` from now on.
    pub fn new(ticket: Ticket, limit: Option<Duration>) -> Self {
        Self { ticket, deadline: limit.map(|l| (Instant::now() + l, l)) }
    }

    /// Answers that will come.
    pub fn len(&self) -> usize {
        self.ticket.len()
    }

    /// The next update; `None` when all answers are there.
    ///
    /// # Errors
    /// The call ended before, or its time is over.
    pub async fn next(&mut self) -> Result<Option<Update>, ApiError> {
        let next = self.ticket.next();
        let update = match self.deadline {
            None => next.await,
            Some((at, limit)) => tokio::time::timeout_at(at, next).await.map_err(|_| {
                ApiError::new(
                    StatusCode::GATEWAY_TIMEOUT,
                    format!(
                        "the answer took longer than {} s; ask for fewer tokens, or raise --request-timeout",
                        limit.as_secs_f64()
                    ),
                )
            })?,
        };
        update.map_err(ended)
    }
}

/// One whole answer.
#[derive(Debug)]
pub struct Whole {
    /// Its tokens.
    pub tokens: Vec<NewToken>,
    /// How it ended.
    pub finished: Finished,
}

impl Whole {
    /// Its text.
    pub fn text(&self) -> String {
        self.tokens.iter().map(|t| t.text.as_str()).collect()
    }
}

/// All answers of a call, in order; `n` to each prompt.
///
/// # Errors
/// One of them failed, or the call ended before.
pub async fn whole(mut answer: Answer, n: usize, usage: &mut Usage) -> Result<Vec<Whole>, ApiError> {
    let mut parts: Vec<(Vec<NewToken>, Option<Finished>)> =
        (0..answer.len()).map(|_| (vec![], None)).collect();
    while let Some(Update { index, what }) = answer.next().await? {
        let Some((tokens, end)) = parts.get_mut(index) else { continue };
        match what {
            What::Token(t) => {
                usage.token();
                tokens.push(t);
            }
            What::Finished(f) => {
                usage.finished(index, n, &f);
                *end = Some(f);
            }
            What::Failed(why) => return Err(failed(&why)),
        }
    }
    let all = parts.into_iter().map(|(tokens, end)| end.map(|finished| Whole { tokens, finished }));
    all.collect::<Option<_>>().ok_or_else(|| ended(Ended::Gone))
}

/// Why a request failed under way, as its client sees it.
pub fn failed(why: &RequestError) -> ApiError {
    match why {
        // The client's schema came to a place where finding the next token takes too long.
        RequestError::Constraint(_) => ApiError::unprocessable("response_format", why.to_string()),
        _ => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, why.to_string()),
    }
}

/// Why a call ended, as its client sees it.
fn ended(why: Ended) -> ApiError {
    let text = why.to_string();
    match why {
        Ended::ServerEnds => ApiError::unavailable(text),
        Ended::SlowReader => ApiError::new(StatusCode::REQUEST_TIMEOUT, text).with_code("slow_reader"),
        _ => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, text),
    }
}

/// Why a call was not taken; `prompt` is the parameter that holds its prompt.
pub fn refused(e: SubmitError, prompt: &'static str) -> ApiError {
    match e {
        SubmitError::QueueFull { waiting, max_queue } => ApiError::new(
            StatusCode::TOO_MANY_REQUESTS,
            format!("{waiting} requests wait already and --max-queue is {max_queue}; try again later"),
        )
        .retry_after(1),
        SubmitError::Gone => ended(Ended::Gone),
        SubmitError::Refused(e) => {
            // The engine speaks of options; here they are parameters.
            let text = [
                ("--max-tokens", "max_tokens"),
                ("--min-tokens", "min_tokens"),
                ("--logit-bias", "logit_bias"),
                ("--stop-token-ids", "stop_token_ids"),
                ("--stop", "stop"),
            ];
            let text = text.into_iter().fold(e.to_string(), |t, (option, name)| t.replace(option, name));
            match e {
                RequestError::Params(p) => {
                    ApiError::param(p.option.trim_start_matches("--").replace('-', "_"), text)
                }
                RequestError::Scheduler(
                    SchedulerError::TooLongForModel { .. } | SchedulerError::NeverFits { .. },
                ) => ApiError::param(prompt, text).with_code("context_length_exceeded"),
                RequestError::StopWithoutTokenizer => ApiError::unprocessable("stop", text),
                RequestError::Text(_) => ApiError::param("stop", text),
                RequestError::BiasOutOfRange { .. } => ApiError::param("logit_bias", text),
                RequestError::StopOutOfRange { .. } => ApiError::param("stop_token_ids", text),
                _ => ApiError::param(prompt, text),
            }
        }
    }
}
