//! A GGUF model: one file or all parts of a split one, mapped and checked.
//!
//! Lives while a model is loaded; weights keep their file alive beyond it.
//!
//! Not for interpreting metadata.

use super::check::check_hyperparameters;
use super::header::Header;
use super::metadata::Metadata;
use super::split;
use super::tensors::TensorInfo;
use crate::loading::checkpoint::{Checkpoint, count_types};
use crate::loading::names::missing_tensor;
use crate::loading::{LoadError, map_file};
use headway_tensor::{SharedBytes, Weight};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// A mapped GGUF model.
#[derive(Debug)]
pub struct GgufFile {
    parts: Vec<(PathBuf, SharedBytes)>,
    version: u32,
    metadata: Metadata,
    /// Every tensor with the number of its part.
    tensors: Vec<(usize, TensorInfo)>,
    index: HashMap<String, usize>,
}

impl GgufFile {
    /// Opens the model at `path`: a file, or any part of a split model whose other parts lie beside it.
    ///
    /// # Errors
    /// See [`Header::parse`] and [`check_hyperparameters`]; [`LoadError::MissingFiles`] and
    /// [`LoadError::ForeignPart`] for parts.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let bytes = map_file(path)?;
        let header = Header::parse(path, bytes.as_slice())?;
        let count = split::part_count(&header.metadata)?;
        if count == 1 {
            return Self::assemble(vec![(path.to_owned(), bytes, header)]);
        }
        let mut parts = Vec::new();
        for sibling in split::siblings(path, &header.metadata, count)? {
            let bytes = map_file(&sibling)?;
            let header = Header::parse(&sibling, bytes.as_slice())?;
            parts.push((sibling, bytes, header));
        }
        Self::assemble(parts)
    }

    /// A model of one part from bytes in memory; `path` names it in messages.
    ///
    /// # Errors
    /// As [`GgufFile::open`].
    pub fn from_bytes(path: &Path, bytes: SharedBytes) -> Result<Self, LoadError> {
        let header = Header::parse(path, bytes.as_slice())?;
        Self::assemble(vec![(path.to_owned(), bytes, header)])
    }

    fn assemble(parts: Vec<(PathBuf, SharedBytes, Header)>) -> Result<Self, LoadError> {
        if let [(_, _, first), rest @ ..] = parts.as_slice()
            && !rest.is_empty()
        {
            for (i, (_, _, part)) in parts.iter().enumerate() {
                split::check_part(first, part, i, parts.len())?;
            }
            split::check_total(&first.metadata, parts.iter().map(|(_, _, part)| part.tensors.len()).sum())?;
        }
        let mut file = Self {
            parts: Vec::new(),
            version: 0,
            metadata: Metadata::default(),
            tensors: Vec::new(),
            index: HashMap::new(),
        };
        for (number, (path, bytes, header)) in parts.into_iter().enumerate() {
            if number == 0 {
                check_hyperparameters(&header.metadata)?;
                (file.version, file.metadata) = (header.version, header.metadata);
            }
            file.add_tensors(number, &path, header.tensors)?;
            file.parts.push((path, bytes));
        }
        Ok(file)
    }

    fn add_tensors(&mut self, part: usize, path: &Path, tensors: Vec<TensorInfo>) -> Result<(), LoadError> {
        for tensor in tensors {
            if let Some(&other) = self.index.get(&tensor.name) {
                let first = self.tensors.get(other).and_then(|(part, _)| self.parts.get(*part));
                return Err(LoadError::ForeignPart {
                    path: path.to_owned(),
                    first: first.map(|(path, _)| path.clone()).unwrap_or_default(),
                    what: format!("tensor '{}' is in both", tensor.name),
                });
            }
            self.index.insert(tensor.name.clone(), self.tensors.len());
            self.tensors.push((part, tensor));
        }
        Ok(())
    }

    /// Whether these files are, by their names, the parts of one split model.
    pub(crate) fn are_parts_of_one(paths: &[PathBuf]) -> bool {
        let part = |path: &PathBuf| {
            let (stem, _, count) = split::part_name(path.file_name()?.to_str()?)?;
            Some((stem.to_owned(), count))
        };
        let parts: Vec<_> = paths.iter().map(part).collect();
        parts.iter().all(|part| part.is_some() && Some(part) == parts.first())
    }

    /// The path of the file, or of the first part.
    pub fn path(&self) -> &Path {
        self.metadata.path()
    }

    /// Version of the format.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The metadata (of the first part).
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// `general.architecture`, such as `llama`.
    ///
    /// # Errors
    /// [`LoadError::BadKey`]: cannot happen for an opened file, which has been checked for it.
    pub fn architecture(&self) -> Result<&str, LoadError> {
        self.metadata.text("general.architecture")
    }

    /// All tensors, in the order of the files.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> + '_ {
        self.tensors.iter().map(|(_, tensor)| tensor)
    }

    /// The entry of the tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.index.get(name).and_then(|&i| self.tensors.get(i)).map(|(_, tensor)| tensor)
    }

    fn all_names(&self) -> impl Iterator<Item = &str> + Clone + '_ {
        self.tensors.iter().map(|(_, tensor)| tensor.name.as_str())
    }
}

impl Checkpoint for GgufFile {
    fn get(&self, name: &str) -> Result<Weight, LoadError> {
        let missing = || missing_tensor(self.path(), name, self.all_names());
        let (part, tensor) = self.index.get(name).and_then(|&i| self.tensors.get(i)).ok_or_else(missing)?;
        let (path, bytes) = self.parts.get(*part).ok_or_else(missing)?;
        let bytes = bytes.slice(tensor.range.clone()).ok_or_else(missing)?;
        Weight::new(name, tensor.dtype, tensor.shape.clone(), bytes)
            .map_err(|source| LoadError::Weight { path: path.clone(), source })
    }

    fn contains(&self, name: &str) -> bool {
        self.index.contains_key(name)
    }

    fn names(&self) -> Vec<&str> {
        self.all_names().collect()
    }

    fn describe(&self) -> String {
        let parts =
            if self.parts.len() > 1 { format!(" in {} parts", self.parts.len()) } else { String::new() };
        let types = count_types(self.tensors().map(|tensor| tensor.dtype));
        format!("{} (GGUF version {}{parts}; tensors: {types})", self.path().display(), self.version)
    }

    fn total_bytes(&self) -> u64 {
        self.tensors().map(|tensor| tensor.range.len() as u64).sum()
    }
}
