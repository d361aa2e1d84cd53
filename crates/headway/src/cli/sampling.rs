//! Sampling options, from the command line or from a line of a batch file.

use super::args::SamplingArgs;
use headway_engine::{Engine, sampling::SamplingParams};
use serde::{Deserialize, Deserializer, de::Error};
use serde_json::Value;
use std::collections::BTreeMap;

/// Tokens to generate where not asked and there is room.
const DEFAULT_MAX_TOKENS: usize = 128;

impl SamplingArgs {
    /// Parameters of `generate`: greedy unless asked otherwise.
    pub fn params(&self, logprobs: Option<usize>) -> SamplingParams {
        let d = SamplingParams::greedy();
        SamplingParams {
            max_tokens: self.max_tokens,
            temperature: self.temperature.unwrap_or(d.temperature),
            top_k: self.top_k.unwrap_or(d.top_k),
            top_p: self.top_p.unwrap_or(d.top_p),
            min_p: self.min_p.unwrap_or(d.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(d.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(d.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(d.frequency_penalty),
            logit_bias: self.logit_bias.iter().copied().collect(),
            min_tokens: self.min_tokens.unwrap_or(d.min_tokens),
            seed: self.seed,
            stop: self.stop.clone(),
            ignore_eos: self.ignore_eos,
            logprobs,
            ..d
        }
    }

    /// Parameters of `chat`: livelier, and as long as there is room.
    pub fn chat_params(&self) -> SamplingParams {
        let d = self.params(None);
        SamplingParams {
            temperature: self.temperature.unwrap_or(0.6),
            top_p: self.top_p.unwrap_or(0.95),
            ..d
        }
    }
}

/// How many tokens may come after the prompt, where nobody said: the default, or what there is room for.
pub fn in_room(params: SamplingParams, engine: &impl Engine, prompt_tokens: usize) -> SamplingParams {
    let room = engine.max_request_tokens().saturating_sub(prompt_tokens).max(1);
    SamplingParams { max_tokens: params.max_tokens.or(Some(DEFAULT_MAX_TOKENS.min(room))), ..params }
}

/// One line of a batch file.
#[derive(Deserialize, Debug, Default)]
#[serde(default, deny_unknown_fields)]
pub struct BatchLine {
    pub prompt: Option<String>,
    pub prompt_ids: Option<Vec<u32>>,
    pub chat: Option<bool>,
    pub max_tokens: Option<usize>,
    pub temperature: Option<f32>,
    pub top_k: Option<usize>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub logit_bias: Option<BTreeMap<u32, f32>>,
    pub min_tokens: Option<usize>,
    pub seed: Option<u64>,
    pub stop: Option<Vec<String>>,
    pub stop_token_ids: Option<Vec<u32>>,
    pub ignore_eos: Option<bool>,
    pub logprobs: Option<usize>,
    /// First position of each range of the prompt's tokens, and the one after its last.
    #[serde(deserialize_with = "ranges")]
    pub bidirectional_ranges: Option<Vec<[usize; 2]>>,
}

fn ranges<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Vec<[usize; 2]>>, D::Error> {
    let given = Value::deserialize(d)?;
    Option::deserialize(&given).map_err(|_| {
        D::Error::custom(format!(
            "bidirectional_ranges is {given}; a list of pairs of prompt positions [from, to] is needed, as in [[1, 4], [6, 9]]"
        ))
    })
}

impl BatchLine {
    /// The line's parameters over the command line's.
    pub fn params(&self, base: &SamplingParams) -> SamplingParams {
        let b = base.clone();
        SamplingParams {
            max_tokens: self.max_tokens.or(b.max_tokens),
            temperature: self.temperature.unwrap_or(b.temperature),
            top_k: self.top_k.unwrap_or(b.top_k),
            top_p: self.top_p.unwrap_or(b.top_p),
            min_p: self.min_p.unwrap_or(b.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(b.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(b.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(b.frequency_penalty),
            logit_bias: self
                .logit_bias
                .as_ref()
                .map_or(b.logit_bias, |l| l.iter().map(|(t, by)| (*t, *by)).collect()),
            min_tokens: self.min_tokens.unwrap_or(b.min_tokens),
            seed: self.seed.or(b.seed),
            stop: self.stop.clone().unwrap_or(b.stop),
            stop_token_ids: self.stop_token_ids.clone().unwrap_or(b.stop_token_ids),
            ignore_eos: self.ignore_eos.unwrap_or(b.ignore_eos),
            logprobs: self.logprobs.or(b.logprobs),
        }
    }
}
