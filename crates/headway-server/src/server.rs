//! [`Server`]: listens, runs until it is asked to end, and ends.

use crate::{
    api::{App, router},
    connections,
    driver::{EngineHandle, State},
    metrics::Metrics,
    options::ServeOptions,
};
use std::{
    future::Future,
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::{net::TcpListener, sync::watch, time::Instant};

/// What idle connections get when everything else is done.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Why the server ended otherwise than asked.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address can't be had.
    #[error("{address} can't be listened on: {why}; choose another --port or --host")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The system's words.
        why: std::io::Error,
    },
    /// The engine could not start, or died.
    #[error("{0}")]
    Engine(String),
    /// The system refused a thread or a socket.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// A server that listens.
pub struct Server {
    app: Arc<App>,
    listener: TcpListener,
}

impl Server {
    /// Listens; the engine may still be loading.
    ///
    /// # Errors
    /// An address that can't be had.
    pub async fn bind(
        options: ServeOptions,
        engine: EngineHandle,
        metrics: Arc<Metrics>,
    ) -> Result<Self, ServeError> {
        let address = SocketAddr::new(options.host, options.port);
        let listener = TcpListener::bind(address).await.map_err(|why| ServeError::Bind { address, why })?;
        Ok(Self { app: Arc::new(App::new(engine, metrics, options)), listener })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The system's.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Answers until `asked` is done, or the engine dies. Then new requests are refused, running ones have
    /// [`ServeOptions::grace_period`] to end, and what still runs is ended.
    ///
    /// # Errors
    /// The engine's end.
    pub async fn run(self, asked: impl Future<Output = ()>) -> Result<(), ServeError> {
        let app = Arc::clone(&self.app);
        let (close, closed) = watch::channel(false);
        let serving = tokio::spawn(connections::serve(self.listener, router(Arc::clone(&app)), closed));
        let outcome = tokio::select! {
            () = asked => Ok(()),
            why = broken(app.engine.watch()) => Err(ServeError::Engine(why)),
        };
        app.draining.store(true, Ordering::SeqCst);
        if outcome.is_ok() {
            tracing::info!(
                seconds = app.options.grace_period.as_secs_f64(),
                "ending; running requests may finish"
            );
            drain(&app).await;
        }
        let _ = close.send(true);
        // Connections that are kept open without a request would hold the end up.
        let _ = tokio::time::timeout(LAST_WORDS, serving).await;
        outcome
    }
}

/// Waits until no call is left (read, tokenised, running, or written) or time is over; then ends what is.
async fn drain(app: &App) {
    let left = || app.calls.load(Ordering::SeqCst).max(app.metrics.unfinished().try_into().unwrap_or(0));
    until_none(left, app.options.grace_period).await;
    if left() > 0 {
        tracing::warn!(requests = left(), "the grace period is over; ending what still runs");
        app.engine.abort_all();
        app.over.send_replace(true);
        until_none(left, LAST_WORDS).await;
    }
}

async fn until_none(left: impl Fn() -> usize, time: Duration) {
    let until = Instant::now() + time;
    while left() > 0 && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// When the engine ends by itself: why.
async fn broken(mut state: watch::Receiver<State>) -> String {
    loop {
        match &*state.borrow_and_update() {
            State::Broken(why) => return why.clone(),
            State::Ended => return "the engine ended".into(),
            State::Loading { .. } | State::Ready(_) => {}
        }
        if state.changed().await.is_err() {
            return "the engine's thread is gone".into();
        }
    }
}
