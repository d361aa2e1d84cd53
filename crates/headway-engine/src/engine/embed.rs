//! [`Embedder`]: a vector for each input, from models that see their whole input at once. No cache, no
//! scheduler: inputs are packed into steps as they come.

use super::StepError;
use crate::{
    loading::{self, LoadError, ModelFiles, ModelKind},
    models::{ModelError, arch, dummy, plan::Pooling},
    options::{EngineOptions, LoadFormat},
    runner::{ModelRunner, StartupError, StartupReport, limits::Limits, startup::Startup},
    scheduler::{RequestId, ScheduledRequest, StepPlan},
    text::{TextError, Tokenizer},
};
use serde_json::Value;
use std::path::Path;

use super::open::OpenProgress;

/// Where sentence-transformers says how states become a vector.
const POOLING_FILE: &str = "1_Pooling/config.json";

/// How vectors are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbedOptions {
    /// `None`: as the model's `1_Pooling/config.json` says; the mean where there is none.
    pub pooling: Option<Pooling>,
    /// Vectors get length 1.
    pub normalize: bool,
}

impl Default for EmbedOptions {
    fn default() -> Self {
        Self { pooling: None, normalize: true }
    }
}

/// Why an input got no vector.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbedError {
    /// An input of no tokens.
    #[error("input {index} is empty; give at least one token")]
    Empty {
        /// Its place among the inputs.
        index: usize,
    },
    /// An input that the model or a step can't take.
    #[error("input {index} has {tokens} tokens; {why}")]
    TooLong {
        /// Its place among the inputs.
        index: usize,
        /// Its length.
        tokens: usize,
        /// The limit, and what to do.
        why: String,
    },
    /// A token that isn't there.
    #[error("input {index} has the token id {id}; the model's vocabulary has {vocab_size}")]
    IdOutOfRange {
        /// Its place among the inputs.
        index: usize,
        /// The token.
        id: u32,
        /// Ids there are.
        vocab_size: usize,
    },
    /// Numbers that are none.
    #[error(
        "input {index}: {count} of {width} numbers of its vector are NaN or infinite: the model's numbers broke down; check the \
         weights"
    )]
    NotFinite {
        /// Its place among the inputs.
        index: usize,
        /// Such numbers.
        count: usize,
        /// Numbers of a vector.
        width: usize,
    },
    /// Text for a model without a tokenizer, or that it can't express.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The model's step.
    #[error(transparent)]
    Step(#[from] StepError),
}

/// An encoder that gives vectors.
///
/// ```
/// use headway_engine::{EngineOptions, engine::{EmbedOptions, Embedder}};
/// let model = headway_testkit::testdata::model_dir("tiny-bert")?;
/// let mut embedder = Embedder::open(&model, &EngineOptions::default(), EmbedOptions::default(), &mut |_, _| ())?;
/// let vectors = embedder.embed(&[vec![5, 6, 7], vec![8]])?;
/// assert_eq!((vectors.len(), vectors[0].len()), (2, 32));
/// assert!((vectors[0].iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Embedder {
    runner: ModelRunner,
    tokenizer: Option<Tokenizer>,
    limits: Limits,
    pooling: Pooling,
    normalize: bool,
    steps: u64,
}

impl Embedder {
    /// Opens the encoder at `path`, a directory. `progress` hears `(layers loaded, layers)`.
    ///
    /// # Errors
    /// As [`LlmEngine::open`](super::LlmEngine::open); a model that generates.
    pub fn open(
        path: &Path,
        options: &EngineOptions,
        embed: EmbedOptions,
        progress: OpenProgress<'_>,
    ) -> Result<Self, StartupError> {
        let files = match options.load_format {
            LoadFormat::Auto => loading::open(path)?,
            LoadFormat::Dummy => dummy::open(path)?,
        };
        let plan = arch::plan(&files)?;
        let Some(pooling) = plan.pooling else {
            return Err(ModelError::Unsupported {
                file: files.checkpoint.describe(),
                what: format!("vectors of a model that generates ({})", plan.architecture),
                remedy:
                    "choose an encoder (BertModel, RobertaModel, XLMRobertaModel), or use headway generate"
                        .into(),
            }
            .into());
        };
        let pooling = match embed.pooling {
            Some(p) => p,
            None => pooling_of(&files)?.unwrap_or(pooling),
        };
        let tokenizer = tokenizer(&files, path)?;
        let Startup { runner, decided } = Startup::run(&files, options, progress)?;
        Ok(Self { runner, tokenizer, limits: decided.limits, pooling, normalize: embed.normalize, steps: 0 })
    }

    /// What was decided at start-up.
    pub fn report(&self) -> &StartupReport {
        self.runner.report()
    }

    /// The model's tokenizer, where it has one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// How hidden states become a vector.
    pub fn pooling(&self) -> Pooling {
        self.pooling
    }

    /// The runner, with its counters.
    pub fn runner(&self) -> &ModelRunner {
        &self.runner
    }

    /// The ids of a text, with what the model puts around it.
    ///
    /// # Errors
    /// A model without a tokenizer; text that it can't express.
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>, EmbedError> {
        let detail = || "the model came without a tokenizer; give token ids".to_owned();
        let tokenizer = self.tokenizer.as_ref().ok_or_else(|| TextError::Encode { detail: detail() })?;
        Ok(tokenizer.encode(text, true)?)
    }

