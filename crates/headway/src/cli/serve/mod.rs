//! `headway serve`: an OpenAI-compatible server.

mod args;
mod logs;

pub use args::ServeArgs;

use super::{CliError, session};
use headway_attention::Registry;
use headway_server::{
    ServeError, Server,
    driver::{EngineHandle, Model},
    metrics::Metrics,
};
use std::{path::Path, process::ExitCode, sync::Arc, time::Instant};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Tasks are short: tokens come from the engine's own thread.
const WORKERS: usize = 2;
/// Exit code where the engine died under way, so that a supervisor starts the server anew.
const ENGINE_DIED: u8 = 70;

/// Runs the command.
pub fn run(args: ServeArgs, registry: Registry) -> Result<ExitCode, CliError> {
    let key = api_key(&args)?;
    for origin in &args.cors_origin {
        let fine = origin == "*" || (origin.contains("://") && !origin.ends_with('/'));
        if !fine || (origin == "*" && args.cors_origin.len() > 1) {
            let what = format!(
                "--cors-origin {origin}: one or more like https://example.org, or * alone, is needed"
            );
            return Err(CliError::Usage(what));
        }
    }
    logs::start(args.log_format, args.log_level);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build()?;
    let outcome = runtime.block_on(serve(args, key, registry));
    // Handlers that still render a template are not waited for.
    runtime.shutdown_background();
    outcome
}

async fn serve(args: ServeArgs, key: Option<String>, registry: Registry) -> Result<ExitCode, CliError> {
    let mut signals = Signals::listen()?;
    let (options, metrics, began) = (args.options(key), Arc::new(Metrics::default()), Instant::now());
    let name = options.served_names.join(", ");
    let max_queue = options.max_queue;
    let open = move |_: &mut dyn FnMut(usize, usize)| {
        let engine = session::open(&args.engine, registry).map_err(|e| e.to_string())?;
        if args.engine.verbose {
            session::print_report(engine.report());
        }
        let model = Model::of(&engine);
        Ok((engine, model))
    };
    let engine = EngineHandle::start(open, max_queue, Arc::clone(&metrics))?;
    let server = Server::bind(options, engine.clone(), metrics).await?;
    let address = server.address()?;
    let ready = announce(engine, name, address.to_string(), began);
    let asked = async {
        signals.next().await;
        // The second one does not wait for anything.
        tokio::spawn(async move {
            signals.next().await;
            note!("headway: ended at once, as asked");
            std::process::exit(130);
        });
    };
    let running = tokio::spawn(ready);
    let outcome = server.run(asked).await;
    let was_ready = running.is_finished();
    running.abort();
    exit(outcome, was_ready)
}

/// How the process ends: a server that was ready once can be so again, one that could not start can't.
fn exit(outcome: Result<(), ServeError>, was_ready: bool) -> Result<ExitCode, CliError> {
    match outcome {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(e) if was_ready => {
            note!("headway: {e}; the server ends, start it again");
            Ok(ExitCode::from(ENGINE_DIED))
        }
        Err(e) => Err(e.into()),
    }
}

/// A line once requests are taken.
async fn announce(engine: EngineHandle, name: String, address: String, began: Instant) {
    use headway_server::driver::State;
    let mut state = engine.watch();
    if state.wait_for(|s| matches!(s, State::Ready(_))).await.is_err() {
        // It never will be; the server's end says why.
        return std::future::pending().await;
    }
    let seconds = began.elapsed().as_secs_f64();
    note!(
        "headway: serving {name} at http://{address} (status page; API under /v1), ready in {seconds:.1} s"
    );
}

/// The key, from the command line or from a file.
fn api_key(args: &ServeArgs) -> Result<Option<String>, CliError> {
    let key = match &args.api_key_file {
        None => args.api_key.clone(),
        Some(file) => Some(first_line(file)?),
    };
    match key {
        Some(k) if k.trim().is_empty() => {
            Err(CliError::Usage("the API key is empty; give one, or leave the option out".into()))
        }
        key => Ok(key),
    }
}

fn first_line(file: &Path) -> Result<String, CliError> {
    let text = std::fs::read_to_string(file).map_err(|e| CliError::File {
        path: file.to_owned(),
        why: format!("cannot be read: {e}; --api-key-file takes a UTF-8 file with the key on its first line"),
    })?;
    Ok(text.lines().next().unwrap_or("").trim().to_owned())
}

/// Requests to end.
struct Signals {
    term: Signal,
    int: Signal,
}

impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self { term: signal(SignalKind::terminate())?, int: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_died_asks_for_another_start() {
        let died = || Err(ServeError::Engine("8 steps failed".into()));
        assert_eq!(exit(died(), true).ok(), Some(ExitCode::from(ENGINE_DIED)));
        assert!(exit(died(), false).is_err_and(|e| e.to_string() == "8 steps failed"));
        assert_eq!(exit(Ok(()), true).ok(), Some(ExitCode::SUCCESS));
    }
}
