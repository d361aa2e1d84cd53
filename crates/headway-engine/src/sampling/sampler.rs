//! [`Sampler`]: one row of logits to one token.
//!
//! Lifetime: a thread; it is scratch memory only, reused from row to row.

use super::constraint;
use super::logprobs::{self, Logprobs};
use super::params::SamplingParams;
use super::penalties::Penalties;
use super::random;
use super::select::{self, Entry};
use super::softmax;
use super::{SamplingError, TokenLogprob};

/// What belongs to a row besides its logits.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// The request's parameters, validated.
    pub params: &'a SamplingParams,
    /// The request's tokens, prompt and generated; read by penalties only.
    pub tokens: &'a [u32],
    /// How many of them are the prompt.
    pub prompt_len: usize,
    /// Drafted tokens after them that this step accepted; read likewise. The token that is sampled stands at position
    /// `tokens.len() + drafted.len()`.
    pub drafted: &'a [u32],
    /// The model's end-of-sequence tokens; read where [`SamplingParams::min_tokens`] holds an answer open.
    pub eos_ids: &'a [u32],
    /// Seed of the request's random stream ([`SamplingParams::seed`] or [`super::fresh_seed`]).
    pub seed: u64,
}

impl<'a> Row<'a> {
    /// A row of an answer that has just begun, without drafted tokens.
    pub fn new(params: &'a SamplingParams, prompt: &'a [u32], seed: u64) -> Self {
        Self { params, tokens: prompt, prompt_len: prompt.len(), drafted: &[], eos_ids: &[], seed }
    }

    /// Prompt and generated tokens.
    pub(super) fn history(&self) -> impl Iterator<Item = &'a u32> + use<'a> {
        self.tokens.iter().chain(self.drafted)
    }

    /// Generated tokens.
    pub(super) fn generated(&self) -> impl Iterator<Item = &'a u32> + use<'a> {
        self.tokens.get(self.prompt_len..).unwrap_or(&[]).iter().chain(self.drafted)
    }

    /// Whether the answer may not end with this token.
    pub(super) fn is_held_open(&self) -> bool {
        self.position() < self.prompt_len.saturating_add(self.params.min_tokens)
    }

    pub(super) fn position(&self) -> usize {
        self.tokens.len() + self.drafted.len()
    }
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Its own log-probability and those of the most likely tokens, if the request asked for logprobs; of the raw logits.
    pub logprobs: Option<(TokenLogprob, Logprobs)>,
}

/// Samples tokens; holds scratch memory for one row.
///
/// ```
/// use headway_engine::sampling::{Row, Sampler, SamplingParams};
///
/// let params = SamplingParams { temperature: 0.7, top_k: 2, ..SamplingParams::default() };
/// params.validate()?;
/// let mut sampler = Sampler::new();
/// let token = sampler.sample(&mut [0.0, 3.0, 2.5, -1.0], &Row::new(&params, &[5, 6], 42))?.token;
/// assert!(token == 1 || token == 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct Sampler {
    /// Unnormalised probabilities `[vocab_size]`, 0 for tokens that are cut.
    weights: Vec<f32>,
    entries: Vec<Entry>,
    /// The row before penalties, kept only where log-probabilities are asked for.
    raw: Vec<f32>,
    bins: Vec<select::Bin>,
    penalties: Penalties,
}

impl Sampler {
    /// A sampler without scratch memory yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Samples the token that follows `row.tokens` and `row.drafted` from `logits`, `[vocab_size]`, which bias and penalties
    /// change.
    ///
    /// # Errors
    /// Logits that are empty, NaN, plus infinity or all minus infinity; a biased token outside the vocabulary, or with
    /// penalties one of the row.
    pub fn sample(&mut self, logits: &mut [f32], row: &Row<'_>) -> Result<Sampled, SamplingError> {
        self.sample_among(logits, row, None)
    }

