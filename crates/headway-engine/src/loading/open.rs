//! From a path that a user gives to the model files behind it.
//!
//! A directory is a Hugging Face checkpoint (safetensors and `config.json`) or holds one GGUF model; a
//! file is a GGUF file (any part of a split one) or a safetensors file with its `config.json` beside it.
//!
//! Not for names and hub identifiers: whoever resolves those hands a path on to here.

use super::dequantise::{Dequantised, Format};
use super::gguf::GgufFile;
use super::safetensors::SafetensorsCheckpoint;
use super::{Checkpoint, LoadError, json};
use serde_json::Value;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const EXPECTED: &str = "model.safetensors, model.safetensors.index.json with its shards, or a .gguf file";

/// A model's files, opened. Lives while the model is being loaded.
pub struct ModelFiles {
    /// The directory that the files lie in.
    pub root: PathBuf,
    /// The configuration, as the format has it.
    pub kind: ModelKind,
    /// The tensors.
    pub checkpoint: Arc<dyn Checkpoint>,
}

/// Where a model's configuration and tokenizer come from.
#[derive(Debug)]
pub enum ModelKind {
    /// Files of their own, as on the Hugging Face hub.
    Safetensors(Box<HfFiles>),
    /// The GGUF file's metadata.
    Gguf(Arc<GgufFile>),
}

/// The files beside the weights of a Hugging Face checkpoint.
///
/// In the JSON values `Infinity` and `NaN` stand as strings; [`json::float`] reads both.
#[derive(Debug)]
pub struct HfFiles {
    /// `config.json`.
    pub config: Value,
    /// The path of `config.json`, for messages.
    pub config_path: PathBuf,
    /// `generation_config.json`.
    pub generation_config: Option<Value>,
    /// The path of `tokenizer.json`.
    pub tokenizer_json: Option<PathBuf>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<Value>,
    /// `chat_template.jinja`, or the template in `chat_template.json`.
    pub chat_template: Option<String>,
}

/// Opens the model at `path`.
///
/// # Errors
/// [`LoadError::NoWeights`] where nothing can be loaded, and what the formats say; all name the file.
pub fn open(path: &Path) -> Result<ModelFiles, LoadError> {
    let about = std::fs::metadata(path).map_err(|source| LoadError::Io {
        path: path.to_owned(),
        doing: "open",
        source,
    })?;
    if about.is_dir() {
        return open_directory(path);
    }
    if !about.is_file() {
        return Err(LoadError::NotSupported {
            path: path.to_owned(),
            what: "something that is neither a file nor a directory".into(),
            supported: "a .gguf or .safetensors file, or a model directory".into(),
        });
    }
    match path.extension().and_then(OsStr::to_str) {
        Some("gguf") => open_gguf(path),
        Some("safetensors") => {
            let root = directory_of(path);
            match index_listing(&root, path)? {
                Some(index) => open_hf(&root, |types| SafetensorsCheckpoint::open_index_with(&index, types)),
                None => {
                    open_hf(&root, |types| SafetensorsCheckpoint::open_files_with(&[path.to_owned()], types))
                }
            }
        }
        _ if begins_with_gguf(path) => open_gguf(path),
        _ => Err(LoadError::NotSupported {
            path: path.to_owned(),
            what: "this kind of file".into(),
            supported: "a .gguf file, a .safetensors file with config.json beside it, or a model directory"
                .into(),
        }),
    }
}

fn begins_with_gguf(path: &Path) -> bool {
    use std::io::Read;
    let mut magic = [0; 4];
    std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == *b"GGUF"
}

fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// The index in `root`, if it lists the shard at `path`.
fn index_listing(root: &Path, path: &Path) -> Result<Option<PathBuf>, LoadError> {
    let index = root.join("model.safetensors.index.json");
    let Some(listing) = json::read_optional(&index)? else { return Ok(None) };
    let name = path.file_name().and_then(OsStr::to_str);
    let map = listing.get("weight_map").and_then(Value::as_object);
    let listed = map.is_some_and(|map| map.values().any(|shard| shard.as_str() == name));
    Ok(listed.then_some(index))
}

fn open_gguf(path: &Path) -> Result<ModelFiles, LoadError> {
    let file = Arc::new(GgufFile::open(path)?);
    Ok(ModelFiles { root: directory_of(path), kind: ModelKind::Gguf(Arc::clone(&file)), checkpoint: file })
}

