//! [`Active`]: what the engine's thread keeps of a request.

use super::ticket::{Ended, Update, What, Why};
use crate::metrics::Metrics;
use headway_engine::engine::Finished;
use std::time::Instant;
use tokio::sync::mpsc::{Sender, error::TrySendError};

/// A request that the engine has.
pub struct Active {
    index: usize,
    to: Sender<Update>,
    why: Why,
    prompt_tokens: usize,
    arrived: Instant,
    last_token: Option<Instant>,
}

impl Active {
    pub fn new(index: usize, prompt_tokens: usize, to: Sender<Update>, why: Why) -> Self {
        Self { index, to, why, prompt_tokens, arrived: Instant::now(), last_token: None }
    }

    /// Takes note of a token. Tokens that one step brought together have no time between them.
    pub fn token(&mut self, now: Instant, metrics: &Metrics) {
        match self.last_token.replace(now) {
            None => metrics.first_token(now - self.arrived),
            Some(last) => metrics.next_token(now - last),
        }
    }

    /// Takes note of the end.
    pub fn finished(&self, now: Instant, finished: &Finished, metrics: &Metrics) {
        metrics.finished(finished.reason, now - self.arrived, self.prompt_tokens);
    }

    /// Never waits: who doesn't take updates loses the request.
    pub fn send(&self, what: What) -> Result<(), Ended> {
        self.to.try_send(Update { index: self.index, what }).map_err(|e| match e {
            TrySendError::Full(_) => Ended::SlowReader,
            TrySendError::Closed(_) => Ended::ClientLeft,
        })
    }

    /// The ticket learns why no update comes any more.
    pub fn end(self, why: Ended) {
        let _ = self.why.set(why);
    }
}
