//! The model that is asked about: as any engine would read its config, and as this engine's start-up reads its files.

use super::{Contenders, ExplainOptions};
use crate::{
    engine::{ENCODER_INPUT, open_refusal},
    loading::{self, GgufFile, LoadError, ModelFiles, ModelKind, json},
    models::{ModelError, ModelNeeds, dummy},
    options::LoadFormat,
    runner::{StartupError, facts::Facts, memory},
};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// A model that is asked about.
pub struct Subject {
    /// The file that was read.
    pub file: String,
    needs: Result<ModelNeeds, String>,
    own: Result<Own, StartupError>,
    /// Bytes of the weight files; `None`: there are none here.
    weights_bytes: Option<u64>,
}

/// The model as this engine runs it.
struct Own {
    files: ModelFiles,
    facts: Facts,
    needs: ModelNeeds,
}

/// What start-up says.
pub(super) enum Answer {
    /// It is not this engine or device that would start.
    NotAsked,
    /// It starts, with these warnings.
    Starts(Vec<String>),
    /// The model can't be run, with these options or others.
    Model {
        error: String,
        /// There is a translator for its architecture: its config or files are at fault.
        known: bool,
    },
    /// These options can't be.
    Options(StartupError),
}

impl Subject {
    /// Reads a folder, a `config.json`, a safetensors or a GGUF file. A config alone is asked about as if its weights
    /// were there.
    ///
    /// # Errors
    /// Nothing there that tells of a model. What start-up or an engine would say of it is told with the answer.
    pub fn read(path: &Path, load_format: LoadFormat) -> Result<Self, LoadError> {
        let (config, weights) = match path.extension().and_then(|e| e.to_str()) {
            _ if path.is_dir() => folder(path)?,
            Some("json") => (path.to_owned(), vec![]),
            Some("safetensors") => (path.with_file_name("config.json"), vec![path.to_owned()]),
            _ => (path.to_owned(), vec![path.to_owned()]),
        };
        let file = config.display().to_string();
        let is_json = config.extension().is_some_and(|e| e == "json");
        let files = match load_format {
            LoadFormat::Dummy => dummy::open(&config).map_err(StartupError::from),
            LoadFormat::Auto if weights.is_empty() => {
                dummy::config_alone(&config).map_err(StartupError::from)
            }
            LoadFormat::Auto => loading::open(path).map_err(StartupError::from),
        };
        let needs = match &files {
            _ if is_json => ModelNeeds::from_config(&file, &json::read(&config)?),
            Ok(ModelFiles { kind: ModelKind::Gguf(g), .. }) => ModelNeeds::from_gguf(g),
            _ => ModelNeeds::from_gguf(&GgufFile::open(&config)?),
        };
        let real = load_format == LoadFormat::Dummy || !weights.is_empty();
        let own = files.and_then(|files| {
            let facts = Facts::of(&files)?;
            let read = needs.as_ref().ok();
            // Without weights the config's word on their type is all there is.
            let dtype = if real { Some(facts.dtype) } else { read.and_then(|n| n.dtype) };
            let of_config = |n: &ModelNeeds| (n.quantisation.clone(), n.left_out.clone());
            let (quantisation, left_out) = read.map(of_config).unwrap_or_default();
            let needs = ModelNeeds { dtype, quantisation, left_out, ..ModelNeeds::of_plan(&facts.plan) };
            Ok(Own { files, facts, needs })
        });
        let bytes = |f: &PathBuf| fs::metadata(f).map_or(0, |m| m.len());
        let weights_bytes = (!weights.is_empty()).then(|| weights.iter().map(bytes).sum());
        Ok(Self { file, needs: needs.map_err(|e: ModelError| e.to_string()), own, weights_bytes })
    }

    /// The needs of the model in these backends' engine; what is wrong with it where they can't be read.
    pub(super) fn needs(&self, contenders: &Contenders) -> Result<&ModelNeeds, String> {
        match (contenders, &self.own, &self.needs) {
            (Contenders::Own(_), Ok(own), _) => Ok(&own.needs),
            (Contenders::Own(_), Err(e), Err(_)) => Err(e.to_string()),
            (_, _, Ok(needs)) => Ok(needs),
            (_, _, Err(e)) => Err(e.clone()),
        }
    }

    /// What its weights take, where they are here.
    pub(super) fn weights(&self, contenders: &Contenders) -> WeightBytes {
        let own = self.own.as_ref().ok().filter(|_| matches!(contenders, Contenders::Own(_)));
        let own = own.map(|o| &o.facts).filter(|f| f.weights_bytes > 0);
        WeightBytes {
            in_files: own.map(|f| f.weights_bytes).or(self.weights_bytes),
            dequantised: own.map(|f| f.narrow_bytes),
        }
    }

    /// What start-up of this engine on this machine would say.
    pub(super) fn start(
        &self,
        options: &ExplainOptions,
        contenders: &Contenders,
        open_device: bool,
    ) -> Answer {
        let here = options.engine.device.as_deref().is_none_or(|d| d.eq_ignore_ascii_case("cpu"));
        match &self.own {
            _ if !matches!(contenders, Contenders::Own(_)) => Answer::NotAsked,
            Err(e) => Answer::Model {
                error: e.to_string(),
                known: !matches!(e, StartupError::Model(ModelError::UnknownArchitecture { .. })),
            },
            _ if !here => Answer::NotAsked,
            Ok(own) => {
                let available = options.memory.or_else(memory::available_bytes);
                match open_refusal(&own.files, &own.facts, &options.engine, available, open_device) {
                    Ok(()) => Answer::Starts(own.warnings()),
                    Err(e) => Answer::Options(e),
                }
            }
        }
    }
}

impl Own {
    /// What start-up warns of, and what a user of the command line should know.
    fn warnings(&self) -> Vec<String> {
        let mut all = self.facts.warnings.clone();
        if self.facts.plan.encoder.is_some() {
            all.push(format!(
                "{} has an encoder: {ENCODER_INPUT}; headway generate and chat refuse it",
                self.facts.plan.architecture
            ));
        }
        all
    }
}

/// Bytes of a model's weights; `None` where they are not here.
#[derive(Clone, Copy, Debug)]
pub(super) struct WeightBytes {
    /// In the files.
    pub in_files: Option<u64>,
    /// On a device of headway's own engine that takes no block-quantised ones.
    pub dequantised: Option<u64>,
}

/// A folder's config, or its GGUF file; and its weight files.
fn folder(path: &Path) -> Result<(PathBuf, Vec<PathBuf>), LoadError> {
    let io = |source| LoadError::Io { path: path.to_owned(), doing: "list", source };
    let mut files: Vec<PathBuf> =
        fs::read_dir(path).map_err(io)?.filter_map(|e| e.ok().map(|e| e.path())).collect();
    files.sort();
    let of = |kind: &str| -> Vec<PathBuf> {
        files.iter().filter(|f| f.extension().is_some_and(|e| e == kind)).cloned().collect()
    };
    let config = path.join("config.json");
    if config.is_file() {
        return Ok((config, of("safetensors")));
    }
    let ggufs = of("gguf");
    let Some(first) = ggufs.first() else {
        return Err(LoadError::MissingFiles { path: path.to_owned(), missing: vec!["config.json".into()] });
    };
    Ok((first.clone(), ggufs))
}
