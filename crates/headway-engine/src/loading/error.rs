//! What can go wrong between a path and the weights behind it: one line each, naming the file and the remedy.
//!
//! Not for faults of a model plan (an unknown architecture, a tensor of the wrong shape for a layer).

use headway_tensor::WeightError;
use std::io;
use std::path::{Path, PathBuf};

/// The tensor types that can be loaded, as messages list them.
pub const SUPPORTED_GGUF_TYPES: &str =
    "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K";
/// The safetensors dtypes that can be loaded, as messages list them.
pub const SUPPORTED_SAFETENSORS_TYPES: &str = "BF16, F16, F32";

/// A model cannot be loaded from its files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The operating system refused.
    #[error("{}: cannot {doing} it: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried, as a verb.
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The file breaks the rules of its format.
    #[error("{}: damaged or incomplete {kind} file: {what}; download or convert it again", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Which format was expected, such as `GGUF`.
        kind: &'static str,
        /// The rule that is broken, and where.
        what: String,
    },
    /// The file is sound but of a kind that headway does not read.
    #[error("{}: {what} is not supported; supported: {supported}", path.display())]
    NotSupported {
        /// The file.
        path: PathBuf,
        /// What it is.
        what: String,
        /// What would be read.
        supported: String,
    },
    /// A tensor's element type cannot be loaded.
    #[error(
        "{}: tensor '{tensor}' has type {dtype}{}, which is not supported; supported: {supported}; convert the \
         file to one of these",
        path.display(), and_others(*others)
    )]
    UnsupportedTensor {
        /// The file.
        path: PathBuf,
        /// The first tensor of such a type.
        tensor: String,
        /// Its type, by name and number where both are known.
        dtype: String,
        /// How many more tensors of unsupported types there are.
        others: usize,
        /// What would be read.
        supported: &'static str,
    },
    /// A tensor that the model needs is not in the files.
    #[error("{}: no tensor '{name}'; nearest names in the file: {}{hint}", path.display(), list(nearest))]
    MissingTensor {
        /// The file, or the first of several.
        path: PathBuf,
        /// The expected name.
        name: String,
        /// Up to three names that come closest.
        nearest: Vec<String>,
        /// Who probably wrote the file and what to do, or empty; begins with `; `.
        hint: String,
    },
    /// Files that belong to the model are absent.
    #[error("{}: {} of the model's files missing: {}; download them into the same directory", path.display(), missing.len(), list(missing))]
    MissingFiles {
        /// The file that says so (an index, a part).
        path: PathBuf,
        /// Names of the absent files.
        missing: Vec<String>,
    },
    /// Files lie together that do not belong together.
    #[error("{}: does not belong to the same model as {}: {what}; download all parts of one model again", path.display(), first.display())]
    ForeignPart {
        /// The odd one.
        path: PathBuf,
        /// The file it was compared with.
        first: PathBuf,
        /// What differs.
        what: String,
    },
    /// A directory holds no weights that can be loaded.
    #[error("{}: no supported weight files; found {found}; expected {expected}", path.display())]
    NoWeights {
        /// The directory.
        path: PathBuf,
        /// What lies there instead.
        found: String,
        /// What would be loaded.
        expected: &'static str,
    },
    /// A metadata key or configuration field is absent.
    #[error("{}: no key '{key}'; the file is incomplete or its converter too old: convert it again", path.display())]
    MissingKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
    },
    /// A metadata key has a value of the wrong kind or out of bounds.
    #[error("{}: key '{key}' {what}", path.display())]
    BadKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What is wrong, beginning with a verb, with the bounds.
        what: String,
    },
    /// A JSON file cannot be read.
    #[error("{}: not valid JSON: {what}; download it again", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        what: String,
    },
    /// A tensor's bytes do not fit its shape.
    #[error("{}: {source}", path.display())]
    Weight {
        /// The file.
        path: PathBuf,
        /// What is wrong with the tensor.
        source: WeightError,
    },
}

impl LoadError {
    /// [`LoadError::Damaged`] with the text made one line.
    pub(crate) fn damaged(path: &Path, kind: &'static str, what: impl AsRef<str>) -> Self {
        Self::Damaged { path: path.to_owned(), kind, what: one_line(what.as_ref()) }
    }

    /// [`LoadError::BadKey`] with the text made one line.
    pub(crate) fn bad_key(path: &Path, key: &str, what: impl AsRef<str>) -> Self {
        Self::BadKey { path: path.to_owned(), key: key.to_owned(), what: one_line(what.as_ref()) }
    }
}

/// Text from a file made fit for a message: control characters escaped, at most 200 characters.
pub(crate) fn one_line(text: &str) -> String {
    let mut out = String::new();
    for (i, c) in text.chars().enumerate() {
        if i == 200 {
            out.push('…');
            break;
        }
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

fn and_others(others: usize) -> String {
    if others == 0 { String::new() } else { format!(" ({others} more tensors too)") }
}

/// At most three names, then a count.
fn list(names: &[String]) -> String {
    let shown = names.iter().take(3).map(|n| format!("'{n}'")).collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => "none".to_owned(),
        1..=3 => shown,
        n => format!("{shown} and {} more", n - 3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_short_and_lines_single() {
        let names: Vec<String> = (0..5).map(|i| format!("n{i}")).collect();
        assert_eq!(list(&names), "'n0', 'n1', 'n2' and 2 more");
        assert_eq!(list(&[]), "none");
        assert_eq!(one_line("a\nb"), "a\\nb");
        assert_eq!(one_line(&"x".repeat(500)).chars().count(), 201);
    }
}
