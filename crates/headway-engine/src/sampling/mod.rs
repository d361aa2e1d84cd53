//! Sampling: from one row of logits to the next token. No tensors; a device that chooses tokens itself
//! (`headway_tensor::RowSampler`) does what [`Sampler`] does, and [`DeviceChoices`] says of which rows.
//!
//! Lifetime: a [`Sampler`] is scratch memory that lives as long as the thread that uses it; it keeps nothing from one
//! row to the next. A row's token depends on its logits, its own tokens, its parameters, its seed and its position only,
//! so it is the same alone and in any batch.
//!
//! The order of operations is vLLM's: bias, repetition, frequency and presence penalty, tokens that may not follow left out
//! (by a grammar, or because the answer is too short to end), then (greedy ends here) temperature, min-p, top-k, top-p, and
//! one draw from what is left.
//!
//! Not for stop strings, which need text. Grammars are a caller's ([`Constraint`]).

mod constraint;
mod error;
mod logprobs;
mod on_device;
mod params;
mod penalties;
mod random;
mod sampler;
mod select;
mod softmax;

#[cfg(test)]
mod tests;

pub use constraint::Constraint;
pub use error::{ParamsError, SamplingError};
pub use logprobs::{Logprobs, TokenLogprob, logprobs};
pub use on_device::DeviceChoices;
pub use params::{MAX_LOGPROBS, SamplingParams};
pub use random::{fresh_seed, uniform};
pub use sampler::{Row, Sampled, Sampler};
