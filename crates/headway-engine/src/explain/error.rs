//! Why a question can't be answered.

use crate::runner::StartupError;
use headway_attention::AttentionError;

/// What can be wrong with a question.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExplainError {
    /// An option's value.
    #[error("{option} {value}: {why}")]
    Option {
        /// The option by its command-line name.
        option: &'static str,
        /// What was asked.
        value: String,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// Two options that can't both hold.
    #[error("{one} and {other} contradict each other: {why}")]
    Contradiction {
        /// One, with its value.
        one: String,
        /// The other, with its value.
        other: String,
        /// Why.
        why: String,
    },
    /// A model that can't be read.
    #[error("{0}")]
    Subject(String),
    /// As start-up refuses it.
    #[error(transparent)]
    Startup(#[from] StartupError),
    /// Devices, versions, backends.
    #[error(transparent)]
    Attention(#[from] AttentionError),
}

impl ExplainError {
    /// An unknown value of an option, with the valid ones and the nearest by spelling.
    pub(super) fn unknown(option: &'static str, value: &str, known: &[String]) -> Self {
        let near = headway_attention::process::registry::nearest(value, known.iter().map(String::as_str));
        let near = near.map(|n| format!(" (did you mean {n}?)")).unwrap_or_default();
        Self::Option {
            option,
            value: value.into(),
            why: format!("unknown; there are: {}{near}", known.join(", ")),
        }
    }

    pub(super) fn contradiction(one: String, other: String, why: &str) -> Self {
        Self::Contradiction { one, other, why: why.into() }
    }
}
