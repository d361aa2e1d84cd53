//! Measured choices: `headway tune` measures the backends that a model's layers could have and keeps a [`Profile`];
//! `--attention-backend tuned` starts with what it chose.
//!
//! | file | what |
//! |---|---|
//! | `key.rs` | what figures hold for: the machine, the versions, the layers' shapes |
//! | `profile.rs` | what is kept: all figures, and what they chose |
//! | `check.rs` | what a profile's types can't say of it |
//! | `place.rs` | its file: where it lies, read and written |
//! | `rule.rs` | how figures become a choice |
//! | `question.rs` | what is there to measure of a model on a device |
//! | `tuned.rs` | a profile that holds here, as start-up asks it |
//!
//! Nothing here measures: the program's `measure` does.

mod check;
mod error;
mod key;
mod place;
mod profile;
mod question;
mod rule;
mod tuned;

use std::time::SystemTime;

pub use error::TuningError;
pub use key::{Here, Machine, Shape, differences};
pub use place::default_path;
pub use profile::{Candidate, Figure, LARGEST_SHARE, LayerProfile, Profile, plain};
pub use question::{LayerQuestion, Question, unmeasured};
pub use rule::{Class, MARGIN, Setting, Weights, choose};
pub use tuned::{TUNED, Tuned, asked, is_asked};

/// Now, in UTC, as a profile has it.
pub fn now() -> String {
    crate::text::date(SystemTime::now(), "%Y-%m-%dT%H:%M:%SZ")
}
