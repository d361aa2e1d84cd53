//! Log-probabilities: log-softmax of the raw logits, before penalties and temperature. Not used for sampling.

use super::SamplingError;
use super::select::{self, Entry};
use super::softmax;

/// A token and its log-probability (natural logarithm).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token_id: u32,
    /// Its log-probability.
    pub logprob: f32,
}

/// The log-probabilities of one position.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// The most likely tokens, from the most likely down; of equal ones the lower id first.
    pub top: Vec<TokenLogprob>,
    /// The log-sum-exp of the row: `logit - log_sum_exp` is any token's log-probability.
    pub log_sum_exp: f64,
}

/// The `n` most likely tokens (fewer where the vocabulary is smaller) of a row of raw logits, `[vocab_size]`. For the
/// rows that are sampled, [`super::Sampler::sample`] does this itself.
///
/// # Errors
/// A row that has no softmax: empty, NaN, plus infinity, nothing but minus infinity.
pub fn logprobs(logits: &[f32], n: usize) -> Result<Logprobs, SamplingError> {
    top(logits, softmax::max_logit(logits)?, n, &mut Vec::new())
}

/// As [`logprobs`], with the row's maximum known and scratch memory given.
pub(super) fn top(
    logits: &[f32],
    max: f32,
    n: usize,
    found: &mut Vec<Entry>,
) -> Result<Logprobs, SamplingError> {
    let mut exps = [0.0f32; softmax::CHUNK];
    let mut total = 0.0;
    for chunk in logits.chunks(softmax::CHUNK) {
        for (e, x) in exps.iter_mut().zip(chunk) {
            *e = softmax::exp_nonpositive(x - max);
        }
        total += softmax::chunk_sum(&exps[..chunk.len()]);
    }
    let log_sum_exp = f64::from(max) + total.ln();
    found.clear();
    if n > 0 {
        select::top_k(logits, n.min(logits.len()), found);
        found.sort_unstable_by(Entry::order);
    }
    let top = found
        .iter()
        .map(|e| TokenLogprob { token_id: e.index, logprob: (f64::from(e.value) - log_sum_exp) as f32 });
    Ok(Logprobs { top: top.collect(), log_sum_exp })
}