fn open_directory(root: &Path) -> Result<ModelFiles, LoadError> {
    let single = root.join("model.safetensors");
    if single.is_file() {
        return open_hf(root, |types| SafetensorsCheckpoint::open_files_with(&[single], types));
    }
    let index = root.join("model.safetensors.index.json");
    if index.is_file() {
        return open_hf(root, |types| SafetensorsCheckpoint::open_index_with(&index, types));
    }
    let names = file_names(root)?;
    let with = |ending: &str| -> Vec<PathBuf> {
        names.iter().filter(|name| name.ends_with(ending)).map(|name| root.join(name)).collect()
    };
    match (with(".safetensors").as_slice(), with(".gguf").as_slice()) {
        ([one], _) => {
            open_hf(root, |types| SafetensorsCheckpoint::open_files_with(std::slice::from_ref(one), types))
        }
        ([], [one]) => open_gguf(one),
        ([], several @ [first, ..]) if GgufFile::are_parts_of_one(several) => open_gguf(first),
        ([], []) => Err(no_weights(root, describe_found(&names))),
        ([], several) => {
            Err(no_weights(root, format!("{} GGUF models (pass the path of one)", several.len())))
        }
        (several, _) => {
            let found = format!("{} safetensors files without an index", several.len());
            Err(no_weights(root, found))
        }
    }
}

fn no_weights(root: &Path, found: String) -> LoadError {
    LoadError::NoWeights { path: root.to_owned(), found, expected: EXPECTED }
}

/// The names of the regular files in `root`, sorted.
fn file_names(root: &Path) -> Result<Vec<String>, LoadError> {
    let io = |source| LoadError::Io { path: root.to_owned(), doing: "list", source };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(root).map_err(io)? {
        let entry = entry.map_err(io)?;
        if entry.path().is_file() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// What a directory without weights holds, for the message.
fn describe_found(names: &[String]) -> String {
    let other_weights: Vec<&str> = names
        .iter()
        .map(String::as_str)
        .filter(|name| {
            let ending = Path::new(name).extension().and_then(OsStr::to_str).unwrap_or_default();
            matches!(ending, "bin" | "pt" | "pth" | "ckpt" | "h5" | "msgpack" | "onnx" | "npz" | "tflite")
        })
        .collect();
    match (other_weights.as_slice(), names) {
        ([], []) => "an empty directory".to_owned(),
        ([], names) => format!("{} files, none with weights", names.len()),
        ([one], _) => format!("{one}, a format that is not read (convert it to safetensors)"),
        ([first, rest @ ..], _) => {
            format!(
                "{first} and {} more in formats that are not read (convert them to safetensors)",
                rest.len()
            )
        }
    }
}

/// Reads the files beside the weights, and then opens the weights with the types that the configuration brings: a
/// configuration that rules the model out is reported before broken weights.
fn open_hf(
    root: &Path,
    open: impl FnOnce(&[&str]) -> Result<SafetensorsCheckpoint, LoadError>,
) -> Result<ModelFiles, LoadError> {
    let config_path = root.join("config.json");
    if !config_path.exists() {
        return Err(LoadError::MissingFiles { path: root.to_owned(), missing: vec!["config.json".into()] });
    }
    let files = hf_files(config_path)?;
    let checkpoint: Arc<dyn Checkpoint> = match Format::of(&files.config_path, &files.config)? {
        None => Arc::new(open(&[])?),
        Some(format) => {
            let inner = open(format.packed_types())?;
            Arc::new(Dequantised::new(inner, format, &files.config_path, &files.config)?)
        }
    };
    Ok(ModelFiles { root: root.to_owned(), kind: ModelKind::Safetensors(Box::new(files)), checkpoint })
}

/// `config.json` and the files beside it, without the weights.
///
/// # Errors
/// A file that can't be read or parsed; a quantised checkpoint format that isn't read.
pub fn hf_files(config_path: PathBuf) -> Result<HfFiles, LoadError> {
    let root = &directory_of(&config_path);
    let config = json::read(&config_path)?;
    Format::of(&config_path, &config)?;
    let tokenizer = root.join("tokenizer.json");
    Ok(HfFiles {
        config,
        config_path,
        generation_config: json::read_optional(&root.join("generation_config.json"))?,
        tokenizer_json: tokenizer.is_file().then_some(tokenizer),
        tokenizer_config: json::read_optional(&root.join("tokenizer_config.json"))?,
        chat_template: chat_template(root)?,
    })
}

fn chat_template(root: &Path) -> Result<Option<String>, LoadError> {
    let jinja = root.join("chat_template.jinja");
    if jinja.is_file() {
        return json::read_text(&jinja).map(Some);
    }
    let file = json::read_optional(&root.join("chat_template.json"))?;
    Ok(file.and_then(|file| Some(file.get("chat_template")?.as_str()?.to_owned())))
}

impl std::fmt::Debug for ModelFiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ModelFiles")
            .field("root", &self.root)
            .field("checkpoint", &self.checkpoint.describe())
            .finish()
    }
}
