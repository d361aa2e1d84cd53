//! Opening an engine: files, tokenizer, start-up, scheduler.

use super::llm::LlmEngine;
use crate::{
    kv::{KvCacheManager, KvGroupPolicy},
    loading::{self, LoadError, ModelFiles, ModelKind},
    models::{ModelError, arch, dummy},
    options::{EngineOptions, LoadFormat},
    runner::{StartupError, startup::Startup},
    sampling::Sampler,
    scheduler::{Scheduler, SchedulerConfig, SchedulerError, StepPlan},
    speculation::SpeculationStats,
    text::{GgufTokenizer, Tokenizer},
};
use headway_attention::KvCacheSpec;
use std::{collections::HashMap, path::Path, time::Instant};

/// Hears how far opening has come.
pub type OpenProgress<'a> = &'a mut dyn FnMut(usize, usize);

impl LlmEngine {
    /// Opens the model at `path` (a directory, a GGUF or a safetensors file). `progress` hears
    /// `(layers loaded, layers)`.
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
        let (tokenizer, startup) =
            while_reading_tokenizer(&files, path, || Startup::run(&files, options, progress))?;
        let eos_ids = eos_ids(&files, tokenizer.as_ref())?;
        let config = SchedulerConfig {
            max_num_batched_tokens: startup.limits.max_num_tokens,
            max_num_seqs: startup.limits.max_num_reqs,
            max_model_len: startup.limits.max_model_len,
            long_prefill_token_threshold: None,
            decode_first_threshold: startup.reorder_batch_threshold,
            num_speculative_tokens: startup.limits.num_speculative_tokens,
        };
        let policies = startup.kv_specs.iter().map(policy).collect();
        let kv = KvCacheManager::new(startup.num_blocks, policies, startup.prefix_caching)
            .map_err(SchedulerError::from)?;
        let scheduler = Scheduler::new(config, kv)?;
        let mut runner = startup.runner;
        runner.note_max_request_tokens(scheduler.max_total_tokens());
        Ok(Self {
            runner,
            scheduler,
            tokenizer,
            eos_ids,
            sampler: Sampler::new(),
            lookup: startup.lookup,
            speculation: SpeculationStats::default(),
            sessions: HashMap::new(),
            plan: StepPlan::default(),
            outcomes: vec![],
            load_time: started.elapsed(),
            observer: None,
        })
    }
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

/// The tokenizer's ids that end an answer, or the config's where there is no tokenizer.
fn eos_ids(files: &ModelFiles, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>, StartupError> {
    if let Some(t) = tokenizer {
        return Ok(t.eos_ids().to_vec());
    }
    let ModelKind::Safetensors(hf) = &files.kind else { return Ok(vec![]) };
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
