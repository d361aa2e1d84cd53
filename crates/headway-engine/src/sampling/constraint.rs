//! [`Constraint`]: what a request lets its answer be, beyond stop strings: a grammar, and how far the answer has come
//! in it. Implemented outside the engine, which only asks which tokens may follow.
//!
//! Lifetime: one request.

use super::sampler::Row;
use std::fmt::Debug;

/// Which tokens may follow.
///
/// The engine asks before each token and tells which one was taken. Drafts are not made for such requests.
pub trait Constraint: Debug + Send {
    /// Bits of the tokens that may follow now, 32 a word, the lowest id in the lowest bit; tokens beyond the last word
    /// may not. Where the answer is complete, those are the model's end-of-sequence tokens.
    ///
    /// # Errors
    /// Why the grammar can't go on; the request ends with it.
    fn allowed(&mut self) -> Result<&[u32], String>;

    /// Takes note of the token that was chosen among them.
    ///
    /// # Errors
    /// Why it does not fit; the request ends with it.
    fn accept(&mut self, token: u32) -> Result<(), String>;

    /// A copy in the same state.
    fn boxed_clone(&self) -> Box<dyn Constraint>;
}

impl Clone for Box<dyn Constraint> {
    fn clone(&self) -> Self {
        self.boxed_clone()
    }
}

/// Whether a token's bit is set.
fn is_allowed(allowed: &[u32], token: usize) -> bool {
    allowed.get(token / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// Makes the logits of tokens that may not follow minus infinity; the most likely of the others.
pub(super) fn mask(logits: &mut [f32], allowed: &[u32]) -> f32 {
    let mut max = f32::NEG_INFINITY;
    for (token, logit) in logits.iter_mut().enumerate() {
        match is_allowed(allowed, token) {
            true => max = max.max(*logit),
            false => *logit = f32::NEG_INFINITY,
        }
    }
    max
}

/// Leaves out the tokens that would end the answer, and returns the most likely of the others. Where there are no others
/// they stay: the answer is complete.
pub(super) fn hold_open(logits: &mut [f32], max: f32, row: &Row<'_>) -> f32 {
    let ends = row.eos_ids.iter().chain(&row.params.stop_token_ids);
    let mut were = vec![];
    for &token in ends {
        if let Some(logit) = logits.get_mut(token as usize) {
            were.push((token, std::mem::replace(logit, f32::NEG_INFINITY)));
        }
    }
    let others = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if others > f32::NEG_INFINITY {
        return others;
    }
    // Backwards: a token that is in both lists was replaced twice.
    were.into_iter().rev().for_each(|(token, logit)| logits[token as usize] = logit);
    max
}
