//! [`Penalties`]: what a request's wishes and its own tokens do to its logits before one is chosen.
//!
//! Lifetime: a thread; scratch memory only, nothing of one row is left in the next. By the OpenAI API's definition presence
//! and frequency count generated tokens alone; the repetition penalty sees the prompt too. The order is vLLM's: bias,
//! repetition, frequency, presence.

use super::{SamplingError, SamplingParams, sampler::Row, softmax};

impl SamplingParams {
    /// Whether logits are changed before they are chosen from.
    pub(super) fn changes_logits(&self) -> bool {
        !self.logit_bias.is_empty() || self.repetition_penalty != 1.0 || self.counts_tokens()
    }

    /// Whether it matters how often a token was generated.
    fn counts_tokens(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

#[derive(Debug, Default)]
pub(super) struct Penalties {
    /// One bit a token: already penalised in this row. All zero between rows.
    seen: Vec<u64>,
    /// How often each token was generated. All zero between rows.
    counts: Vec<u32>,
}

impl Penalties {
    /// Changes the logits of a row for which [`SamplingParams::changes_logits`]; the new maximum.
    ///
    /// # Errors
    /// A token outside the vocabulary; logits that are infinite afterwards.
    pub fn apply(&mut self, logits: &mut [f32], row: &Row<'_>) -> Result<f32, SamplingError> {
        let (params, vocab_size) = (row.params, logits.len());
        let outside = |t: &u32| *t as usize >= vocab_size;
        let biased = params.logit_bias.iter().map(|(token, _)| token);
        let penalised = params.repetition_penalty != 1.0 || params.counts_tokens();
        if let Some(&token_id) = biased.chain(row.history().filter(|_| penalised)).find(|t| outside(t)) {
            return Err(SamplingError::TokenOutOfRange { token_id, vocab_size });
        }
        params.logit_bias.iter().for_each(|(token, bias)| logits[*token as usize] += bias);
        if params.repetition_penalty != 1.0 {
            self.repetition(logits, row);
        }
        if params.counts_tokens() {
            self.counted(logits, row);
        }
        softmax::max_logit(logits)
    }

    /// Each token of the prompt and the answer once: divided where positive, multiplied where not.
    fn repetition(&mut self, logits: &mut [f32], row: &Row<'_>) {
        let penalty = row.params.repetition_penalty;
        self.seen.resize(logits.len().div_ceil(64), 0);
        for &token in row.history() {
            let (word, bit) = (token as usize / 64, 1u64 << (token % 64));
            if self.seen[word] & bit == 0 {
                self.seen[word] |= bit;
                let logit = &mut logits[token as usize];
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        }
        for &token in row.history() {
            self.seen[token as usize / 64] = 0;
        }
    }

    /// Each generated token: less the frequency penalty for each time, and the presence penalty once.
    fn counted(&mut self, logits: &mut [f32], row: &Row<'_>) {
        let (frequency, presence) = (row.params.frequency_penalty, row.params.presence_penalty);
        self.counts.resize(logits.len(), 0);
        row.generated().for_each(|t| self.counts[*t as usize] += 1);
        for &token in row.generated() {
            let count = std::mem::take(&mut self.counts[token as usize]);
            if count > 0 {
                let logit = &mut logits[token as usize];
                *logit -= frequency * count as f32;
                *logit -= presence;
            }
        }
    }
}
