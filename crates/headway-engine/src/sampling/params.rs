//! [`SamplingParams`]: how a request wants its tokens chosen, and when it ends.
//!
//! Lifetime: one request. Not for the option parser or the wire format; both fill this and call
//! [`SamplingParams::validate`].

use super::ParamsError;
use std::sync::Arc;

/// The most alternatives that [`SamplingParams::logprobs`] may ask for.
pub const MAX_LOGPROBS: usize = 1024;

/// How a request's tokens are chosen and when it ends.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 chooses the most likely token (greedy); otherwise logits are divided by it. Finite, at least 0.
    pub temperature: f32,
    /// Keep the `k` most likely tokens; 0 keeps all. Exactly `k`: of equal logits the lower token ids.
    pub top_k: usize,
    /// Keep the fewest most likely tokens whose probabilities reach this sum; 1 keeps all. Above 0, at most 1.
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the most likely one; 0 keeps all. 0 to 1.
    pub min_p: f32,
    /// Logits of tokens that the request contains already (prompt or generated) are divided by it where positive and
    /// multiplied where negative; 1 changes nothing. Finite, above 0.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens that were generated already, once each; below 0 it is a reward. −2 to 2.
    pub presence_penalty: f32,
    /// Subtracted from them once for each time that they were generated. −2 to 2.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens, before any penalty. Each −100 to 100, each token in the vocabulary.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// Seed of the random stream; `None`: the engine takes [`super::fresh_seed`] and reports it.
    pub seed: Option<u64>,
    /// Strings that end the answer; none of them empty.
    pub stop: Vec<String>,
    /// Token ids that end the answer, besides the model's own.
    pub stop_token_ids: Vec<u32>,
    /// The most tokens to generate, at least 1. `None`: as many as the model's length allows.
    pub max_tokens: Option<usize>,
    /// The answer does not end before so many tokens: end-of-sequence tokens and stop tokens are not chosen until then
    /// (unless a grammar lets nothing else follow), and stop strings are looked for in the text after them. At most
    /// `max_tokens`.
    pub min_tokens: usize,
    /// Go on after the model's end-of-sequence tokens; without effect where a grammar says when an answer ends.
    pub ignore_eos: bool,
    /// Report the log-probabilities of this many most likely tokens at each position, at most [`MAX_LOGPROBS`].
    pub logprobs: Option<usize>,
}

impl Default for SamplingParams {
    /// Plain sampling from the model's distribution.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Arc::default(),
            seed: None,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            max_tokens: None,
            min_tokens: 0,
            ignore_eos: false,
            logprobs: None,
        }
    }
}

impl SamplingParams {
    /// The most likely token each time.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Whether the most likely token is taken each time, without randomness.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// # Errors
    /// The first option out of range, by name.
    pub fn validate(&self) -> Result<(), ParamsError> {
        let check = |ok: bool, option, range, got: &dyn ToString| match ok {
            true => Ok(()),
            false => Err(ParamsError { option, range, got: got.to_string() }),
        };
        let t = self.temperature;
        check(t.is_finite() && t >= 0.0, "--temperature", "a finite number of at least 0", &t)?;
        let p = self.top_p;
        check(p > 0.0 && p <= 1.0, "--top-p", "above 0 and at most 1", &p)?;
        check((0.0..=1.0).contains(&self.min_p), "--min-p", "from 0 to 1", &self.min_p)?;
        let r = self.repetition_penalty;
        check((0.01..=100.0).contains(&r), "--repetition-penalty", "from 0.01 to 100", &r)?;
        for (option, penalty) in
            [("--presence-penalty", self.presence_penalty), ("--frequency-penalty", self.frequency_penalty)]
        {
            check((-2.0..=2.0).contains(&penalty), option, "from -2 to 2", &penalty)?;
        }
        let far = self.logit_bias.iter().find(|(_, bias)| !(-100.0..=100.0).contains(bias));
        check(far.is_none(), "--logit-bias", "from -100 to 100", &far.map_or(0.0, |(_, bias)| *bias))?;
        check(self.max_tokens != Some(0), "--max-tokens", "at least 1", &0)?;
        let fits = self.max_tokens.is_none_or(|most| self.min_tokens <= most);
        check(fits, "--min-tokens", "at most --max-tokens", &self.min_tokens)?;
        let n = self.logprobs.unwrap_or(0);
        check(n <= MAX_LOGPROBS, "--logprobs", "at most 1024", &n)?;
        check(self.stop.iter().all(|s| !s.is_empty()), "--stop", "a string that is not empty", &"\"\"")
    }

    /// Whether `token` ends the answer, given the model's end-of-sequence tokens.
    pub fn is_stop_token(&self, token: u32, eos_token_ids: &[u32]) -> bool {
        self.stop_token_ids.contains(&token) || (!self.ignore_eos && eos_token_ids.contains(&token))
    }
}
