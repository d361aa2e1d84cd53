//! Sampling parameters, as both kinds of completion have them.

use super::fields::Fields;
use crate::{ApiError, driver::Model, error::shown};
use headway_engine::{sampling::SamplingParams, text::Tokenizer};
use serde::Deserialize;
use serde_json::json;
use std::collections::BTreeMap;

/// The most completions of one prompt.
pub const MAX_N: usize = 128;
/// The most stop strings, and bytes in all of them: each answer of a call has its copy.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 8 << 10;
/// The most stop tokens.
const MAX_STOP_TOKENS: usize = 1024;
/// Biases that are taken for any vocabulary.
const MAX_BIASES: usize = 1024;

/// One or several, as `stop` takes them.
#[derive(Deserialize)]
#[serde(untagged, expecting = "a string or a list of strings is needed")]
enum Stops {
    One(String),
    Many(Vec<String>),
}

/// What both kinds of completion share besides their prompt.
pub struct Common {
    /// How tokens are chosen; `max_tokens` and `logprobs` are the endpoint's business.
    pub sampling: SamplingParams,
    /// Answers to each prompt.
    pub n: usize,
    /// Whether the answer comes in events.
    pub stream: bool,
    /// Whether the last event before the end has the token counts.
    pub include_usage: bool,
    /// The model asked for.
    pub model: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
    // Sent by newer clients; there is no obfuscation to leave out.
    #[serde(default, rename = "include_obfuscation")]
    _include_obfuscation: bool,
}

impl Common {
    /// Takes the shared parameters.
    ///
    /// # Errors
    /// 400 naming the parameter.
    pub fn take(f: &mut Fields, model: &Model) -> Result<Self, ApiError> {
        let d = SamplingParams::default();
        let (stop, stop_token_ids) = stops(f)?;
        let bias = bias(f, model)?;
        let sampling = SamplingParams {
            temperature: f.take("temperature")?.unwrap_or(d.temperature),
            top_p: f.take("top_p")?.unwrap_or(d.top_p),
            top_k: top_k(f)?,
            min_p: f.take("min_p")?.unwrap_or(d.min_p),
            repetition_penalty: f.take("repetition_penalty")?.unwrap_or(d.repetition_penalty),
            presence_penalty: f.take("presence_penalty")?.unwrap_or(d.presence_penalty),
            frequency_penalty: f.take("frequency_penalty")?.unwrap_or(d.frequency_penalty),
            logit_bias: bias.into(),
            seed: f.take::<i64>("seed")?.map(|s| s as u64),
            stop,
            stop_token_ids,
            ignore_eos: f.take("ignore_eos")?.unwrap_or(false),
            min_tokens: f.take("min_tokens")?.unwrap_or(d.min_tokens),
            max_tokens: None,
            logprobs: None,
        };
        check(&sampling)?;
        let n = f.take("n")?.unwrap_or(1);
        if !(1..=MAX_N).contains(&n) {
            return Err(ApiError::param("n", format!("n is {n}; 1 to {MAX_N} are taken")));
        }
        let stream = f.take("stream")?.unwrap_or(false);
        let options: Option<StreamOptions> = f.take("stream_options")?;
        if options.is_some() && !stream {
            return Err(ApiError::param("stream_options", "stream_options needs stream to be true"));
        }
        f.refuse("use_beam_search", &[json!(false)], "leave it out: tokens are sampled")?;
        f.ignore(&["user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"]);
        Ok(Self {
            sampling,
            n,
            stream,
            include_usage: options.unwrap_or_default().include_usage,
            model: f.take("model")?,
        })
    }
}

/// Biases by token. The ids are the engine's to check; more of them than there are tokens are not read at all.
fn bias(f: &mut Fields, model: &Model) -> Result<Vec<(u32, f32)>, ApiError> {
    let given: BTreeMap<String, f32> = match f.size("logit_bias") {
        Some(n) if n > model.tokenizer.as_ref().map_or(MAX_BIASES, Tokenizer::vocab_size).max(MAX_BIASES) => {
            return Err(ApiError::param(
                "logit_bias",
                format!("logit_bias has {n} tokens, more than there are"),
            ));
        }
        _ => f.take("logit_bias")?.unwrap_or_default(),
    };
    let entry = |(id, bias): (String, f32)| match id.parse() {
        Ok(id) => Ok((id, bias)),
        Err(_) => {
            let param = format!("logit_bias.{}", shown(&id));
            let why =
                format!("{param}: {:?} is not a token id; its keys are integers of at least 0", shown(&id));
            Err(ApiError::param(param, why))
        }
    };
    // An id may be written in more than one way.
    let all: BTreeMap<u32, f32> = given.into_iter().map(entry).collect::<Result<_, _>>()?;
    Ok(all.into_iter().collect())
}

/// Strings and tokens that end an answer.
fn stops(f: &mut Fields) -> Result<(Vec<String>, Vec<u32>), ApiError> {
    let strings = match f.take("stop")? {
        None => vec![],
        Some(Stops::One(s)) => vec![s],
        Some(Stops::Many(list)) => list,
    };
    let (number, bytes) = (strings.len(), strings.iter().map(String::len).sum::<usize>());
    if number > MAX_STOPS || bytes > MAX_STOP_BYTES {
        let why = format!(
            "stop has {number} strings of {bytes} bytes; at most {MAX_STOPS} of {MAX_STOP_BYTES} bytes together are taken"
        );
        return Err(ApiError::param("stop", why));
    }
    let tokens: Vec<u32> = f.take("stop_token_ids")?.unwrap_or_default();
    if tokens.len() > MAX_STOP_TOKENS {
        let why = format!("stop_token_ids has {} ids; at most {MAX_STOP_TOKENS} are taken", tokens.len());
        return Err(ApiError::param("stop_token_ids", why));
    }
    Ok((strings, tokens))
}

/// −1 means all, as elsewhere in the field.
fn top_k(f: &mut Fields) -> Result<usize, ApiError> {
    match f.take::<i64>("top_k")?.unwrap_or(0) {
        -1 => Ok(0),
        k if k >= 0 => Ok(k as usize),
        k => Err(ApiError::param("top_k", format!("top_k is {k}; at least 1, or 0 or -1 for all tokens"))),
    }
}

/// The engine's own ranges, under the API's names.
fn check(sampling: &SamplingParams) -> Result<(), ApiError> {
    sampling.validate().map_err(|e| {
        let name = e.option.trim_start_matches("--").replace('-', "_");
        ApiError::param(name.clone(), format!("{name} must be {}, got {}", e.range, e.got))
    })
}

/// `max_tokens` under one of its names.
///
/// # Errors
/// 400 for 0.
pub fn max_tokens(f: &mut Fields, name: &'static str) -> Result<Option<usize>, ApiError> {
    match f.take::<usize>(name)? {
        Some(0) => Err(ApiError::param(name, format!("{name} must be at least 1, got 0"))),
        n => Ok(n),
    }
}
