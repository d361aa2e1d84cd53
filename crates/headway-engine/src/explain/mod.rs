//! What start-up would decide for a model on a device: the same functions, with no weights and no device.
//!
//! [`crate::models::needs`] reads what the layers need; [`Contenders`] are headway's own backends or vLLM's out of the
//! catalogue; [`resolve()`] runs selection, the cache's plan and the graph mode; [`change`] tries single changes of
//! options on it. No rule stands here.

pub mod change;
mod contenders;
mod described;
mod device;
mod error;
mod options;
mod report;
mod resolve;
mod subject;
mod unknowns;

pub use contenders::Contenders;
pub use device::{Target, known_devices};
pub use error::ExplainError;
pub use options::{ExplainOptions, Query};
pub use resolve::{Outcome, Verdict, resolve};
pub use subject::Subject;

use crate::options::EngineOptions;
use subject::Answer;

/// The report of what start-up would decide, with what a single change of an option would gain.
///
/// # Errors
/// [`ExplainError`]: a model that can't be read; options that can't be, or contradict each other.
pub fn explain(
    subject: &Subject,
    options: &ExplainOptions,
    contenders: &Contenders,
) -> Result<Outcome, ExplainError> {
    // A device of this machine is opened once, and asked about by what it is.
    let named = match contenders {
        Contenders::Own(_) => device::of_this_machine(&options.engine)?,
        Contenders::Catalog(_) => None,
    };
    let named = named.map(|name| {
        let engine = EngineOptions { device: Some(name), ..options.engine.clone() };
        ExplainOptions { engine, ..options.clone() }
    });
    let options = named.as_ref().unwrap_or(options);
    let mut outcome = answer(subject, options, contenders, true)?;
    if !outcome.no_change_helps {
        outcome.report.suggestions = change::suggestions(subject, options, contenders, &outcome);
    }
    Ok(outcome)
}

/// What comes out. Where this engine would start on this machine, start-up itself has the last word.
fn answer(
    subject: &Subject,
    options: &ExplainOptions,
    contenders: &Contenders,
    open_device: bool,
) -> Result<Outcome, ExplainError> {
    let model = subject.needs(contenders).map_err(ExplainError::Subject)?;
    let start = subject.start(options, contenders, open_device);
    match (Query::new(model, subject.weights(contenders), options, contenders), start) {
        (Ok(query), start) => Ok(resolve(model, &query, contenders).settled(start, model)),
        (Err(_), Answer::Options(e)) => Err(e.into()),
        (Err(e), _) => Err(e),
    }
}
