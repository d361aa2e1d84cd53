//! The scheduler's limits. Not for the size of the KV cache, which its manager knows.

use super::SchedulerError;

/// Limits of the scheduler; chunked prefill is always on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// The most tokens computed in one step, over all requests.
    pub max_num_batched_tokens: usize,
    /// The most requests computed in one step.
    pub max_num_seqs: usize,
    /// The most tokens of one request, prompt and generated together.
    pub max_model_len: usize,
    /// The most prompt tokens of one request in one step, so that long prompts leave room for short ones. `None`: as
    /// many as the budget allows, and then first tokens come in the order of arrival.
    pub long_prefill_token_threshold: Option<usize>,
    /// The reorder threshold that a metadata builder asked for, in query tokens: the step's requests are then ordered
    /// decodes (not prefilling, at most so many query tokens), short extends, long extends, prefills. `None`: requests
    /// stand in the order in which they were scheduled.
    pub decode_first_threshold: Option<usize>,
    /// The most tokens drafted for one request in one step; 0: none.
    pub num_speculative_tokens: usize,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            max_num_batched_tokens: 2048,
            max_num_seqs: 128,
            max_model_len: 4096,
            long_prefill_token_threshold: None,
            decode_first_threshold: None,
            num_speculative_tokens: 0,
        }
    }
}

impl SchedulerConfig {
    /// The most tokens of one request in one step.
    pub fn max_chunk(&self) -> usize {
        self.long_prefill_token_threshold.unwrap_or(usize::MAX).min(self.max_num_batched_tokens)
    }

    /// # Errors
    /// Any limit of 0, or a token budget in which not every running request could decode.
    pub fn validate(&self) -> Result<(), SchedulerError> {
        let limits = [
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--max-num-seqs", self.max_num_seqs),
            ("--max-model-len", self.max_model_len),
            ("long_prefill_token_threshold", self.long_prefill_token_threshold.unwrap_or(1)),
            ("decode_first_threshold", self.decode_first_threshold.unwrap_or(1)),
        ];
        if let Some((option, _)) = limits.iter().find(|(_, value)| *value == 0) {
            return Err(SchedulerError::ZeroLimit { option });
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(SchedulerError::BudgetBelowSeqs {
                max_num_batched_tokens: self.max_num_batched_tokens,
                max_num_seqs: self.max_num_seqs,
            });
        }
        Ok(())
    }
}
