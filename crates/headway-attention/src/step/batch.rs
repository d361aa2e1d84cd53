//! Lifetime: one step. How a batch divides: decodes, extends and prefills; the order that puts decodes
//! first; chunks of prefills; chunks of local attention. Pure arithmetic on host lengths.

use crate::{AttentionError, CommonAttentionMetadata, DecodeSplit, Result};
use std::ops::Range;

/// What counts as a decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitOptions {
    /// Most new tokens of a decode.
    pub threshold: usize,
    /// All decodes have the same number of new tokens.
    pub require_uniform: bool,
    /// The last piece of a chunked prefill may pass for a decode where it is as short.
    pub short_extends_as_decodes: bool,
}

impl Default for SplitOptions {
    fn default() -> Self {
        Self { threshold: 1, require_uniform: false, short_extends_as_decodes: true }
    }
}

/// The two parts of a batch whose decodes come first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchSplit {
    /// Requests that decode.
    pub decodes: usize,
    /// Requests that prefill.
    pub prefills: usize,
    /// New tokens of the decodes.
    pub decode_tokens: usize,
    /// New tokens of the prefills, padding included.
    pub prefill_tokens: usize,
}

impl From<BatchSplit> for DecodeSplit {
    fn from(s: BatchSplit) -> Self {
        Self { decodes: s.decodes, decode_tokens: s.decode_tokens }
    }
}

fn lens(query_start_loc: &[i32]) -> impl Iterator<Item = usize> + Clone + '_ {
    query_start_loc.windows(2).map(|w| usize::try_from(w[1] - w[0]).unwrap_or(0))
}

fn at(query_start_loc: &[i32], request: usize) -> usize {
    query_start_loc.get(request).map_or(0, |&q| usize::try_from(q).unwrap_or(0))
}

/// Splits a batch, taken in the order it is in, into decodes and prefills. `num_tokens` may exceed the
/// requests' new tokens (padding); `max_query_len` is what the batch claims.
///
/// # Errors
/// Short extends are to be told from decodes, and nothing says which requests still prefill.
pub fn split_decodes_and_prefills(
    query_start_loc: &[i32],
    num_tokens: usize,
    max_query_len: usize,
    is_prefilling: Option<&[bool]>,
    options: &SplitOptions,
) -> Result<BatchSplit> {
    if !options.short_extends_as_decodes && is_prefilling.is_none() {
        return Err(AttentionError::Inputs(
            "short extends count as prefills, but is_prefilling is not set".into(),
        ));
    }
    let n = query_start_loc.len().saturating_sub(1);
    let all_decode = BatchSplit { decodes: n, decode_tokens: num_tokens, ..BatchSplit::default() };
    let short = max_query_len <= options.threshold && (!options.require_uniform || options.threshold <= 1);
    if short && options.short_extends_as_decodes {
        return Ok(all_decode);
    }
    let lens = lens(query_start_loc);
    let first = lens.clone().next().unwrap_or(0);
    if first > options.threshold {
        return Ok(BatchSplit { prefills: n, prefill_tokens: num_tokens, ..BatchSplit::default() });
    }
    // Rows without new tokens are padding.
    let prefills = |r: usize, len: usize| {
        let long = if options.require_uniform { len != first && len != 0 } else { len > options.threshold };
        let still =
            !options.short_extends_as_decodes && is_prefilling.is_some_and(|p| p.get(r) == Some(&true));
        long || still
    };
    let Some(decodes) = lens.enumerate().position(|(r, len)| prefills(r, len)) else { return Ok(all_decode) };
    let decode_tokens = at(query_start_loc, decodes);
    Ok(BatchSplit {
        decodes,
        prefills: n - decodes,
        decode_tokens,
        prefill_tokens: num_tokens - decode_tokens,
    })
}

/// The three parts of a batch: decodes, extends (above the threshold, with context), prefills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreeWaySplit {
    /// Requests that decode.
    pub decodes: usize,
    /// Requests above the threshold with context.
    pub extends: usize,
    /// Requests above the threshold without context.
    pub prefills: usize,
    /// New tokens of the decodes.
    pub decode_tokens: usize,
    /// New tokens of the extends.
    pub extend_tokens: usize,
    /// New tokens of the prefills.
    pub prefill_tokens: usize,
}

