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
mod unknowns;

pub use contenders::Contenders;
pub use device::{Target, known_devices};
pub use error::ExplainError;
pub use options::{ExplainOptions, Query};
pub use resolve::{Outcome, Verdict, resolve};

use crate::models::ModelNeeds;

/// The report of what start-up would decide, with what a single change of an option would gain.
///
/// # Errors
/// [`ExplainError`]: options that can't be, or contradict each other.
pub fn explain(
    model: &ModelNeeds,
    weights_bytes: Option<u64>,
    options: &ExplainOptions,
    contenders: &Contenders,
) -> Result<Outcome, ExplainError> {
    let query = Query::new(model, weights_bytes, options, contenders)?;
    let mut outcome = resolve(model, &query, contenders);
    // No option mends what the model's own files say.
    if matches!(contenders, Contenders::Own(_)) && model.refused.is_some() {
        return Ok(outcome);
    }
    outcome.report.suggestions = change::suggestions(model, weights_bytes, options, contenders, &outcome);
    Ok(outcome)
}
