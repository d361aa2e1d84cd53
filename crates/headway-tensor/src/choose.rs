//! Choosing tokens where the logits lie. A device that can do it offers a [`RowSampler`]; what it can't do of a row's
//! wishes, and rows that nothing can be chosen from, are the host's.

use crate::{Exec, Result, TensorMut};
use std::any::Any;

/// How the token that follows one row of logits is chosen: as the host's sampler does, in the same arithmetic. The order
/// is repetition penalty, (greedy ends here) top-k, temperature, min-p, top-p, one draw from what is left.
#[derive(Clone, Copy, Debug)]
pub struct RowChoice<'a> {
    /// Which row of the logits.
    pub row: usize,
    /// 0: the most likely token, the first of several.
    pub temperature: f32,
    /// Tokens to keep; 0 keeps all. Of equal logits those of lower ids.
    pub top_k: usize,
    /// The fewest most likely tokens whose probabilities reach this sum are kept; 1 keeps all.
    pub top_p: f32,
    /// Tokens at least this fraction as likely as the most likely one are kept.
    pub min_p: f32,
    /// Logits of tokens in `history` are divided by it where positive and multiplied where not; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Tokens that are penalised, in two parts.
    pub history: [&'a [u32]; 2],
    /// The random number of `[0, 1)` that decides.
    pub uniform: f64,
}

/// Chooses tokens from rows of logits on its device. Its buffers live as long as the model; a step allocates nothing.
pub trait RowSampler: Any {
    /// Adds a row to the next [`RowSampler::choose`]. `false`: it is none for the device (a token of the history outside
    /// the vocabulary, more rows than there are buffers for), and was not added.
    fn push(&mut self, choice: &RowChoice<'_>) -> bool;

    /// Chooses from the rows that were added, after everything that was queued, and waits for it. `tokens` receives one
    /// entry each, in the order of [`RowSampler::push`]; `None`: the row has no answer (NaN, infinity, nothing
    /// possible), and is as it was. The other rows' logits are overwritten. Nothing is added any more afterwards.
    ///
    /// # Errors
    /// Logits of another shape, type or device; the device's own.
    fn choose(&mut self, cx: &dyn Exec, logits: TensorMut<'_>, tokens: &mut Vec<Option<u32>>) -> Result<()>;

    /// Forgets the rows that were added.
    fn clear(&mut self);

    /// Bytes of the device's memory that it holds.
    fn bytes(&self) -> usize;
}