    /// A vector for each input, in their order. Inputs share steps, as many as fit; none is cut.
    ///
    /// # Errors
    /// The first input that can't be: empty, too long for the model or a step, ids outside the vocabulary.
    pub fn embed(&mut self, inputs: &[Vec<u32>]) -> Result<Vec<Vec<f32>>, EmbedError> {
        inputs.iter().enumerate().try_for_each(|(i, input)| self.check(i, input))?;
        let mut vectors = Vec::with_capacity(inputs.len());
        let mut rest = inputs;
        while !rest.is_empty() {
            let mut tokens = 0;
            let fits = rest.iter().take(self.limits.max_num_reqs).take_while(|input| {
                tokens += input.len();
                tokens <= self.limits.max_num_tokens
            });
            let (now, later) = rest.split_at(fits.count());
            self.step(now, &mut vectors)?;
            rest = later;
        }
        Ok(vectors)
    }

    fn check(&self, index: usize, input: &[u32]) -> Result<(), EmbedError> {
        let (tokens, vocab_size) = (input.len(), self.runner.vocab_size());
        let Limits { max_num_tokens, max_model_len, .. } = self.limits;
        if tokens == 0 {
            return Err(EmbedError::Empty { index });
        }
        if tokens > max_model_len {
            let why = format!("a request may have {max_model_len} (--max-model-len); shorten it");
            return Err(EmbedError::TooLong { index, tokens, why });
        }
        if tokens > max_num_tokens {
            let why = format!(
                "an encoder sees its input in one step of at most {max_num_tokens}; raise \
                 --max-num-batched-tokens to {tokens}"
            );
            return Err(EmbedError::TooLong { index, tokens, why });
        }
        match input.iter().find(|id| **id as usize >= vocab_size) {
            Some(&id) => Err(EmbedError::IdOutOfRange { index, id, vocab_size }),
            None => Ok(()),
        }
    }

    /// One step over whole inputs.
    fn step(&mut self, inputs: &[Vec<u32>], vectors: &mut Vec<Vec<f32>>) -> Result<(), EmbedError> {
        self.steps += 1;
        let mut plan = StepPlan { step: self.steps, ..StepPlan::default() };
        for (i, input) in inputs.iter().enumerate() {
            let first = plan.token_ids.len();
            plan.token_ids.extend(input);
            plan.requests.push(ScheduledRequest {
                id: RequestId(i as u64),
                num_computed_tokens: 0,
                num_new_tokens: input.len(),
                draft_range: 0..0,
                token_range: first..plan.token_ids.len(),
                is_prefilling: true,
                needs_logits: false,
                remaining_tokens: 0,
                num_cached_tokens: 0,
                encoder_len: 0,
                encoder_range: 0..0,
                num_prompt_tokens: input.len(),
                bidirectional_ranges: None,
            });
        }
        let width = self.runner.model().hidden_size;
        let states = self.runner.encode(&plan).map_err(StepError::from)?;
        for r in &plan.requests {
            let rows = &states[r.token_range.start * width..r.token_range.end * width];
            let mut vector = pool(rows, width, self.pooling);
            let count = vector.iter().filter(|x| !x.is_finite()).count();
            if count > 0 {
                return Err(EmbedError::NotFinite { index: vectors.len(), count, width });
            }
            if self.normalize {
                normalize(&mut vector);
            }
            vectors.push(vector);
        }
        Ok(())
    }
}

fn pool(rows: &[f32], width: usize, pooling: Pooling) -> Vec<f32> {
    match pooling {
        Pooling::First => rows[..width].to_vec(),
        Pooling::Last => rows[rows.len() - width..].to_vec(),
        Pooling::Mean => {
            let mut sum = vec![0f64; width];
            for row in rows.chunks_exact(width) {
                sum.iter_mut().zip(row).for_each(|(s, x)| *s += f64::from(*x));
            }
            let n = (rows.len() / width) as f64;
            sum.iter().map(|s| (s / n) as f32).collect()
        }
    }
}

/// To length 1; a vector of zeros stays.
fn normalize(vector: &mut [f32]) {
    let length = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
}

/// As the model's own files say.
pub(super) fn pooling_of(files: &ModelFiles) -> Result<Option<Pooling>, StartupError> {
    let path = files.root.join(POOLING_FILE);
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(LoadError::bad_key(&path, "the file", format!("can't be read: {e}")).into()),
    };
    let json: Value = serde_json::from_str(&text)
        .map_err(|e| LoadError::bad_key(&path, "the file", format!("is not JSON: {e}")))?;
    let on: Vec<&str> = json
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(k, v)| k.starts_with("pooling_mode_") && v.as_bool() == Some(true))
        .map(|(k, _)| k.as_str())
        .collect();
    match on[..] {
        ["pooling_mode_mean_tokens"] => Ok(Some(Pooling::Mean)),
        ["pooling_mode_cls_token"] => Ok(Some(Pooling::First)),
        ["pooling_mode_lasttoken"] => Ok(Some(Pooling::Last)),
        _ => {
            let what = format!("asks for {on:?}; supported: one of mean_tokens, cls_token, lasttoken");
            Err(LoadError::bad_key(&path, "pooling_mode", what).into())
        }
    }
}

fn tokenizer(files: &ModelFiles, path: &Path) -> Result<Option<Tokenizer>, StartupError> {
    match &files.kind {
        ModelKind::Safetensors(hf) if hf.tokenizer_json.is_some() => Tokenizer::for_encoder(&files.root)
            .map(Some)
            .map_err(|source| StartupError::Tokenizer { path: path.to_owned(), source }),
        _ => Ok(None),
    }
}
