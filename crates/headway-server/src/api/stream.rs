//! Answers as server-sent events: one JSON object an event, `[DONE]` at the end.

use super::answer::{Answer, Usage, failed};
use crate::{
    ApiError,
    driver::{Update, What},
};
use axum::response::{
    IntoResponse, Response, Sse,
    sse::{Event, KeepAlive},
};
use headway_engine::engine::{Finished, NewToken};
use serde_json::Value;
use std::{collections::VecDeque, convert::Infallible, time::Duration};

/// Comments keep proxies from closing a stream whose prompt is still being computed.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// What the events of an endpoint look like.
pub trait Chunks: Send + 'static {
    /// Events before any token.
    fn open(&mut self) -> Vec<Value>;
    /// A token of an answer; `None`: nothing to show yet.
    fn token(&mut self, index: usize, token: NewToken) -> Option<Value>;
    /// The end of an answer.
    fn finished(&mut self, index: usize, finished: &Finished) -> Value;
    /// The event of the token counts.
    fn usage(&mut self, usage: &Usage) -> Value;
}

/// A stream in progress.
struct Streaming<C> {
    answer: Answer,
    chunks: C,
    n: usize,
    usage: Usage,
    include_usage: bool,
    queue: VecDeque<Event>,
    done: bool,
}

/// The response; `usage` has the prompt's tokens, `n` answers are to each prompt.
pub fn respond<C: Chunks>(
    answer: Answer,
    mut chunks: C,
    n: usize,
    usage: Usage,
    include_usage: bool,
) -> Response {
    let queue = chunks.open().iter().map(data).collect();
    let first = Streaming { answer, chunks, n, usage, include_usage, queue, done: false };
    let events = futures_util::stream::unfold(first, |mut s| async move {
        let event = s.next().await?;
        Some((Ok::<_, Infallible>(event), s))
    });
    let mut response = Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response();
    // Proxies that buffer would keep tokens back.
    response.headers_mut().insert("x-accel-buffering", axum::http::HeaderValue::from_static("no"));
    response
}

fn data(value: &Value) -> Event {
    // Display writes compact JSON without line ends.
    Event::default().data(value.to_string())
}

impl<C: Chunks> Streaming<C> {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.queue.pop_front() {
                return Some(event);
            }
            if self.done {
                return None;
            }
            match self.answer.next().await {
                Ok(Some(update)) => self.take(update),
                Ok(None) => {
                    if self.include_usage {
                        self.queue.push_back(data(&self.chunks.usage(&self.usage)));
                    }
                    self.close();
                }
                Err(e) => self.fail(&e),
            }
        }
    }

    fn take(&mut self, Update { index, what }: Update) {
        match what {
            What::Token(token) => {
                self.usage.token();
                self.queue.extend(self.chunks.token(index, token).as_ref().map(data));
            }
            What::Finished(f) => {
                self.usage.finished(index, self.n, &f);
                self.queue.push_back(data(&self.chunks.finished(index, &f)));
            }
            What::Failed(why) => self.fail(&failed(&why)),
        }
    }

    /// The status is sent long ago; the error is the last event but one.
    fn fail(&mut self, e: &ApiError) {
        self.queue.push_back(data(&e.body()));
        self.close();
    }

    fn close(&mut self) {
        self.queue.push_back(Event::default().data("[DONE]"));
        self.done = true;
    }
}
