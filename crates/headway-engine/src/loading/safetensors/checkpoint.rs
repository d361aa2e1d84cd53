//! A safetensors checkpoint: one file or all shards of an index, mapped and checked.
//!
//! Every shard that the index lists must exist and every tensor be in exactly one of them, in the one
//! that the index says. Lives while a model is loaded; weights keep their file alive beyond it.
//!
//! Not for configuration files, which [`open`](crate::loading::open()) reads.

use super::header::{Entry, Header, weight_type};
use crate::loading::checkpoint::{Checkpoint, count_types};
use crate::loading::error::SUPPORTED_SAFETENSORS_TYPES;
use crate::loading::names::missing_tensor;
use crate::loading::{LoadError, json, map_file};
use headway_tensor::{SharedBytes, Weight};
use safetensors::Dtype;
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// A mapped safetensors checkpoint.
#[derive(Debug)]
pub struct SafetensorsCheckpoint {
    files: Vec<(PathBuf, SharedBytes)>,
    /// Every tensor with the number of its file.
    tensors: Vec<(usize, Entry)>,
    index: HashMap<String, usize>,
}

/// A tensor that is not read as a weight: its bytes, and what the header says of them.
pub(crate) struct RawTensor<'a> {
    /// The file.
    pub path: &'a Path,
    /// The type by the header.
    pub dtype: Dtype,
    /// The shape, outermost first.
    pub shape: &'a [usize],
    /// The bytes, as many as type and shape need.
    pub bytes: SharedBytes,
}

impl SafetensorsCheckpoint {
    /// Opens these files as one checkpoint.
    ///
    /// # Errors
    /// See [`Header::parse`]; [`LoadError::ForeignPart`] when two files hold a tensor of the same name,
    /// [`LoadError::Damaged`] when there are no tensors at all.
    pub fn open_files(paths: &[PathBuf]) -> Result<Self, LoadError> {
        Self::open_files_with(paths, &[])
    }

    /// [`open_files`](Self::open_files) where tensors may have the `packed` types too.
    pub(crate) fn open_files_with(paths: &[PathBuf], packed: &[&str]) -> Result<Self, LoadError> {
        let mut checkpoint = Self { files: Vec::new(), tensors: Vec::new(), index: HashMap::new() };
        for path in paths {
            checkpoint.add(path, packed)?;
        }
        match paths.first() {
            Some(first) if checkpoint.tensors.is_empty() => {
                Err(LoadError::damaged(first, "safetensors", "it holds no tensors"))
            }
            _ => Ok(checkpoint),
        }
    }

    /// Opens the shards that `index_path` (`model.safetensors.index.json`) lists, which lie beside it.
    ///
    /// # Errors
    /// [`LoadError::MissingFiles`] naming every absent shard; [`LoadError::Damaged`] for an index without
    /// a usable `weight_map` or one that disagrees with its shards; see also [`open_files`](Self::open_files).
    pub fn open_index(index_path: &Path) -> Result<Self, LoadError> {
        Self::open_index_with(index_path, &[])
    }

    /// [`open_index`](Self::open_index) where tensors may have the `packed` types too.
    pub(crate) fn open_index_with(index_path: &Path, packed: &[&str]) -> Result<Self, LoadError> {
        let damaged = |what: String| LoadError::damaged(index_path, "safetensors index", what);
        let index = json::read(index_path)?;
        let map = index.get("weight_map").and_then(Value::as_object);
        let map = map.ok_or_else(|| damaged("it has no 'weight_map'".into()))?;
        let mut shards: Vec<&str> = Vec::new();
        for (tensor, shard) in map {
            let plain = |name: &&str| !name.is_empty() && !name.contains(['/', '\\']) && *name != "..";
            let shard = shard.as_str().filter(plain);
            shards.push(shard.ok_or_else(|| damaged(format!("the shard of '{tensor}' is no file name")))?);
        }
        shards.sort_unstable();
        shards.dedup();
        let paths: Vec<PathBuf> = shards.iter().map(|shard| index_path.with_file_name(shard)).collect();
        let absent = shards.iter().zip(&paths).filter(|(_, path)| !path.is_file());
        let missing: Vec<String> = absent.map(|(shard, _)| (*shard).to_owned()).collect();
        if !missing.is_empty() {
            return Err(LoadError::MissingFiles { path: index_path.to_owned(), missing });
        }
        let checkpoint = Self::open_files_with(&paths, packed)?;
        for (tensor, shard) in map {
            let place = checkpoint.place(tensor).and_then(|path| path.file_name());
            if place.and_then(|name| name.to_str()) != shard.as_str() {
                return Err(damaged(format!("tensor '{tensor}' is not in the shard {shard}")));
            }
        }
        Ok(checkpoint)
    }

