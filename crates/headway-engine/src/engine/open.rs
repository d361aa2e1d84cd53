//! Opening an engine: files, tokenizer, start-up, scheduler.

use super::{embed, llm::LlmEngine};
use crate::{
    kv::{KvCacheManager, KvGroupPolicy},
    loading::{self, LoadError, ModelFiles, ModelKind},
    models::{ModelError, arch, dummy, headers},
    options::{EngineOptions, LoadFormat},
    runner::{
        StartupError, devices,
        facts::Facts,
        limits,
        place::Place,
        startup::{self, Decided, Startup},
    },
    sampling::{DeviceChoices, Sampler},
    scheduler::{Scheduler, SchedulerError, StepPlan},
    speculation::SpeculationStats,
    text::{GgufTokenizer, Tokenizer},
    tuning,
};
use headway_attention::KvCacheSpec;
use std::{collections::HashMap, path::Path, time::Instant};

/// Hears how far opening has come.
pub type OpenProgress<'a> = &'a mut dyn FnMut(usize, usize);

impl LlmEngine {
    /// Opens the model at `path` (a directory, a GGUF or a safetensors file). `progress` hears
    /// `(layers loaded, layers)`, and then `(graphs captured, graphs)` where there are any.
    ///
    /// # Errors
    /// The files, the options, memory: each names the file or option and what to do.
    pub fn open(
        path: &Path,
        options: &EngineOptions,
        progress: OpenProgress<'_>,
    ) -> Result<Self, StartupError> {
        let started = Instant::now();
        let files = match options.load_format {
            LoadFormat::Auto => loading::open(path)?,
            LoadFormat::Dummy => dummy::open(path)?,
        };
        arch::refuse_unknown(&files)?;
        refuse_encoders(&files)?;
        let eos_ids = eos_ids(&files)?;
        let (tokenizer, Startup { mut runner, decided }) =
            while_reading_tokenizer(&files, path, || Startup::run(&files, options, progress))?;
        let scheduler = scheduler(&decided)?;
        runner.note_max_request_tokens(scheduler.max_total_tokens());
        Ok(Self {
            runner,
            scheduler,
            eos_ids: tokenizer.as_ref().map_or(eos_ids, |t| t.eos_ids().to_vec()),
            tokenizer,
            sampler: Sampler::new(),
            choices: DeviceChoices::default(),
            lookup: decided.lookup(),
            speculation: SpeculationStats::default(),
            sessions: HashMap::new(),
            plan: StepPlan::default(),
            outcomes: vec![],
            load_time: started.elapsed(),
            observer: None,
        })
    }
}

/// What opening a model would fail with before it reads a weight or a tokenizer, `available` bytes being free. The
/// device is opened where `open_device`.
///
/// # Errors
/// That.
pub(crate) fn refusal(
    files: &ModelFiles,
    facts: &Facts,
    options: &EngineOptions,
    available: Option<u64>,
    open_device: bool,
) -> Result<(), StartupError> {
    match facts.plan.pooling {
        None => drop(eos_ids(files)?),
        Some(_) => drop(embed::pooling_of(files)?),
    }
    limits::refuse_what_is_not_there(options)?;
    let device = match open_device || tuning::asked(options)? {
        true => Some(devices::open(options)?),
        false => None,
    };
    let registry = startup::registry(options)?;
    let here = || Ok(device.as_ref().map(|d| d.here(&registry)).unwrap_or_default());
    let decided = startup::decide(facts, options, &registry, &Place::cpu(available), here)?;
    // A config may be asked about without its weights.
    if facts.weights_bytes > 0 {
        headers::check(&decided.plan, &*files.checkpoint)?;
    }
    match facts.plan.pooling {
        None => scheduler(&decided).map(drop),
        Some(_) => Ok(()),
    }
}