/// Splits a batch, taken in the order it is in, into decodes, extends and prefills.
pub fn split_decodes_prefills_and_extends(
    query_start_loc: &[i32],
    seq_lens: &[i32],
    num_tokens: usize,
    max_query_len: usize,
    threshold: usize,
) -> ThreeWaySplit {
    let n = query_start_loc.len().saturating_sub(1);
    let lens = lens(query_start_loc);
    let not_decode = lens.clone().position(|l| l > threshold);
    let Some(decodes) = not_decode.filter(|_| max_query_len > threshold) else {
        return ThreeWaySplit { decodes: n, decode_tokens: num_tokens, ..ThreeWaySplit::default() };
    };
    let whole = |(len, &seq): (usize, &i32)| len > threshold && i32::try_from(len) == Ok(seq);
    let first_prefill = lens.zip(seq_lens).position(whole).unwrap_or(n);
    let decode_tokens = at(query_start_loc, decodes);
    let until_prefill = if first_prefill == n { num_tokens } else { at(query_start_loc, first_prefill) };
    ThreeWaySplit {
        decodes,
        extends: first_prefill - decodes,
        prefills: n - first_prefill,
        decode_tokens,
        extend_tokens: until_prefill - decode_tokens,
        prefill_tokens: num_tokens - until_prefill,
    }
}

/// Greedy chunks of requests whose sequence lengths fit a workspace together, in tokens. Indices begin
/// at `first_request`.
///
/// # Errors
/// A request longer than the workspace.
pub fn split_prefill_chunks(
    seq_lens: &[i32],
    workspace: usize,
    first_request: usize,
) -> Result<Vec<Range<usize>>> {
    let mut chunks = vec![];
    let (mut start, mut used) = (0, 0usize);
    for (i, &len) in seq_lens.iter().enumerate() {
        let len = usize::try_from(len).unwrap_or(0);
        if len > workspace {
            return Err(AttentionError::Inputs(format!(
                "a sequence of {len} tokens doesn't fit the prefill workspace of {workspace}"
            )));
        }
        if i > start && used + len > workspace {
            chunks.push(first_request + start..first_request + i);
            (start, used) = (i, 0);
        }
        used += len;
    }
    if start < seq_lens.len() {
        chunks.push(first_request + start..first_request + seq_lens.len());
    }
    Ok(chunks)
}

/// Reorders a batch: decodes, then short extends, long extends, prefills, with as few moves as a stable
/// order inside each part allows. Returns the pairs of rows to exchange, in order; empty: it is in order.
pub fn reorder_batch(
    num_scheduled_tokens: &[usize],
    num_computed_tokens: &[usize],
    num_prompt_tokens: &[usize],
    threshold: usize,
) -> Vec<(usize, usize)> {
    let part = |i: usize| {
        let (scheduled, computed) = (num_scheduled_tokens[i], num_computed_tokens[i]);
        match (computed > 0, scheduled <= threshold, computed >= num_prompt_tokens[i]) {
            (false, ..) => 3u8,
            (true, false, _) => 2,
            (true, true, false) => 1,
            (true, true, true) => 0,
        }
    };
    let n = num_scheduled_tokens.len().min(num_computed_tokens.len()).min(num_prompt_tokens.len());
    let parts: Vec<u8> = (0..n).map(part).collect();
    let mut target = parts.clone();
    target.sort_unstable();
    let wrong: Vec<usize> = (0..n).filter(|&i| parts[i] != target[i]).collect();
    let mut sources = wrong.clone();
    sources.sort_by_key(|&i| parts[i]);
    // Row `source` goes to place `wrong[k]`; follow each cycle by exchanges.
    let mut destination: Vec<usize> = (0..n).collect();
    for (&from, &to) in sources.iter().zip(&wrong) {
        destination[from] = to;
    }
    let mut swaps = vec![];
    for &from in &sources {
        let mut to = destination[from];
        while from != to {
            swaps.push((from, to));
            to = std::mem::replace(&mut destination[to], to);
        }
        destination[from] = from;
    }
    swaps
}

/// Order of a batch by what its requests do this step: those with drafts to verify first, then those
/// without; inside each, requests of exactly a decode's new tokens first, then by rising number of new
/// tokens. `order[i]` is the request now at row i.
pub fn sort_batch(num_tokens: &[usize], num_draft_tokens: &[usize], decode_query_len: usize) -> Vec<usize> {
    let drafts = |i: usize| num_draft_tokens.get(i).is_some_and(|&d| d > 0);
    let mut order: Vec<usize> = (0..num_tokens.len()).collect();
    order.sort_by_key(|&i| (!drafts(i), num_tokens[i] != decode_query_len, num_tokens[i]));
    order
}

/// The number of new tokens that every request has, where the batch can run as a graph of uniform decodes.
pub fn uniform_decode_token_count(num_reqs: usize, num_tokens: usize, max_query_len: usize) -> Option<usize> {
    (num_reqs > 0 && max_query_len > 0 && num_tokens == num_reqs * max_query_len).then_some(max_query_len)
}

impl CommonAttentionMetadata {
    /// [`split_decodes_and_prefills`] of this batch; the group's own `is_prefilling` wins.
    ///
    /// # Errors
    /// As there.
    pub fn split(&self, options: &SplitOptions) -> Result<BatchSplit> {
        let i = &self.inputs;
        split_decodes_and_prefills(
            i.query_start_loc.host(),
            i.num_actual_tokens,
            i.max_query_len,
            self.is_prefilling(),
            options,
        )
    }
}
