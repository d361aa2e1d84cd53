//! Lifetime: one step. Micro-batches: where a batch is cut, and the part of the metadata that each gets
//! ([`slice_inputs`], [`slice_common`]).

mod part;

pub use part::{SliceBuffers, sees_past, slice_common, slice_inputs, slice_query_start_loc};

use super::{batch::uniform_decode_token_count, common::StepInputs};
use crate::{AttentionError, Result, group::graph::MicroBatching};
use std::ops::Range;

/// A micro-batch: half-open ranges of requests and of tokens. A request may lie in two of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MicroBatchSlice {
    /// Requests.
    pub requests: Range<usize>,
    /// Tokens.
    pub tokens: Range<usize>,
}

/// Whether a batch is worth cutting.
pub fn exceeds_threshold(uniform_decode: bool, num_tokens: usize, decode: usize, prefill: usize) -> bool {
    num_tokens >= if uniform_decode { decode } else { prefill }
}

/// Whether equal parts of the padded tokens leave nothing but padding for the last micro-batch.
pub fn last_is_empty(num_tokens: usize, num_tokens_padded: usize, num_micro_batches: usize) -> bool {
    let n = num_micro_batches.max(1);
    (num_tokens_padded / n) * (n - 1) >= num_tokens
}

/// Cuts a batch into micro-batches before the tokens in `points` (rising). Each slice holds the requests
/// that have a token in it.
///
/// # Errors
/// Another number of points than cuts.
pub fn slices(
    num_scheduled_tokens: &[usize],
    points: &[usize],
    num_micro_batches: usize,
) -> Result<Vec<MicroBatchSlice>> {
    if points.len() + 1 != num_micro_batches {
        return Err(AttentionError::Inputs(format!(
            "the split points {points:?} don't make {num_micro_batches} micro-batches"
        )));
    }
    Ok(cut_at(num_scheduled_tokens, points))
}

fn cut_at(num_scheduled_tokens: &[usize], points: &[usize]) -> Vec<MicroBatchSlice> {
    let mut ends = vec![0];
    for n in num_scheduled_tokens {
        ends.push(ends[ends.len() - 1] + n);
    }
    let total = ends[ends.len() - 1];
    let mut out = vec![];
    let mut start = 0;
    for end in points.iter().copied().chain([total]) {
        // The last request that begins at or before `start`; the first that ends at or after `end`.
        let first = ends.partition_point(|&e| e <= start).saturating_sub(1);
        let last = ends.partition_point(|&e| e < end);
        out.push(MicroBatchSlice { requests: first..last, tokens: start..end });
        start = end;
    }
    out
}

/// Points that cut so many tokens into equal parts.
pub fn equal_points(num_tokens_padded: usize, num_micro_batches: usize) -> Vec<usize> {
    let n = num_micro_batches.max(1);
    (1..n).map(|i| i * (num_tokens_padded / n)).collect()
}

/// The slices with the last one widened over the padding.
pub fn pad_last(
    mut slices: Vec<MicroBatchSlice>,
    num_tokens_padded: usize,
    num_reqs_padded: usize,
) -> Vec<MicroBatchSlice> {
    if let Some(last) = slices.last_mut() {
        last.tokens.end = num_tokens_padded;
        last.requests.end = num_reqs_padded;
    }
    slices
}

/// Equal parts of the padded tokens. A request lies in every slice that holds a token of it; a slice of
/// padding alone holds the last request, and the padding's rows lie in the last slice.
pub fn slices_of_padded(
    query_lens: &[usize],
    num_tokens_padded: usize,
    num_reqs_padded: usize,
    num_micro_batches: usize,
) -> Vec<MicroBatchSlice> {
    let points = equal_points(num_tokens_padded, num_micro_batches);
    let mut slices = pad_last(cut_at(query_lens, &points), num_tokens_padded, num_reqs_padded);
    for s in &mut slices {
        s.requests.start = s.requests.start.min(query_lens.len().saturating_sub(1));
        s.requests.end = s.requests.end.min(num_reqs_padded);
    }
    slices
}

impl MicroBatching {
    /// How a step without padding is cut: equal parts of its tokens. `None`: it runs whole, because it has too few
    /// tokens. A batch counts as decodes where no request prefills and all have the same number of new tokens.
    pub fn cut(&self, inputs: &StepInputs) -> Option<Vec<MicroBatchSlice>> {
        let (reqs, tokens, n) = (inputs.num_reqs, inputs.num_actual_tokens, self.num_micro_batches);
        let prefills = inputs.is_prefilling.as_ref().is_none_or(|p| p.contains(&true));
        let uniform = uniform_decode_token_count(reqs, tokens, inputs.max_query_len).is_some() && !prefills;
        let (decode, prefill) = (self.decode_token_threshold, self.prefill_token_threshold);
        if n < 2 || tokens < n || !exceeds_threshold(uniform, tokens, decode, prefill) {
            return None;
        }
        let query_lens: Vec<usize> = (0..reqs).map(|r| inputs.query_len(r)).collect();
        Some(slices_of_padded(&query_lens, tokens, reqs, n))
    }
}
