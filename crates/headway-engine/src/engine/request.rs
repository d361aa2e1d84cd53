//! Requests and what comes of them.

use super::ranges::RangeError;
use crate::{
    models::ModelError,
    sampling::{Constraint, Logprobs, ParamsError, SamplingError, SamplingParams},
    scheduler::{RequestId, SchedulerError},
    speculation::SpeculationStats,
    text::TextError,
};
use std::{ops::Range, sync::Arc};

/// One request.
#[derive(Clone, Debug, Default)]
pub struct GenerateRequest {
    /// The prompt's token ids, as they go in: of models with an encoder, the decoder's.
    pub prompt_ids: Vec<u32>,
    /// What the encoder reads, of models that have one; else empty.
    pub encoder_ids: Vec<u32>,
    /// How tokens are chosen and when the answer ends.
    pub sampling: SamplingParams,
    /// Positions of the prompt whose tokens see each other in both directions, range by range (PrefixLM: the tokens of
    /// an image), where the model was made for it (`is_mm_prefix_lm`). Ascending, apart, not empty.
    pub bidirectional_ranges: Vec<Range<usize>>,
    /// What the answer may be, beyond its end: a grammar.
    pub constraint: Option<Box<dyn Constraint>>,
}

/// Why a request was refused or ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A parameter out of range.
    #[error(transparent)]
    Params(#[from] ParamsError),
    /// Ranges that the model doesn't take, or that are no ranges of the prompt.
    #[error("bidirectional_ranges: {0}")]
    Ranges(#[from] RangeError),
    /// Too long, empty, or never to fit.
    #[error(transparent)]
    Scheduler(#[from] SchedulerError),
    /// The row had no token to give.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The request's [`Constraint`] can't go on.
    #[error("the answer's grammar: {0}")]
    Constraint(String),
    /// Stop strings, or ids outside the vocabulary.
    #[error(transparent)]
    Text(#[from] TextError),
    /// Stop strings without a tokenizer.
    #[error("--stop needs a tokenizer, and this model came without one; use stop token ids instead")]
    StopWithoutTokenizer,
    /// An input for an encoder that isn't there, or none for one that is, or one too long for it.
    #[error("encoder input of {tokens} tokens: {why}")]
    EncoderInput {
        /// Its length.
        tokens: usize,
        /// What is wrong, and what to do.
        why: String,
    },
    /// The step that computed it ran out of memory. Requests beside it go on, but where layers keep states, which such a
    /// step leaves half written.
    #[error(
        "{0}; a step of fewer tokens needs less: lower --max-num-batched-tokens or --max-num-seqs, or leave steps more \
         memory with a lower --kv-cache-memory"
    )]
    OutOfMemory(Arc<ModelError>),
    /// A biased token that the model doesn't have.
    #[error("--logit-bias: token {id} is outside the vocabulary of {vocab_size}; ids go from 0 to {}", vocab_size - 1)]
    BiasOutOfRange {
        /// The id.
        id: u32,
        /// Rows of the vocabulary.
        vocab_size: usize,
    },
    /// A stop token that the model doesn't have.
    #[error("--stop-token-ids: token {id} is outside the vocabulary of {vocab_size}; ids go from 0 to {}", vocab_size - 1)]
    StopOutOfRange {
        /// The id.
        id: u32,
        /// Rows of the vocabulary.
        vocab_size: usize,
    },
    /// A prompt id that the model doesn't have.
    #[error("prompt id {id} is outside the vocabulary of {vocab_size}; ids go from 0 to {}", vocab_size - 1)]
    IdOutOfRange {
        /// The id.
        id: u32,
        /// Rows of the vocabulary.
        vocab_size: usize,
    },
}

/// Why an answer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FinishReason {
    /// An end-of-sequence token, a stop token or a stop string.
    Stop,
    /// `max_tokens` or the model's length.
    Length,
}

impl FinishReason {
    /// As the field's APIs write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// A token that was chosen.
#[derive(Clone, Debug)]
pub struct NewToken {
    /// The token.
    pub token_id: u32,
    /// Text that can be shown now; may be empty (a character's bytes are not complete, a stop string may
    /// have begun, or the token is special).
    pub text: String,
    /// Characters of the answer's text before the token's own, those that are held back included; 0 without a
    /// tokenizer.
    pub text_offset: usize,
    /// Its own log-probability, where asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens at its position, where asked for.
    pub logprobs: Option<Logprobs>,
}

/// Where the time of a request went. A request shares its steps with others.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timings {
    /// From the first step that computed it to the first token, in seconds.
    pub prefill_s: f64,
    /// Prompt tokens that were computed (cached ones were not).
    pub prefill_tokens: usize,
    /// From the first token to the last, in seconds.
    pub decode_s: f64,
    /// Tokens after the first.
    pub decode_tokens: usize,
}

/// How a request ended.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// All generated ids; an ending EOS is kept.
    pub token_ids: Vec<u32>,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: usize,
    /// The seed of its random stream.
    pub seed: u64,
    /// Where the time went.
    pub timings: Timings,
    /// Tokens drafted and accepted.
    pub speculation: SpeculationStats,
}

/// What a step brought.
#[derive(Debug)]
pub enum Event {
    /// A request has a new token.
    Token(RequestId, NewToken),
    /// A request ended well; its last token came before.
    Finished(RequestId, Finished),
    /// A request ended by an error; the others go on.
    Failed(RequestId, RequestError),
}
