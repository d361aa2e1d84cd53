//! Commands, by the moment when a user types them. [`main`] parses, runs, and turns errors into one
//! line on standard error and an exit code: 1 for what failed, 2 for what can't be understood.

/// A line on standard error; where that is closed, nothing.
macro_rules! note {
    ($($text:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}

mod args;
mod backends;
mod batch;
mod bench;
mod chat;
mod config;
mod embed;
mod environment;
mod error;
mod explain;
mod generate;
mod kernels;
mod measure;
mod output;
mod panics;
mod parse;
mod prompt;
mod pull;
mod sampling;
mod serve;
mod session;
mod tune;

pub use error::CliError;

use args::{Cli, Command};
use headway_attention::Registry;
use std::process::ExitCode;

/// Runs the command line. `register` adds a program's own backends, after headway's.
///
/// A panic anywhere ends in one line and exit code 101; `RUST_BACKTRACE` brings the usual report back.
pub fn main(register: impl FnOnce(&mut Registry) -> headway_attention::Result<()>) -> ExitCode {
    panics::in_one_line(|| {
        let cli = match parse::parse() {
            Ok(cli) => cli,
            Err(code) => return code,
        };
        match run(cli, register) {
            Ok(code) => code,
            // Whoever read the answer has seen enough of it.
            Err(e) if e.is_closed_pipe() => ExitCode::SUCCESS,
            Err(e) => {
                note!("headway: {e}");
                ExitCode::FAILURE
            }
        }
    })
}

fn run(
    cli: Cli,
    register: impl FnOnce(&mut Registry) -> headway_attention::Result<()>,
) -> Result<ExitCode, CliError> {
    environment::refuse_unknown(std::env::vars_os())?;
    let mut registry = headway_engine::runner::devices::registry()?;
    register(&mut registry)?;
    match cli.command {
        Command::Generate(a) => generate::run(*a, registry),
        Command::Embed(a) => embed::run(*a, registry),
        Command::Chat(a) => chat::run(*a, registry),
        Command::Backends(a) => backends::run(&a, &registry),
        Command::Explain(a) => explain::run(*a, registry),
        Command::Serve(a) => serve::run(*a, registry),
        Command::Bench(a) => bench::run(*a, registry),
        Command::Tune(a) => tune::run(&a, registry),
        Command::Kernels(a) => kernels::run(&a),
        Command::Pull(a) => pull::run(&a),
    }
}
