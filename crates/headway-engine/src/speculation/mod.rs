//! Speculative decoding: tokens are guessed cheaply, and one step of the model checks several guesses at once.
//!
//! A step of a decoding request takes its last token and up to K drafted ones as query tokens, so that it yields the
//! logits of 1 + K positions. [`verify`] samples position after position and goes on as long as the sampled token is
//! the drafted one. The keys and values of tokens that were not accepted stay where they are: the next step writes the
//! same slots again, and no block is hashed before the accepted tokens fill it.
//!
//! Requests with fewer drafts have fewer rows: the batch is ragged, because attention on the CPU costs what its rows
//! cost, and a padded row would be computed for nothing. At most 1 + K rows of a request are a decode to a builder with
//! a reorder threshold, which start-up checks.
//!
//! The drafter is [`PromptLookup`]: it finds the request's last tokens earlier in the request and proposes what came
//! after them. It needs no second model, and pays where answers repeat their prompt or themselves.
//!
//! Lifetime: a drafter belongs to a request, statistics to a request or the engine. Not for planning, which the
//! scheduler does (`scheduler/drafts.rs`).

mod lookup;
mod stats;
mod verify;

#[cfg(test)]
mod tests;

pub use lookup::{LookupSizes, PromptLookup};
pub use stats::{SpeculationStats, SpeculationSummary};
pub use verify::{verify, verify_by};
