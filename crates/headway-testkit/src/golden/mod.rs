//! Goldens: what a reference implementation computed, as typed values (`format` `headway-golden/1`).
//!
//! Four kinds of file: [`TinyGolden`] (all logits of tiny checkpoints), [`EncoderGolden`] (vectors of tiny
//! encoders), [`RealGolden`] (top 10 and texts of real models) and [`TokenizerGolden`]. [`check`] knows how near is near enough, [`walk`]
//! runs a whole set and makes a table. Where the files come from: [`crate::testdata::goldens`].

pub mod check;
pub mod walk;

use crate::testdata::{self, TestDataError};
use serde::Deserialize;

/// The format that this module reads.
pub const FORMAT: &str = "headway-golden/1";

/// Why a golden can't be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GoldenError {
    /// The files can't be had.
    #[error(transparent)]
    TestData(#[from] TestDataError),
    /// Not JSON, or not of the shape that its kind has.
    #[error("golden {file}: {source}")]
    Json {
        /// The file.
        file: String,
        /// What the reader says.
        source: serde_json::Error,
    },
    /// Another format.
    #[error("golden {file} has format {found:?}; this reader knows {FORMAT}")]
    Format {
        /// The file.
        file: String,
        /// Its format.
        found: String,
    },
}

/// One golden file.
#[derive(Clone, Debug)]
pub enum Golden {
    /// Of a tiny checkpoint.
    Tiny(TinyGolden),
    /// Of a tiny encoder.
    Encoder(EncoderGolden),
    /// Of a real model.
    Real(RealGolden),
    /// Of a tokenizer.
    Tokenizer(TokenizerGolden),
}

/// Logits and greedy ids of a tiny checkpoint.
#[derive(Clone, Debug, Deserialize)]
pub struct TinyGolden {
    /// The checkpoint.
    pub model: TinyModel,
    /// How far equivalent runs of the reference are apart.
    pub numerics: Numerics,
    /// Norms between layers.
    pub hidden: Hidden,
    /// Prompts.
    pub cases: Vec<TinyCase>,
}

/// A tiny checkpoint.
#[derive(Clone, Debug, Deserialize)]
pub struct TinyModel {
    /// Folder name.
    pub name: String,
    /// `LlamaForCausalLM`, …
    pub architecture: String,
    /// `model_type` of its config.
    pub config_model_type: String,
    /// Type of the weights in the file.
    pub weights_dtype: String,
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Number of parameters.
    pub parameters: u64,
    /// What is special about it.
    #[serde(default)]
    pub note: String,
}

impl TinyModel {
    /// Whether tokens go to a few of many experts, by the architecture's name.
    pub fn is_mixture_of_experts(&self) -> bool {
        ["Moe", "MoE", "Deepseek", "GptOss", "Mixtral"].iter().any(|m| self.architecture.contains(m))
    }
}

/// Vectors of a tiny encoder.
#[derive(Clone, Debug, Deserialize)]
pub struct EncoderGolden {
    /// The checkpoint.
    pub model: TinyModel,
    /// All in bfloat16 against float32, of the means.
    pub bf16_compute_max_abs: f64,
    /// Inputs.
    pub cases: Vec<EncoderCase>,
}

/// An input of a tiny encoder, and hidden states of its last layer, `[hidden_size]` each.
#[derive(Clone, Debug, Deserialize)]
pub struct EncoderCase {
    /// Name.
    pub name: String,
    /// The input; nothing is added.
    pub prompt_ids: Vec<u32>,
    /// Of the first token.
    pub first: Vec<f64>,
    /// Of the last token.
    pub last: Vec<f64>,
    /// The mean over all tokens.
    pub mean: Vec<f64>,
}

/// The reference's own spread.
#[derive(Clone, Debug, Deserialize)]
pub struct Numerics {
    /// Standard deviation of the logits.
    pub logit_std: f64,
    /// With a cache against without.
    pub cached_vs_full_max_abs: f64,
    /// All in bfloat16 against float32.
    pub bf16_compute_max_abs: f64,
}

/// Norms between layers, of one prompt.
#[derive(Clone, Debug, Deserialize)]
pub struct Hidden {
    /// Name of the case.
    pub case: String,
    /// From the embedding on.
    pub layers: Vec<HiddenLayer>,
}

