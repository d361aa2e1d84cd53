//! Models in several GGUF files: `NAME-00001-of-00003.gguf` and so on.
//!
//! `gguf-split` numbers the files from 1 in their names and from 0 in their metadata (`split.no`,
//! `split.count`, `split.tensors.count`); the first part holds the model's metadata.
//!
//! Not for joining: parts stay files of their own.

use super::header::Header;
use super::metadata::Metadata;
use crate::loading::LoadError;
use std::path::{Path, PathBuf};

/// How many parts the model of this header has; 1 for a file that is not split.
pub(super) fn part_count(metadata: &Metadata) -> Result<usize, LoadError> {
    let count = metadata.opt_usize("split.count")?.unwrap_or(0);
    if count > 99_999 {
        return Err(metadata.bad("split.count", format!("must be at most 99999, is {count}")));
    }
    Ok(count.max(1))
}

/// The paths of all `count` parts beside `path`, in order.
///
/// # Errors
/// [`LoadError::BadKey`] when the file's name does not fit the scheme, [`LoadError::MissingFiles`].
pub(super) fn siblings(path: &Path, metadata: &Metadata, count: usize) -> Result<Vec<PathBuf>, LoadError> {
    let bad_name = || {
        let scheme = format!("NAME-00001-of-{count:05}.gguf");
        metadata.bad(
            "split.count",
            format!("is {count}, but the file is not called {scheme}: rename the parts so"),
        )
    };
    let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(bad_name)?;
    let (stem, _, of) = part_name(name).ok_or_else(bad_name)?;
    if of != count {
        return Err(bad_name());
    }
    let paths: Vec<PathBuf> =
        (1..=count).map(|no| path.with_file_name(format!("{stem}-{no:05}-of-{count:05}.gguf"))).collect();
    let missing: Vec<String> = paths
        .iter()
        .filter(|part| !part.is_file())
        .filter_map(|part| Some(part.file_name()?.to_string_lossy().into_owned()))
        .collect();
    if missing.is_empty() {
        Ok(paths)
    } else {
        Err(LoadError::MissingFiles { path: path.to_owned(), missing })
    }
}

/// Stem, number and count out of `NAME-00001-of-00003.gguf`.
pub(crate) fn part_name(name: &str) -> Option<(&str, usize, usize)> {
    let name = name.strip_suffix(".gguf")?;
    let (rest, of) = name.rsplit_once("-of-")?;
    let (stem, no) = rest.rsplit_once('-')?;
    let number = |digits: &str| {
        let five = digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
        five.then(|| digits.parse().ok()).flatten()
    };
    Some((stem, number(no)?, number(of)?))
}

/// Checks that part number `index` (from 0) says of itself what its place says.
pub(super) fn check_part(first: &Header, part: &Header, index: usize, count: usize) -> Result<(), LoadError> {
    let foreign = |what: String| {
        let (path, first) = (part.metadata.path().to_owned(), first.metadata.path().to_owned());
        LoadError::ForeignPart { path, first, what }
    };
    let (no, of) = (part.metadata.usize("split.no")?, part.metadata.usize("split.count")?);
    if of != count {
        return Err(foreign(format!("it is one of {of} parts, not of {count}")));
    }
    if no != index {
        return Err(foreign(format!(
            "it is part {} by its content, but part {} by its name",
            no + 1,
            index + 1
        )));
    }
    for key in ["split.tensors.count", "general.architecture", "general.name"] {
        if let (Some(a), Some(b)) = (first.metadata.get(key), part.metadata.get(key))
            && a != b
        {
            return Err(foreign(format!("'{key}' differs")));
        }
    }
    Ok(())
}

/// Checks that the parts together hold as many tensors as each says the model has.
pub(super) fn check_total(first: &Metadata, total: usize) -> Result<(), LoadError> {
    match first.opt_usize("split.tensors.count")? {
        Some(expected) if expected != total => {
            let what =
                format!("is {expected}, but the parts hold {total} tensors: some belong to another model");
            Err(first.bad("split.tensors.count", what))
        }
        _ => Ok(()),
    }
}
