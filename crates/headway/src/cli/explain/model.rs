//! The model that is asked about: its needs, and the size of its weights where they are at hand.

use super::super::CliError;
use headway_engine::{
    loading::{self, GgufFile, json},
    models::ModelNeeds,
    sources::{self, FetchOptions, ModelSpec, NoProgress},
};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// What is known of the model.
pub struct Model {
    /// What its layers need.
    pub needs: ModelNeeds,
    /// Bytes of its weight files; `None`: there are none here.
    pub weights_bytes: Option<u64>,
    /// Bytes of the weights as headway holds them, where it makes quantised ones another type at load.
    pub made_bytes: Option<u64>,
    /// The file that was read.
    pub files: String,
}

/// Finds and reads a model without fetching anything.
pub fn read(name: &str) -> Result<Model, CliError> {
    let path = match ModelSpec::parse(name)? {
        ModelSpec::Path(path) => path,
        spec => {
            let offline =
                FetchOptions { hub_offline: true, pip_command: vec![], ..FetchOptions::from_env()? };
            let found = sources::resolve(&spec, &offline, &NoProgress);
            let missing = |_| {
                CliError::Usage(format!(
                    "{name} is not in the cache and explain fetches nothing; run headway pull {name} first, or give the path \
                     of its config.json"
                ))
            };
            found.map_err(missing)?.path
        }
    };
    if path.is_dir() {
        return folder(&path);
    }
    match path.extension().and_then(|e| e.to_str()) {
        Some("json") => config(&path, None),
        Some("safetensors") => config(&path.with_file_name("config.json"), Some(size(&path))),
        _ => gguf(&path),
    }
}

fn folder(path: &Path) -> Result<Model, CliError> {
    let mut files: Vec<PathBuf> = fs::read_dir(path)
        .map_err(|e| CliError::File { path: path.to_owned(), why: format!("cannot be read: {e}") })?
        .filter_map(|e| e.ok().map(|e| e.path()))
        .collect();
    files.sort();
    let of =
        |kind: &str| files.iter().filter(|f| f.extension().is_some_and(|e| e == kind)).collect::<Vec<_>>();
    let (weights, ggufs) = (of("safetensors"), of("gguf"));
    let file = path.join("config.json");
    if file.is_file() {
        let bytes = weights.iter().map(|f| size(f)).sum();
        let mut model = config(&file, (!weights.is_empty()).then_some(bytes))?;
        if model.needs.quantisation.is_some() {
            // A format that isn't read is start-up's to refuse.
            model.made_bytes = loading::open(path).ok().map(|f| f.checkpoint.total_bytes());
        }
        return Ok(model);
    }
    match ggufs.first() {
        Some(first) => gguf(first),
        None => {
            Err(CliError::File { path: path.to_owned(), why: "has no config.json and no .gguf file".into() })
        }
    }
}

fn config(path: &Path, weights_bytes: Option<u64>) -> Result<Model, CliError> {
    let file = path.display().to_string();
    let needs = ModelNeeds::from_config(&file, &json::read(path)?)?;
    Ok(Model { needs, weights_bytes, made_bytes: None, files: file })
}

fn gguf(path: &Path) -> Result<Model, CliError> {
    let g = GgufFile::open(path)?;
    Ok(Model {
        needs: ModelNeeds::from_gguf(&g)?,
        weights_bytes: Some(size(path)),
        made_bytes: None,
        files: path.display().to_string(),
    })
}

fn size(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |m| m.len())
}