/// A place between layers.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct HiddenLayer {
    /// `embed`: what enters layer 0; `layer.N`: what leaves layer N; `final_norm`: what enters the head.
    pub at: String,
    /// L2 norm at the last position.
    pub last_l2: f64,
    /// L2 norm over all positions.
    pub all_l2: f64,
    /// The first 8 values at the last position.
    pub last_head8: Vec<f64>,
}

/// A prompt of a tiny checkpoint.
#[derive(Clone, Debug, Deserialize)]
pub struct TinyCase {
    /// Name.
    pub name: String,
    /// The prompt; no BOS is added.
    pub prompt_ids: Vec<u32>,
    /// What the encoder reads, of models that have one.
    #[serde(default)]
    pub encoder_ids: Vec<u32>,
    /// Log of the sum of exponentials of the logits.
    pub logsumexp: f64,
    /// `[vocab_size]`: logits at the last position of the prompt.
    pub logits: Vec<f64>,
    /// Each the argmax after all before it; no id ends the generation.
    pub greedy_ids: Vec<u32>,
    /// Largest less second logit of the step that chose each id.
    pub greedy_margins: Vec<f64>,
}

impl TinyCase {
    /// To be continued by as many ids as the golden has.
    pub fn prompt(&self) -> walk::Prompt<'_> {
        let max_new = self.greedy_ids.len();
        walk::Prompt { ids: &self.prompt_ids, encoder_ids: &self.encoder_ids, max_new, stop: &[] }
    }
}

/// Outputs of a real model.
#[derive(Clone, Debug, Deserialize)]
pub struct RealGolden {
    /// The model.
    pub model: RealModel,
    /// Its special ids.
    pub tokenizer: TokenizerInfo,
    /// Norms between layers.
    pub hidden: Hidden,
    /// Prompts.
    pub cases: Vec<RealCase>,
}

/// A real model in one file.
#[derive(Clone, Debug, Deserialize)]
pub struct RealModel {
    /// Short name.
    pub name: String,
    /// File name.
    #[serde(default)]
    pub gguf: String,
    /// Of the file.
    #[serde(default)]
    pub sha256: String,
    /// `LlamaForCausalLM`, …
    #[serde(default)]
    pub architecture: String,
    /// Size of the vocabulary.
    pub vocab_size: usize,
}

/// Special ids and the chat template.
#[derive(Clone, Debug, Deserialize)]
pub struct TokenizerInfo {
    /// Begin of sequence.
    #[serde(default)]
    pub bos_id: Option<u32>,
    /// Each ends a generation, and is kept.
    #[serde(default)]
    pub eos_ids: Vec<u32>,
    /// Whether plain prompts begin with BOS.
    #[serde(default)]
    pub prepend_bos_to_plain_prompts: bool,
    /// The template of the chat cases.
    #[serde(default)]
    pub chat_template: Option<String>,
}

/// A prompt of a real model.
#[derive(Clone, Debug, Deserialize)]
pub struct RealCase {
    /// Name.
    pub name: String,
    /// `plain` or `chat`.
    pub kind: String,
    /// Of plain cases.
    #[serde(default)]
    pub text: Option<String>,
    /// Of chat cases, as the template takes them.
    #[serde(default)]
    pub messages: Option<serde_json::Value>,
    /// Of chat cases.
    #[serde(default)]
    pub add_generation_prompt: bool,
    /// What the template makes of the messages.
    #[serde(default)]
    pub rendered: Option<String>,
    /// Ids of the prompt, BOS included where there is one.
    pub prompt_ids: Vec<u32>,
    /// The ten largest logits at the last position.
    pub top10: Vec<(u32, f64)>,
    /// Over all logits.
    pub logsumexp: f64,
    /// Mean of all logits.
    pub logit_mean: f64,
    /// L2 norm of all logits.
    pub logit_l2: f64,
    /// Each the argmax after all before it, up to and with an end.
    pub greedy_ids: Vec<u32>,
    /// Margins of their steps.
    pub greedy_margins: Vec<f64>,
    /// `eos` or `length`.
    pub finish: String,
    /// The ids as text, special tokens shown.
    pub greedy_text: String,
}