fn scheduler(decided: &Decided) -> Result<Scheduler, StartupError> {
    let policies = decided.specs().map(policy).collect();
    let kv = KvCacheManager::new(decided.cache.num_blocks, policies, decided.prefix_caching)
        .map_err(SchedulerError::from)?;
    Ok(Scheduler::new(decided.scheduler.clone(), kv)?)
}

/// A model that generates nothing.
fn refuse_encoders(files: &ModelFiles) -> Result<(), ModelError> {
    match arch::plan(files)?.pooling {
        None => Ok(()),
        Some(_) => Err(ModelError::Unsupported {
            file: files.checkpoint.describe(),
            what: "generating with an encoder".into(),
            remedy: "use headway embed, or choose a model that generates".into(),
        }),
    }
}

/// How the pages of a group are handed out.
fn policy(spec: &KvCacheSpec) -> KvGroupPolicy {
    let block_size = spec.block_size();
    match spec {
        KvCacheSpec::ChunkedLocal { attention_chunk_size, .. } => {
            KvGroupPolicy::chunked_local(block_size, *attention_chunk_size)
        }
        KvCacheSpec::Rswa { .. } => KvGroupPolicy::rswa(block_size),
        KvCacheSpec::Mamba(_) => KvGroupPolicy::state(),
        KvCacheSpec::Cross(_) => KvGroupPolicy::encoded(block_size),
        KvCacheSpec::EncoderOnly(_) => KvGroupPolicy::nothing(),
        other => match other.sliding_window() {
            Some(window) => KvGroupPolicy::sliding_window(block_size, window),
            None => KvGroupPolicy::full(block_size),
        },
    }
}

/// Runs `start` while another thread rebuilds the tokenizer: for a vocabulary of 262,144 pieces that takes longer than the
/// weights of a small model. What is wrong with the tokenizer is said first.
fn while_reading_tokenizer<T>(
    files: &ModelFiles,
    path: &Path,
    start: impl FnOnce() -> Result<T, StartupError>,
) -> Result<(Option<Tokenizer>, T), StartupError> {
    std::thread::scope(|s| {
        let reading = s.spawn(|| tokenizer(files, path));
        let started = start();
        let tokenizer = reading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok((tokenizer, started?))
    })
}

fn tokenizer(files: &ModelFiles, path: &Path) -> Result<Option<Tokenizer>, StartupError> {
    let named = |source| StartupError::Tokenizer { path: path.to_owned(), source };
    Ok(match &files.kind {
        ModelKind::Safetensors(hf) => match &hf.tokenizer_json {
            Some(_) => Some(Tokenizer::from_dir(&files.root).map_err(named)?),
            None => None,
        },
        ModelKind::Gguf(g) => {
            let vocabulary = GgufTokenizer::try_from(g.metadata())?;
            Some(Tokenizer::from_gguf(vocabulary).map_err(named)?)
        }
    })
}

/// The config's ids that end an answer, of a model without a tokenizer, which would say.
fn eos_ids(files: &ModelFiles) -> Result<Vec<u32>, StartupError> {
    let ModelKind::Safetensors(hf) = &files.kind else { return Ok(vec![]) };
    if hf.tokenizer_json.is_some() {
        return Ok(vec![]);
    }
    let field = |v: &serde_json::Value| v.get("eos_token_id").filter(|v| !v.is_null()).cloned();
    let Some(value) = hf.generation_config.as_ref().and_then(field).or_else(|| field(&hf.config)) else {
        return Ok(vec![]);
    };
    let id = |v: &serde_json::Value| v.as_u64().and_then(|v| u32::try_from(v).ok());
    let ids: Option<Vec<u32>> = match &value {
        serde_json::Value::Array(a) => a.iter().map(id).collect(),
        v => id(v).map(|id| vec![id]),
    };
    ids.ok_or_else(|| {
        let what = format!("is {value}; a token id or a list of them is needed");
        LoadError::bad_key(&hf.config_path, "eos_token_id", what).into()
    })
}
