//! Connections: accepted, served, and ended when their client leaves or does not say what it wants.

use axum::Router;
use futures_util::FutureExt;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use socket2::SockRef;
use std::{
    io::{self, ErrorKind, IoSlice},
    net::Shutdown,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
    time::{MissedTickBehavior, interval},
};

/// The most time that a request's head may take to come, and that a connection is kept without one.
const HEAD_TIME: Duration = Duration::from_secs(30);
/// How often it is looked whether a client has left whose bytes nobody reads, since it sent more than one request.
const LOOK: Duration = Duration::from_millis(500);
/// After an error of the system's own: no files left, mostly.
const BREATH: Duration = Duration::from_millis(100);

/// Serves until `closed` says so; then connections end as their requests do.
pub async fn serve(listener: TcpListener, router: Router, mut closed: watch::Receiver<bool>) {
    let service = TowerToHyperService::new(router);
    let mut all = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = told(&mut closed) => break,
            Some(_) = all.join_next() => continue,
        };
        match accepted {
            Ok((stream, _)) => drop(all.spawn(connection(stream, service.clone(), closed.clone()))),
            Err(e) if is_its_own(&e) => {}
            Err(e) => {
                tracing::error!(error = %e, "a connection could not be accepted");
                tokio::time::sleep(BREATH).await;
            }
        }
    }
    drop(listener);
    while all.join_next().await.is_some() {}
}

/// Waits until it is said.
async fn told(closed: &mut watch::Receiver<bool>) {
    let _ = closed.wait_for(|c| *c).await;
}

/// An error of the connection that was to be accepted.
fn is_its_own(e: &io::Error) -> bool {
    matches!(
        e.kind(),
        ErrorKind::ConnectionRefused | ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset
    )
}

async fn connection(
    stream: TcpStream,
    service: TowerToHyperService<Router>,
    mut closed: watch::Receiver<bool>,
) {
    // A token is sent when it is there.
    let _ = stream.set_nodelay(true);
    let stream = Arc::new(stream);
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .serve_connection(TokioIo::new(Shared(Arc::clone(&stream))), service);
    let mut served = pin!(served);
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut ending = false;
    loop {
        tokio::select! {
            // Its errors are the client's: it left, or spoke no HTTP.
            _ = &mut served => return,
            () = told(&mut closed), if !ending => {
                ending = true;
                served.as_mut().graceful_shutdown();
            }
            // Dropped with its requests.
            _ = look.tick() => if has_left(&stream) { return },
        }
    }
}

/// Whether the client has closed the connection, though bytes of it may wait to be read.
fn has_left(stream: &TcpStream) -> bool {
    let ready = stream.ready(Interest::READABLE).now_or_never();
    ready.is_some_and(|ready| ready.is_ok_and(|r| r.is_read_closed()))
}

/// A socket that is looked at while HTTP is spoken over it.
struct Shared(Arc<TcpStream>);

impl AsyncRead for Shared {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(cx))?;
            match self.0.try_read(buf.initialize_unfilled()) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read.map(|n| buf.advance(n))),
            }
        }
    }
}

impl Shared {
    fn poll_written(
        &self,
        cx: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(cx))?;
            match write(&self.0) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }
}

impl AsyncWrite for Shared {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_written(cx, |s| s.try_write(buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_written(cx, |s| s.try_write_vectored(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(SockRef::from(&*self.0).shutdown(Shutdown::Write))
    }
}
