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
    /// There is none of a card that is named and not opened.
    #[error(
        "--attention-backend tuned: {} is not there; run headway tune on a machine with such a card \
         ({platform}, compute capability {capability}), and name its file with --profile",
        path.display()
    )]
    MissingOf {
        /// The file.
        path: PathBuf,
        /// The card's platform.
        platform: String,
        /// Its compute capability.
        capability: String,
    },
    /// No layer of the model is of a kind that is measured.
    #[error(
        "--attention-backend tuned: headway tune measures none of this model's layers ({what}); leave it out"
    )]
    NothingMeasured {
        /// Their kinds.
        what: String,
    },
    /// Another file lies where a profile should be written.
    #[error("{}: is there and no profile of headway tune: {why}; remove it, or name another file with --profile", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Why it is none.
        why: String,
    },
    /// What it chose can't be had here.
    #[error("{}: {why}; {REMEDY}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What, and why not.
        why: String,
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
    #[error("{}: not a profile of headway tune: {why}; remove it, and {REMEDY}", path.display())]
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