    fn add(&mut self, path: &Path, packed: &[&str]) -> Result<(), LoadError> {
        let bytes = map_file(path)?;
        let header = Header::parse_with(path, bytes.as_slice(), packed)?;
        let number = self.files.len();
        for entry in header.entries {
            if let Some(first) = self.place(&entry.name) {
                return Err(LoadError::ForeignPart {
                    path: path.to_owned(),
                    first: first.to_owned(),
                    what: format!("tensor '{}' is in both", entry.name),
                });
            }
            self.index.insert(entry.name.clone(), self.tensors.len());
            self.tensors.push((number, entry));
        }
        self.files.push((path.to_owned(), bytes));
        Ok(())
    }

    /// The tensor called `name` as the file has it, whatever its type.
    pub(crate) fn raw(&self, name: &str) -> Option<RawTensor<'_>> {
        let (file, entry) = self.tensors.get(*self.index.get(name)?)?;
        let (path, bytes) = self.files.get(*file)?;
        let bytes = bytes.slice(entry.range.clone())?;
        Some(RawTensor { path, dtype: entry.dtype, shape: &entry.shape, bytes })
    }

    /// The file that holds the tensor called `name`.
    fn place(&self, name: &str) -> Option<&Path> {
        let (file, _) = self.tensors.get(*self.index.get(name)?)?;
        self.files.get(*file).map(|(path, _)| path.as_path())
    }

    fn first_path(&self) -> &Path {
        self.files.first().map_or(Path::new(""), |(path, _)| path)
    }

    fn all_names(&self) -> impl Iterator<Item = &str> + Clone + '_ {
        self.tensors.iter().map(|(_, entry)| entry.name.as_str())
    }
}

impl Checkpoint for SafetensorsCheckpoint {
    fn get(&self, name: &str) -> Result<Weight, LoadError> {
        let missing = || missing_tensor(self.first_path(), name, self.all_names());
        let (file, entry) = self.index.get(name).and_then(|&i| self.tensors.get(i)).ok_or_else(missing)?;
        let (path, bytes) = self.files.get(*file).ok_or_else(missing)?;
        let dtype = weight_type(entry.dtype).ok_or_else(|| LoadError::UnsupportedTensor {
            path: path.clone(),
            tensor: name.to_owned(),
            dtype: entry.dtype.to_string(),
            others: 0,
            supported: SUPPORTED_SAFETENSORS_TYPES,
        })?;
        let bytes = bytes.slice(entry.range.clone()).ok_or_else(missing)?;
        Weight::new(name, dtype, entry.shape.clone(), bytes)
            .map_err(|source| LoadError::Weight { path: path.clone(), source })
    }

    fn contains(&self, name: &str) -> bool {
        self.index.contains_key(name)
    }

    fn names(&self) -> Vec<&str> {
        self.all_names().collect()
    }

    fn describe(&self) -> String {
        let files = match self.files.len() {
            1 => String::new(),
            n => format!(" and {} more files", n - 1),
        };
        let types = count_types(self.tensors.iter().filter_map(|(_, entry)| weight_type(entry.dtype)));
        format!("{}{files} (safetensors; tensors: {types})", self.first_path().display())
    }

    fn total_bytes(&self) -> u64 {
        self.tensors.iter().map(|(_, entry)| entry.range.len() as u64).sum()
    }
}