    /// As [`Self::sample`], from the tokens whose bits `allowed` has ([`Constraint::allowed`](super::Constraint::allowed)).
    /// Log-probabilities stay those of the raw logits.
    ///
    /// # Errors
    /// As [`Self::sample`]; no token that is allowed and possible.
    pub fn sample_among(
        &mut self,
        logits: &mut [f32],
        row: &Row<'_>,
        allowed: Option<&[u32]>,
    ) -> Result<Sampled, SamplingError> {
        let max = softmax::max_logit(logits)?;
        let top = match row.params.logprobs {
            Some(n) => Some(logprobs::top(logits, max, n, &mut self.entries)?),
            None => None,
        };
        let changed = row.params.changes_logits();
        if changed && top.is_some() {
            self.raw.clear();
            self.raw.extend_from_slice(logits);
        }
        let max = self.process(logits, max, row, allowed)?;
        let token = match row.params.is_greedy() {
            true => softmax::index_of(logits, max) as u32,
            false => {
                self.weigh(logits, max, row.params);
                draw(&self.weights, random::uniform(row.seed, row.position() as u64))
            }
        };
        let raw = if changed { &self.raw } else { &*logits };
        let logprobs = top.map(|top| {
            let logprob = (f64::from(raw[token as usize]) - top.log_sum_exp) as f32;
            (TokenLogprob { token_id: token, logprob }, top)
        });
        Ok(Sampled { token, logprobs })
    }

    /// The probabilities from which [`Self::sample`] would draw, by token id, `[vocab_size]`; greedy gives all to one
    /// token. For checks and for verifying drafted tokens.
    ///
    /// # Errors
    /// As [`Self::sample`].
    pub fn distribution(&mut self, logits: &mut [f32], row: &Row<'_>) -> Result<Vec<f64>, SamplingError> {
        let max = softmax::max_logit(logits)?;
        let max = self.process(logits, max, row, None)?;
        if row.params.is_greedy() {
            let mut all = vec![0.0; logits.len()];
            all[softmax::index_of(logits, max)] = 1.0;
            return Ok(all);
        }
        self.weigh(logits, max, row.params);
        let total = softmax::sum(&self.weights);
        Ok(self.weights.iter().map(|w| f64::from(*w) / total).collect())
    }

    /// Everything that greedy rows see too: bias, penalties, what may follow. The new maximum.
    fn process(
        &mut self,
        logits: &mut [f32],
        mut max: f32,
        row: &Row<'_>,
        allowed: Option<&[u32]>,
    ) -> Result<f32, SamplingError> {
        if row.params.changes_logits() {
            max = self.penalties.apply(logits, row)?;
        }
        if let Some(allowed) = allowed {
            max = constraint::mask(logits, allowed);
            if max == f32::NEG_INFINITY {
                return Err(SamplingError::NothingPossible { vocab_size: logits.len() });
            }
        }
        if row.is_held_open() {
            max = constraint::hold_open(logits, max, row);
        }
        Ok(max)
    }

    /// Fills `weights`: temperature, min-p, top-k, top-p. min-p and top-k both cut everything below some logit, so they
    /// may be applied in either order.
    fn weigh(&mut self, logits: &[f32], max: f32, params: &SamplingParams) {
        // Divided, not multiplied by the reciprocal, which is infinite for the smallest temperatures.
        let temperature = params.temperature;
        self.weights.clear();
        self.weights.extend(logits.iter().map(|x| softmax::exp_nonpositive((x - max) / temperature)));
        if params.min_p > 0.0 {
            self.weights.iter_mut().for_each(|w| *w = if *w >= params.min_p { *w } else { 0.0 });
        }
        if params.top_k > 0 && params.top_k < logits.len() {
            select::top_k(logits, params.top_k, &mut self.entries);
            if let Some(cut) = self.entries.iter().max_by(|a, b| a.order(b)) {
                cut.apply(logits, &mut self.weights);
            }
        }
        if params.top_p < 1.0 {
            let need = softmax::sum(&self.weights) * f64::from(params.top_p);
            if let Some(cut) = select::top_p(&self.weights, need, &mut self.bins, &mut self.entries) {
                cut.apply_to(&mut self.weights);
            }
        }
    }
}

/// The token at `u` of `[0, 1)` on the weights laid end to end in the order of token ids. That order does not change
/// when two probabilities swap places, so the draw is as steady as the probabilities are.
fn draw(weights: &[f32], u: f64) -> u32 {
    let target = u * softmax::sum(weights);
    let mut before = 0.0;
    for (number, chunk) in weights.chunks(softmax::CHUNK).enumerate() {
        let after = before + softmax::chunk_sum(chunk);
        if after <= target {
            before = after;
            continue;
        }
        for (at, weight) in chunk.iter().enumerate() {
            before += f64::from(*weight);
            if before > target && *weight > 0.0 {
                return (number * softmax::CHUNK + at) as u32;
            }
        }
    }
    // Rounding can leave the target a hair beyond the end.
    weights.iter().rposition(|w| *w > 0.0).unwrap_or(0) as u32
}
