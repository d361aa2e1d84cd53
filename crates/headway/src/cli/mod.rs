//! Commands, by the moment when a user types them. [`main`] parses, runs, and turns errors into one
//! line on standard error and an exit code.

mod args;
mod backends;
mod batch;
mod chat;
mod config;
mod environment;
mod error;
mod generate;
mod output;
mod prompt;
mod pull;
mod sampling;
mod session;

pub use error::CliError;

use args::{Cli, Command};
use clap::Parser;
use headway_attention::Registry;
use std::process::ExitCode;

/// Runs the command line. `register` adds a program's own backends, after headway's.
pub fn main(register: impl FnOnce(&mut Registry) -> headway_attention::Result<()>) -> ExitCode {
    let cli = Cli::parse();
    match run(cli, register) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("headway: {e}");
            ExitCode::FAILURE
        }
    }
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
        Command::Chat(a) => chat::run(*a, registry),
        Command::Backends(a) => backends::run(&a, &registry),
        Command::Pull(a) => pull::run(&a),
    }
}
