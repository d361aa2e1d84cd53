//! [`verify`]: which of the drafted tokens stand, and the token after them.

use crate::sampling::{Row, Sampled, Sampler, SamplingError};

/// Samples the positions of one request in order, out of `logits`, `[1 + drafts.len(), vocab_size]`: row `i` follows
/// `row.tokens` and the first `i` drafts. Goes on to the next row while the sampled token is the drafted one and `take`,
/// which is given every token that counts, returns `true`; `look` sees each row before it is sampled from. Returns how
/// many tokens were sampled; all but the last are drafted ones.
///
/// Each token is drawn as plain decoding draws it: from the processed distribution `p` after the right history, with
/// the random number of its seed and position. So the answer is that of plain decoding, token for token, as far as the
/// rows are the same. It is also rejection sampling. That accepts a draft `x` from a distribution `q` with probability
/// min(1, p(x) / q(x)) and otherwise draws from what is left of `p`, max(0, p - q) normalised. Prompt lookup is sure of
/// its draft: `q(x)` is 1. Then `x` is accepted with probability `p(x)`, and what is left is `p` without `x`. A token
/// drawn from `p` is `x` with probability `p(x)`, and where it is not `x` it is distributed as `p` without `x`: one draw
/// is the test and, where the draft fails, the token that takes its place.
///
/// # Errors
/// A row that can't be sampled from; the tokens before it were taken.
pub fn verify(
    sampler: &mut Sampler,
    logits: &mut [f32],
    row: &Row<'_>,
    drafts: &[u32],
    mut look: impl FnMut(&[f32]),
    take: impl FnMut(Sampled) -> bool,
) -> Result<usize, SamplingError> {
    let vocab_size = logits.len() / (1 + drafts.len());
    if vocab_size == 0 {
        return Err(SamplingError::Empty);
    }
    let sample = |i: usize| {
        let logits = &mut logits[i * vocab_size..(i + 1) * vocab_size];
        look(logits);
        sampler.sample(logits, &Row { drafted: &drafts[..i], ..*row })
    };
    verify_by(drafts, sample, take)
}

/// As [`verify`], with tokens that `sample` gives: that of row `i`, as sampled after `row.tokens` and the first `i`
/// drafts.
///
/// # Errors
/// As `sample`; the tokens before it were taken.
pub fn verify_by<E>(
    drafts: &[u32],
    mut sample: impl FnMut(usize) -> Result<Sampled, E>,
    mut take: impl FnMut(Sampled) -> bool,
) -> Result<usize, E> {
    for i in 0..=drafts.len() {
        let found = sample(i)?;
        let stands = drafts.get(i) == Some(&found.token);
        if !take(found) || !stands {
            return Ok(i + 1);
        }
    }
    Ok(1 + drafts.len())
}
