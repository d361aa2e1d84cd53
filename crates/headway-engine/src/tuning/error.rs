//! Why a profile isn't used.

use std::path::PathBuf;

/// What to do about all of them.
pub(super) const REMEDY: &str = "run headway tune with the same --model, --device and options";

/// A profile that can't be used, by its file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TuningError {
    /// There is none.
    #[error("--attention-backend tuned: {} is not there; {REMEDY}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// It can't be read or written.
    #[error("{}: {why}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's words.
        why: String,
    },
    /// It is no profile.
    #[error("{}: not a profile of headway tune: {why}; {REMEDY}, which replaces it", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// It holds elsewhere.
    #[error("{} was measured under other conditions: {}; {REMEDY}", path.display(), differences.join("; "))]
    Elsewhere {
        /// The file.
        path: PathBuf,
        /// What differs, each with both values.
        differences: Vec<String>,
    },
    /// There are several.
    #[error(
        "--attention-backend tuned: several profiles could be meant: {}; name one with --profile",
        paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
    )]
    Several {
        /// Their files.
        paths: Vec<PathBuf>,
    },
    /// There is nowhere to keep it.
    #[error("no folder for profiles: {why}; give --profile FILE")]
    NoFolder {
        /// Why.
        why: String,
    },
}
