//! The engine's thread, and how requests reach it. `Driver` owns the engine and steps it; an [`EngineHandle`] sends it
//! requests from any task; a [`Ticket`] is the way back for one of them, and ends it when dropped: a client that leaves
//! drops its ticket.
//!
//! Lifetime: the server. Not for HTTP, which is [`crate::api`]'s.

mod active;
mod state;
mod ticket;

pub use state::{Model, State};
pub use ticket::{Ended, Ticket, Update, What};

use crate::metrics::Metrics;
use active::Active;
use headway_engine::{Engine, Event, GenerateRequest, engine::RequestError, scheduler::RequestId};
use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, mpsc as sync_mpsc},
    time::Instant,
};
use tokio::sync::{mpsc, oneshot, watch};

/// Steps that may fail one after another before the engine counts as broken.
const MAX_FAILED_STEPS: usize = 8;

/// Why a request was not taken.
#[derive(Debug)]
pub enum SubmitError {
    /// Another one may be taken soon.
    QueueFull {
        /// Requests that wait.
        waiting: usize,
        /// `--max-queue`.
        max_queue: usize,
    },
    /// It can never run.
    Refused(RequestError),
    /// There is no engine any more.
    Gone,
}

/// What the engine's thread is told.
enum Command {
    /// Run these, all or none.
    Add {
        requests: Vec<GenerateRequest>,
        to: mpsc::Sender<Update>,
        ended: ticket::Why,
        reply: oneshot::Sender<Result<Vec<RequestId>, SubmitError>>,
    },
    /// End these.
    Abort(Vec<RequestId>),
    /// End all, saying so.
    AbortAll,
}

/// Sends requests to the engine. Cheap to clone.
#[derive(Clone)]
pub struct EngineHandle {
    commands: sync_mpsc::Sender<Command>,
    state: watch::Receiver<State>,
}

impl EngineHandle {
    /// Starts the engine's thread: it opens the engine, then runs requests until every handle is gone.
    ///
    /// # Errors
    /// No thread to be had.
    pub fn start<E: Engine>(
        open: impl FnOnce(&mut dyn FnMut(usize, usize)) -> Result<(E, Model), String> + Send + 'static,
        max_queue: usize,
        metrics: Arc<Metrics>,
    ) -> std::io::Result<Self> {
        let (commands, inbox) = sync_mpsc::channel();
        let (tell, state) = watch::channel(State::Loading { done: 0, total: 0 });
        let run = move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                let (engine, model) = open(&mut |done, total| {
                    let _ = tell.send(State::Loading { done, total });
                })?;
                let _ = tell.send(State::Ready(Arc::new(model)));
                Driver { engine, inbox, active: HashMap::new(), max_queue, metrics, failed_steps: 0 }.run()
            }));
            let _ = tell.send(match outcome {
                Ok(Ok(())) => State::Ended,
                Ok(Err(why)) => State::Broken(why),
                Err(panic) => State::Broken(format!("the engine's thread panicked: {}", said(&*panic))),
            });
        };
        std::thread::Builder::new().name("headway-engine".into()).spawn(run)?;
        Ok(Self { commands, state })
    }

    /// Has the engine run `requests`, all or none; `capacity` updates may wait to be taken.
    ///
    /// # Errors
    /// A full queue, requests that can never run, an engine that is gone.
    pub async fn submit(
        &self,
        requests: Vec<GenerateRequest>,
        capacity: usize,
    ) -> Result<Ticket, SubmitError> {
        let (to, updates) = mpsc::channel(capacity);
        let (reply, answer) = oneshot::channel();
        let ended = ticket::Why::default();
        let add = Command::Add { requests, to, ended: Arc::clone(&ended), reply };
        self.commands.send(add).map_err(|_| SubmitError::Gone)?;
        let ids = answer.await.map_err(|_| SubmitError::Gone)??;
        Ok(Ticket::new(ids, updates, ended, self.clone()))
    }

    /// Ends every request; their clients are told that the server ends.
    pub fn abort_all(&self) {
        let _ = self.commands.send(Command::AbortAll);
    }

    /// Whether the engine can take requests.
    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// Sees every change of state.
    pub fn watch(&self) -> watch::Receiver<State> {
        self.state.clone()
    }

    fn abort(&self, ids: Vec<RequestId>) {
        let _ = self.commands.send(Command::Abort(ids));
    }
}

/// What a panic said.
fn said(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}

/// Drives the engine; lives on its thread.
struct Driver<E> {
    engine: E,
    inbox: sync_mpsc::Receiver<Command>,
    active: HashMap<RequestId, Active>,
    max_queue: usize,
    metrics: Arc<Metrics>,
    failed_steps: usize,
}

