//! Why a build did not come about.

use crate::modules::ModuleError;
use std::{
    io,
    path::{Path, PathBuf},
};

/// A build's failure: what is missing and how to get it, or what a tool says.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// What was asked for can't be built.
    #[error("can't build {0}")]
    Asked(String),
    /// A package is not there.
    #[error("{what} was not found ({tried}); {remedy}")]
    Lacking {
        /// What.
        what: String,
        /// Where it was looked for.
        tried: String,
        /// How to get it.
        remedy: String,
    },
    /// A package is of another version.
    #[error("FlashInfer {found} at {}: this headway calls the functions of {calls}; pip install --no-deps flashinfer-python=={calls}", path.display(), calls = crate::modules::FLASHINFER)]
    Version {
        /// The package.
        path: PathBuf,
        /// Its version.
        found: String,
    },
    /// A template of the package is not as it should be.
    #[error("{}: {why}", path.display())]
    Template {
        /// The template.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A tool failed.
    #[error("{tool} failed on {}: {words}", file.display())]
    Tool {
        /// The tool.
        tool: String,
        /// What it was given.
        file: PathBuf,
        /// Its last words.
        words: String,
    },
    /// A file.
    #[error("{}: {why}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's words.
        why: String,
    },
    /// The folder of modules, or what was built.
    #[error(transparent)]
    Module(#[from] ModuleError),
}

impl BuildError {
    pub(super) fn file(path: &Path, e: io::Error) -> Self {
        Self::File { path: path.to_owned(), why: e.to_string() }
    }
}
