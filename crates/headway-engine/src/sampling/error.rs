//! What sampling refuses: parameters out of range, and logits that are no logits.

/// A sampling option that is out of range; names the option, the range and the value.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{option} must be {range}, got {got}")]
pub struct ParamsError {
    /// The option, by its command-line name.
    pub option: &'static str,
    /// The values it takes.
    pub range: &'static str,
    /// The value given.
    pub got: String,
}

/// Why no token could be sampled from a row. Ends that request only.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SamplingError {
    /// The row is empty.
    #[error("no logits to sample from: the vocabulary is empty")]
    Empty,
    /// The model produced NaN.
    #[error(
        "{count} of {vocab_size} logits are NaN, the first of token {token_id}: the model's numbers broke down; try \
         --dtype float32 and check the weights"
    )]
    Nan {
        /// The first token with a NaN logit.
        token_id: usize,
        /// How many there are.
        count: usize,
        /// Logits in the row.
        vocab_size: usize,
    },
    /// A logit of plus infinity: no softmax exists.
    #[error(
        "the logit of token {token_id} is infinite: the model's numbers overflowed; try --dtype float32 and check the weights"
    )]
    Infinite {
        /// The first such token.
        token_id: usize,
    },
    /// Every logit is minus infinity.
    #[error("all {vocab_size} logits are minus infinity: no token can follow")]
    NothingPossible {
        /// Logits in the row.
        vocab_size: usize,
    },
    /// A token of the request is outside the row.
    #[error("token {token_id} of the request is outside the vocabulary of {vocab_size}")]
    TokenOutOfRange {
        /// The token.
        token_id: u32,
        /// Logits in the row.
        vocab_size: usize,
    },
}