impl<E: Engine> Driver<E> {
    /// Until every handle is gone.
    fn run(mut self) -> Result<(), String> {
        let mut events = vec![];
        self.metrics.engine(&self.engine.stats());
        loop {
            if self.engine.is_idle() {
                match self.inbox.recv() {
                    Ok(command) => self.obey(command),
                    Err(_) => return Ok(()),
                }
            }
            while let Ok(command) = self.inbox.try_recv() {
                self.obey(command);
            }
            if !self.engine.is_idle() {
                self.step(&mut events)?;
            }
            self.metrics.engine(&self.engine.stats());
        }
    }

    fn step(&mut self, events: &mut Vec<Event>) -> Result<(), String> {
        events.clear();
        let outcome = self.engine.step(events);
        let now = Instant::now();
        // Before any client hears of the step, so that one that looks finds its own answer counted.
        self.metrics.engine(&self.engine.stats());
        for event in events.drain(..) {
            self.deliver(event, now);
        }
        match outcome {
            Ok(()) => self.failed_steps = 0,
            // Nothing of the step counts, and the same may come again: whoever took part learns of it, who waits doesn't.
            Err(e) => {
                let took_part = |id: &&RequestId| self.engine.took_part(**id);
                let mut ids: Vec<RequestId> = self.active.keys().filter(took_part).copied().collect();
                if ids.is_empty() {
                    ids = self.active.keys().copied().collect();
                }
                tracing::error!(error = %e, requests = ids.len(), "a step failed");
                self.end(&ids, &Ended::StepFailed(e.to_string()));
                self.failed_steps += 1;
                if self.failed_steps == MAX_FAILED_STEPS {
                    return Err(format!("{MAX_FAILED_STEPS} steps failed one after another, the last: {e}"));
                }
            }
        }
        Ok(())
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Add { requests, to, ended, reply } => {
                let added = self.add(requests, &to, &ended);
                let ids = added.as_ref().map_or(vec![], Vec::clone);
                // The client left before its answer began.
                if reply.send(added).is_err() {
                    self.abort(&ids);
                }
            }
            Command::Abort(ids) => self.abort(&ids),
            Command::AbortAll => self.end_all(&Ended::ServerEnds),
        }
    }

    fn add(
        &mut self,
        requests: Vec<GenerateRequest>,
        to: &mpsc::Sender<Update>,
        ended: &ticket::Why,
    ) -> Result<Vec<RequestId>, SubmitError> {
        let waiting = self.engine.stats().waiting;
        if waiting + requests.len() > self.max_queue.max(requests.len()) || waiting >= self.max_queue {
            return Err(SubmitError::QueueFull { waiting, max_queue: self.max_queue });
        }
        let mut ids = vec![];
        for (index, request) in requests.into_iter().enumerate() {
            let prompt_tokens = request.prompt_ids.len();
            match self.engine.add(request) {
                Ok(id) => {
                    self.active.insert(id, Active::new(index, prompt_tokens, to.clone(), Arc::clone(ended)));
                    ids.push(id);
                }
                Err(e) => {
                    self.abort(&ids);
                    return Err(SubmitError::Refused(e));
                }
            }
        }
        Ok(ids)
    }

    fn abort(&mut self, ids: &[RequestId]) {
        for id in ids {
            if self.active.remove(id).is_some() {
                self.metrics.aborted();
            }
            self.engine.abort(*id);
        }
    }

    fn end_all(&mut self, why: &Ended) {
        let ids: Vec<RequestId> = self.active.keys().copied().collect();
        self.end(&ids, why);
    }

    fn end(&mut self, ids: &[RequestId], why: &Ended) {
        for id in ids {
            self.engine.abort(*id);
            if let Some(active) = self.active.remove(id) {
                active.end(why.clone());
                self.metrics.failed();
            }
        }
    }

    /// An event to the client that it is for.
    fn deliver(&mut self, event: Event, now: Instant) {
        let (id, what) = match event {
            Event::Token(id, token) => {
                if let Some(a) = self.active.get_mut(&id) {
                    a.token(now, &self.metrics);
                }
                (id, What::Token(token))
            }
            Event::Finished(id, finished) => {
                if let Some(a) = self.active.get(&id) {
                    a.finished(now, &finished, &self.metrics);
                }
                (id, What::Finished(finished))
            }
            Event::Failed(id, error) => {
                self.metrics.failed();
                (id, What::Failed(error))
            }
        };
        let last = !matches!(what, What::Token(_));
        let Some(active) = self.active.get(&id) else { return };
        match active.send(what) {
            Ok(()) if last => drop(self.active.remove(&id)),
            Ok(()) => {}
            Err(why) => {
                if matches!(why, Ended::SlowReader) {
                    tracing::warn!(request = id.0, "a client reads too slowly; its request was ended");
                }
                if let Some(active) = self.active.remove(&id) {
                    active.end(why);
                }
                if !last {
                    self.engine.abort(id);
                    self.metrics.aborted();
                }
            }
        }
    }
}
