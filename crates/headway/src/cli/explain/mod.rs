//! `headway explain`: which backend each layer gets, and why; what the cache and the graphs become.

mod args;
mod compare;
mod model;
mod text;

pub use args::ExplainArgs;

use super::CliError;
use headway_attention::Registry;
use headway_engine::explain::{Contenders, Outcome, Subject, Verdict, explain};
use std::{io::Write, process::ExitCode};

/// No backend is valid for some layer.
const NO_BACKEND: u8 = 3;

/// Runs the command.
pub fn run(args: ExplainArgs, registry: Registry) -> Result<ExitCode, CliError> {
    let model = model::read(args.model(), args.engine.load_format())?;
    if let Some(pair) = &args.compare {
        let sets = compare::sets(&args, pair, &registry)?;
        let outcomes = sets
            .into_iter()
            .map(|(name, set)| Ok((name, one(&model, &set, registry.clone())?)))
            .collect::<Result<Vec<_>, CliError>>()?;
        compare::print(&outcomes, args.json)?;
        return Ok(outcomes
            .iter()
            .map(|(_, o)| code(o))
            .find(|c| *c != 0)
            .map_or(ExitCode::SUCCESS, ExitCode::from));
    }
    let outcome = one(&model, &args, registry)?;
    let mut out = std::io::stdout().lock();
    match args.json {
        true => writeln!(out, "{}", serde_json::json!(outcome.report))?,
        false => text::print(&mut out, &outcome.report)?,
    }
    if let Some(e) = outcome.report.error.as_ref().filter(|_| outcome.verdict != Verdict::Starts) {
        note!("headway: {e}");
    }
    Ok(ExitCode::from(code(&outcome)))
}

fn one(model: &Subject, args: &ExplainArgs, registry: Registry) -> Result<Outcome, CliError> {
    let contenders = Contenders::parse(&args.of, registry.clone())?;
    let mut outcome = explain(model, &args.options(registry)?, &contenders)?;
    outcome.report.files = model.file.clone();
    Ok(outcome)
}

fn code(o: &Outcome) -> u8 {
    match o.verdict {
        Verdict::Starts => 0,
        Verdict::Fails => 1,
        Verdict::NoBackend => NO_BACKEND,
    }
}