/// What a tokenizer makes of texts.
#[derive(Clone, Debug, Deserialize)]
pub struct TokenizerGolden {
    /// Whose tokenizer.
    pub model: TokenizerModel,
    /// Special ids and template.
    pub tokenizer: TokenizerInfo,
    /// Chats.
    #[serde(default)]
    pub chat: Vec<ChatCase>,
    /// Texts.
    pub cases: Vec<TokenizerCase>,
}

/// The owner of a tokenizer: a tiny checkpoint, or a GGUF file.
#[derive(Clone, Debug, Deserialize)]
pub struct TokenizerModel {
    /// Name.
    pub name: String,
    /// File name of a real model.
    #[serde(default)]
    pub gguf: Option<String>,
}

/// A chat and its rendering.
#[derive(Clone, Debug, Deserialize)]
pub struct ChatCase {
    /// Name.
    pub name: String,
    /// As the template takes them.
    pub messages: serde_json::Value,
    /// Whether the answer's beginning is added.
    pub add_generation_prompt: bool,
    /// The template's output.
    pub rendered: String,
    /// Its ids: special tokens recognised, nothing added.
    pub ids: Vec<u32>,
}

/// A text and its ids.
#[derive(Clone, Debug, Deserialize)]
pub struct TokenizerCase {
    /// The text.
    pub text: String,
    /// Its ids: no BOS, special tokens recognised.
    pub ids: Vec<u32>,
    /// The ids as text, special tokens shown.
    pub decoded: String,
    /// The ids as text, special tokens dropped.
    pub decoded_skip_special: String,
}

/// Reads one file. Its kind follows from what it has.
///
/// # Errors
/// [`GoldenError::Format`], [`GoldenError::Json`].
pub fn read(file: &str, text: &str) -> Result<Golden, GoldenError> {
    let json = |source| GoldenError::Json { file: file.to_owned(), source };
    let value: serde_json::Value = serde_json::from_str(text).map_err(json)?;
    let found = value["format"].as_str().unwrap_or("none").to_owned();
    if found != FORMAT {
        return Err(GoldenError::Format { file: file.to_owned(), found });
    }
    let case = &value["cases"][0];
    let (encoder, real) = (case.get("mean").is_some(), case.get("top10").is_some());
    match (value.get("numerics").is_some(), encoder, real) {
        (true, ..) => serde_json::from_value(value).map(Golden::Tiny),
        (_, true, _) => serde_json::from_value(value).map(Golden::Encoder),
        (.., true) => serde_json::from_value(value).map(Golden::Real),
        _ => serde_json::from_value(value).map(Golden::Tokenizer),
    }
    .map_err(json)
}

/// Every golden of [`testdata::goldens`], by file name.
///
/// # Errors
/// The first file that can't be had or read.
pub fn all() -> Result<Vec<Golden>, GoldenError> {
    testdata::goldens()?.iter().map(|(file, text)| read(file, text)).collect()
}

/// All of tiny checkpoints.
///
/// # Errors
/// As [`all`].
pub fn tiny() -> Result<Vec<TinyGolden>, GoldenError> {
    Ok(all()?.into_iter().filter_map(|g| if let Golden::Tiny(g) = g { Some(g) } else { None }).collect())
}

/// All of tiny encoders.
///
/// # Errors
/// As [`all`].
pub fn encoders() -> Result<Vec<EncoderGolden>, GoldenError> {
    Ok(all()?.into_iter().filter_map(|g| if let Golden::Encoder(g) = g { Some(g) } else { None }).collect())
}

/// All of real models.
///
/// # Errors
/// As [`all`].
pub fn real() -> Result<Vec<RealGolden>, GoldenError> {
    Ok(all()?.into_iter().filter_map(|g| if let Golden::Real(g) = g { Some(g) } else { None }).collect())
}

/// All of tokenizers.
///
/// # Errors
/// As [`all`].
pub fn tokenizers() -> Result<Vec<TokenizerGolden>, GoldenError> {
    Ok(all()?.into_iter().filter_map(|g| if let Golden::Tokenizer(g) = g { Some(g) } else { None }).collect())
}
