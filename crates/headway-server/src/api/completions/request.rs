//! A completion's request, read and checked.

use crate::{
    ApiError,
    api::{
        fields::Fields,
        grammar::Format,
        sampling::{Common, max_tokens},
    },
    driver::Model,
};
use serde::Deserialize;
use serde_json::json;

/// Tokens of an answer where none are asked for, as in the OpenAI API.
const DEFAULT_MAX_TOKENS: usize = 16;
/// The most log-probabilities a token.
pub const MAX_LOGPROBS: usize = 20;
/// The most prompts of a call.
const MAX_PROMPTS: usize = 1024;

/// `prompt`, in its four forms.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "a string, a list of strings, a list of token ids, or a list of lists of token ids is needed"
)]
enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    IdLists(Vec<Vec<u32>>),
}

/// One prompt.
pub enum Prompt {
    /// Text.
    Text(String),
    /// Token ids, as they go in.
    Ids(Vec<u32>),
}

/// `POST /v1/completions`.
pub struct Request {
    /// The prompts.
    pub prompts: Vec<Prompt>,
    /// Whether an answer begins with its prompt.
    pub echo: bool,
    /// Log-probabilities a token.
    pub logprobs: Option<usize>,
    /// The most tokens of an answer.
    pub max_tokens: Option<usize>,
    /// What the answer must be.
    pub format: Option<Format>,
    /// What chat completions have too.
    pub common: Common,
}

impl Request {
    /// Reads a body.
    ///
    /// # Errors
    /// 400 naming the parameter.
    pub fn parse(body: &[u8], model: &Model) -> Result<Self, ApiError> {
        let mut f = Fields::parse(body)?;
        let prompts = match f.need("prompt")? {
            Prompts::Text(t) => vec![Prompt::Text(t)],
            Prompts::Texts(list) => list.into_iter().map(Prompt::Text).collect(),
            Prompts::Ids(ids) => vec![Prompt::Ids(ids)],
            Prompts::IdLists(lists) => lists.into_iter().map(Prompt::Ids).collect::<Vec<_>>(),
        };
        if prompts.is_empty() || prompts.len() > MAX_PROMPTS {
            return Err(ApiError::param(
                "prompt",
                format!("prompt has {} entries; 1 to {MAX_PROMPTS} are taken", prompts.len()),
            ));
        }
        let common = Common::take(&mut f, model)?;
        let (echo, logprobs) = (f.take("echo")?.unwrap_or(false), f.take("logprobs")?);
        if logprobs.is_some_and(|n: usize| n > MAX_LOGPROBS) {
            return Err(ApiError::param("logprobs", format!("logprobs is at most {MAX_LOGPROBS}")));
        }
        if echo && logprobs.is_some() {
            let why = "logprobs of the prompt are not supported; leave out echo or logprobs";
            return Err(ApiError::param("logprobs", why));
        }
        let best_of = f.take::<usize>("best_of")?;
        if best_of.is_some_and(|b| b != common.n) {
            let why = format!(
                "best_of other than n ({}) is not supported; leave it out, and choose among n answers",
                common.n
            );
            return Err(ApiError::param("best_of", why));
        }
        f.refuse(
            "suffix",
            &[json!("")],
            "only models trained to fill in the middle could; put it into the prompt",
        )?;
        let (max_tokens, format) = (max_tokens(&mut f, "max_tokens")?, Format::take(&mut f)?);
        f.finish()?;
        Ok(Self { prompts, echo, logprobs, max_tokens, format, common })
    }

    /// The most tokens of an answer to a prompt of so many.
    pub fn max_tokens(&self, prompt_tokens: usize, model: &Model) -> usize {
        let room = model.max_request_tokens.saturating_sub(prompt_tokens);
        self.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS.min(room.max(1)))
    }
}

impl Prompt {
    /// Its bytes, roughly: what tokenising it takes grows with them.
    pub fn size(&self) -> usize {
        match self {
            Self::Text(text) => text.len().max(1),
            Self::Ids(ids) => ids.len().max(1),
        }
    }

    /// Its token ids: a text's with the model's BOS where it asks for one.
    ///
    /// # Errors
    /// 400 for an empty prompt or one that the vocabulary can't express, 422 for text without a tokenizer.
    pub fn ids(&self, model: &Model) -> Result<Vec<u32>, ApiError> {
        let ids = match self {
            Self::Ids(ids) => ids.clone(),
            Self::Text(text) => model.encode(text, true, "prompt")?,
        };
        match ids.is_empty() {
            true => Err(ApiError::param("prompt", "the prompt is empty; give at least one token")),
            false => Ok(ids),
        }
    }

    /// Its text.
    pub fn text(&self, model: &Model) -> String {
        match (self, &model.tokenizer) {
            (Self::Text(t), _) => t.clone(),
            (Self::Ids(ids), Some(t)) => t.decode(ids, false),
            (Self::Ids(_), None) => String::new(),
        }
    }
}
