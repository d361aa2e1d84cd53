//! [`Ticket`]: the way back of the requests of one call.

use super::EngineHandle;
use headway_engine::{
    engine::{Finished, NewToken, RequestError},
    scheduler::RequestId,
};
use std::sync::{Arc, OnceLock};
use tokio::sync::mpsc::Receiver;

/// News of one request.
#[derive(Debug)]
pub struct Update {
    /// Which of the call's requests.
    pub index: usize,
    /// What happened.
    pub what: What,
}

/// What happened to a request.
#[derive(Debug)]
pub enum What {
    /// A token.
    Token(NewToken),
    /// It ended well.
    Finished(Finished),
    /// It ended by an error of its own.
    Failed(RequestError),
}

/// Why a call ended before its requests did.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Ended {
    /// Nobody is left to tell.
    #[error("the client left")]
    ClientLeft,
    /// Updates piled up.
    #[error("the answer was read too slowly, and ended; read it as it comes")]
    SlowReader,
    /// The engine's step.
    #[error("the engine failed in a step: {0}")]
    StepFailed(String),
    /// No time left.
    #[error("the server is ending; try again later")]
    ServerEnds,
    /// The engine's thread is no more.
    #[error("the engine ended")]
    Gone,
}

/// Written once, by the engine's thread.
pub(super) type Why = Arc<OnceLock<Ended>>;

/// Updates of the requests of one call; dropping it ends those that still run.
pub struct Ticket {
    ids: Vec<RequestId>,
    updates: Receiver<Update>,
    why: Why,
    running: usize,
    engine: EngineHandle,
}

impl Ticket {
    pub(super) fn new(
        ids: Vec<RequestId>,
        updates: Receiver<Update>,
        why: Why,
        engine: EngineHandle,
    ) -> Self {
        Self { running: ids.len(), ids, updates, why, engine }
    }

    /// The next update; `None` when every request has ended.
    ///
    /// # Errors
    /// The call ended before its requests.
    pub async fn next(&mut self) -> Result<Option<Update>, Ended> {
        if self.running == 0 {
            return Ok(None);
        }
        match self.updates.recv().await {
            Some(update) => {
                if !matches!(update.what, What::Token(_)) {
                    self.running -= 1;
                }
                Ok(Some(update))
            }
            None => {
                self.running = 0;
                Err(self.why.get().cloned().unwrap_or(Ended::Gone))
            }
        }
    }

    /// Requests of the call.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether the call has none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.running > 0 {
            self.engine.abort(std::mem::take(&mut self.ids));
        }
    }
}
