//! The part of a step's inputs and of a group's metadata that a micro-batch gets.

use super::MicroBatchSlice;
use crate::{
    AttentionError, Result,
    step::common::{CommonAttentionMetadata, StepInputs},
};
use headway_tensor::{Exec, Persistent};
use std::{ops::Range, sync::Arc};

/// `query_start_loc` of some of the requests, from 0.
pub fn slice_query_start_loc(query_start_loc: &[i32], requests: Range<usize>) -> Vec<i32> {
    let of = query_start_loc.get(requests.start..=requests.end).unwrap_or(&[]);
    of.iter().map(|q| q - of[0]).collect()
}

/// Where a micro-batch's own values are written: addresses that stay from step to step.
pub struct SliceBuffers {
    query_start_loc: Persistent<i32>,
    seq_lens: Persistent<i32>,
}

impl SliceBuffers {
    /// Buffers for at most so many requests.
    ///
    /// # Errors
    /// No memory.
    pub fn new(cx: &dyn Exec, max_num_reqs: usize) -> Result<Self> {
        Ok(Self {
            query_start_loc: Persistent::new(cx, max_num_reqs + 1)?,
            seq_lens: Persistent::new(cx, max_num_reqs)?,
        })
    }

    /// Bytes of buffers for at most so many requests.
    pub const fn bytes(max_num_reqs: usize) -> usize {
        (2 * max_num_reqs + 1) * size_of::<i32>()
    }

    /// How often a view of an earlier step that was still alive forced fresh memory to be allocated.
    pub fn reallocs(&self) -> usize {
        self.query_start_loc.reallocs() + self.seq_lens.reallocs()
    }
}

/// The slice's bounds inside the batch.
struct Cut {
    requests: Range<usize>,
    tokens: Range<usize>,
    query_start_loc: Vec<i32>,
    /// Tokens of the last request that come after the slice.
    after: i32,
}

fn cut(inputs: &StepInputs, slice: &MicroBatchSlice) -> Result<Cut> {
    let q = inputs.query_start_loc.host();
    let (requests, tokens) = (slice.requests.clone(), slice.tokens.clone());
    if requests.start >= requests.end
        || requests.end > inputs.num_reqs
        || tokens.end > inputs.num_actual_tokens
    {
        return Err(AttentionError::Inputs(format!(
            "a micro-batch of requests {requests:?} and tokens {tokens:?} is not inside a batch of {} requests and \
             {} tokens",
            inputs.num_reqs, inputs.num_actual_tokens
        )));
    }
    let (first, last) = (tokens.start as i32, tokens.end as i32);
    let clamp = |x: i32| x.clamp(first, last) - first;
    let query_start_loc: Vec<i32> = q[requests.start..=requests.end].iter().map(|&x| clamp(x)).collect();
    let after = (q[requests.end] - last).max(0);
    Ok(Cut { requests, tokens, query_start_loc, after })
}

/// Whether a row of the slice sees a key that comes after the slice, which isn't written when the slice runs: the slice
/// ends inside a request that is not causal, or inside a range that sees both ways. Such a step has to run whole.
pub fn sees_past(common: &CommonAttentionMetadata, slice: &MicroBatchSlice) -> bool {
    let (inputs, end) = (&common.inputs, slice.tokens.end);
    let starts = inputs.query_start_loc.host();
    let Some(last) = slice.requests.end.checked_sub(1).filter(|r| r + 1 < starts.len()) else { return false };
    let after = starts[last + 1] - end as i32;
    if after <= 0 {
        return false;
    }
    let position = inputs.seq_lens_upper_bound[last] - after;
    !common.causal().of(last) || ranges_around(inputs, last, position).is_some()
}

/// A request's range that begins before the position and ends after it.
fn ranges_around(inputs: &StepInputs, request: usize, position: i32) -> Option<&Range<usize>> {
    let ranges = inputs.mm_prefix_ranges.as_ref().and_then(|r| r.get(request))?;
    let at = usize::try_from(position).unwrap_or(0);
    ranges.iter().find(|r| r.start < at && at < r.end)
}

/// The step's inputs of a micro-batch. Every field has a rule here: a new one does not compile without.
///
/// # Errors
/// A slice outside the batch; a cut inside a request whose exact length only the device knows, or inside a range that
/// sees both ways.
pub fn slice_inputs(
    inputs: &StepInputs,
    slice: &MicroBatchSlice,
    buffers: &mut SliceBuffers,
    cx: &dyn Exec,
) -> Result<StepInputs> {
    let c = cut(inputs, slice)?;
    let StepInputs {
        query_start_loc: _,
        seq_lens,
        seq_lens_upper_bound,
        num_reqs: _,
        num_actual_tokens: _,
        max_query_len: _,
        max_seq_len,
        causal,
        positions,
        is_prefilling,
        request_index,
        dcp_local_seq_lens,
        dcp_local_seq_lens_upper_bound,
        mm_prefix_ranges,
        rswa_prefix_lens,
        encoder_seq_lens,
        logits_indices,
        extras,
        token_to_req: _,
        computed: _,
    } = inputs;
    let (r, t) = (c.requests.clone(), c.tokens.clone());
    let n = r.len();
    let shorten = |lens: &[i32]| {
        let mut lens = lens[r.clone()].to_vec();
        if let Some(last) = lens.last_mut() {
            *last -= c.after;
        }
        lens
    };
    let bound = shorten(seq_lens_upper_bound);
    let lens = if c.after == 0 {
        seq_lens.slice(r.clone())
    } else {
        let exact = seq_lens.host().map(&shorten).ok_or_else(|| {
            AttentionError::Inputs(
                "a micro-batch ends inside a request whose length only the device knows".into(),
            )
        })?;
        buffers.seq_lens.write(cx, n, |o| o.copy_from_slice(&exact))
    };
    let starts = buffers.query_start_loc.write_dual(cx, n + 1, |o| o.copy_from_slice(&c.query_start_loc));
    let mut out = StepInputs::new(starts, lens, bound)?;
    out.num_actual_tokens = t.len();
    out.max_seq_len = *max_seq_len;
    out.causal = causal.slice(r.clone());
    out.positions = positions.as_ref().map(|p| p.slice(t.clone()));
    out.is_prefilling = is_prefilling.as_ref().map(|p| p[r.clone()].to_vec());
    out.request_index = request_index.as_ref().map(|p| p[r.clone()].to_vec());
    out.dcp_local_seq_lens = dcp_local_seq_lens.as_ref().map(|v| v.slice(r.clone()));
    out.dcp_local_seq_lens_upper_bound =
        dcp_local_seq_lens_upper_bound.as_ref().map(|v| v[r.clone()].to_vec());
    out.mm_prefix_ranges = mm_prefix_ranges.as_ref().map(|v| v[r.clone()].to_vec());
    if c.after > 0 {
        let (last, len) = (r.end - 1, out.seq_lens_upper_bound[n - 1]);
        if let Some(range) = ranges_around(inputs, last, len) {
            return Err(AttentionError::Inputs(format!(
                "a micro-batch ends at position {len} of a request, inside the range {range:?} that sees both ways"
            )));
        }
        // What begins after the part's tokens is for the next part.
        let ranges = out.mm_prefix_ranges.as_mut().and_then(|v| v.last_mut());
        ranges.into_iter().for_each(|v| v.retain(|range| range.end as i64 <= i64::from(len)));
    }
    out.rswa_prefix_lens = rswa_prefix_lens.as_ref().map(|v| v.slice(r.clone()));
    out.encoder_seq_lens = encoder_seq_lens.as_ref().map(|v| v.slice(r.clone()));
    // Indices of all micro-batches' tokens; those of one are found by the model, which knows the tokens.
    out.logits_indices = logits_indices.clone();
    out.extras = extras.clone();
    Ok(out)
}

/// A group's metadata of a micro-batch, over the micro-batch's inputs.
///
/// # Errors
/// A cut inside a request that isn't causal; as [`CommonAttentionMetadata::new`].
pub fn slice_common(
    common: &CommonAttentionMetadata,
    slice: &MicroBatchSlice,
    inputs: Arc<StepInputs>,
) -> Result<CommonAttentionMetadata> {
    let CommonAttentionMetadata {
        inputs: _,
        block_table,
        block_table_stride,
        slot_mapping,
        is_prefilling_override,
        causal_override,
        hints,
        // Of all micro-batches' tokens: that of one is made of its part.
        fast_prefill: _,
        extras,
    } = common;
    let s = *block_table_stride;
    let r = slice.requests.clone();
    if sees_past(common, slice) {
        return Err(AttentionError::Inputs(format!(
            "the micro-batch {slice:?} ends inside a request whose tokens see those after it"
        )));
    }
    if r.end * s > block_table.len() || slice.tokens.end > slot_mapping.len() {
        return Err(AttentionError::Inputs(format!(
            "the micro-batch {slice:?} ends past its group's block table"
        )));
    }
    let table = block_table.slice(r.start * s..r.end * s);
    let mut out = CommonAttentionMetadata::new(inputs, table, s, slot_mapping.slice(slice.tokens.clone()))?;
    out.is_prefilling_override = is_prefilling_override.as_ref().map(|p| p[r.clone()].to_vec());
    out.causal_override = causal_override.as_ref().map(|c| c.slice(r));
    out.hints = *hints;
    out.extras = extras.clone();
    Ok(out)
}

impl CommonAttentionMetadata {
    /// The metadata without padding: the first `num_reqs` requests and `num_tokens` tokens. Lengths'
    /// maxima stay.
    ///
    /// # Errors
    /// More requests or tokens than there are.
    pub fn unpadded(&self, num_reqs: usize, num_tokens: usize) -> Result<Self> {
        let inputs = self.inputs.unpadded(num_reqs, num_tokens)?;
        let slice = MicroBatchSlice { requests: 0..num_reqs, tokens: 0..num_tokens };
        slice_common(self, &slice, Arc::new(inputs))
    }
}

impl StepInputs {
    /// The inputs without padding; see [`CommonAttentionMetadata::unpadded`]. Shares all memory.
    ///
    /// # Errors
    /// More requests or tokens than there are.
    pub fn unpadded(&self, num_reqs: usize, num_tokens: usize) -> Result<Self> {
        if num_reqs > self.num_reqs || num_tokens > self.num_actual_tokens {
            return Err(AttentionError::Inputs(format!(
                "{num_reqs} requests and {num_tokens} tokens are not inside a batch of {} and {}",
                self.num_reqs, self.num_actual_tokens
            )));
        }
        let Self {
            query_start_loc,
            seq_lens,
            seq_lens_upper_bound,
            num_reqs: _,
            num_actual_tokens: _,
            max_query_len,
            max_seq_len,
            causal,
            positions,
            is_prefilling,
            request_index,
            dcp_local_seq_lens,
            dcp_local_seq_lens_upper_bound,
            mm_prefix_ranges,
            rswa_prefix_lens,
            encoder_seq_lens,
            logits_indices,
            extras,
            token_to_req: _,
            computed: _,
        } = self;
        let (r, t) = (0..num_reqs, 0..num_tokens);
        let mut out = Self::new(
            query_start_loc.slice(0..num_reqs + 1),
            seq_lens.slice(r.clone()),
            seq_lens_upper_bound[r.clone()].to_vec(),
        )?;
        out.num_actual_tokens = num_tokens;
        out.max_query_len = *max_query_len;
        out.max_seq_len = *max_seq_len;
        out.causal = causal.slice(r.clone());
        out.positions = positions.as_ref().map(|p| p.slice(t));
        out.is_prefilling = is_prefilling.as_ref().map(|p| p[r.clone()].to_vec());
        out.request_index = request_index.as_ref().map(|p| p[r.clone()].to_vec());
        out.dcp_local_seq_lens = dcp_local_seq_lens.as_ref().map(|v| v.slice(r.clone()));
        out.dcp_local_seq_lens_upper_bound =
            dcp_local_seq_lens_upper_bound.as_ref().map(|v| v[r.clone()].to_vec());
        out.mm_prefix_ranges = mm_prefix_ranges.as_ref().map(|v| v[r.clone()].to_vec());
        out.rswa_prefix_lens = rswa_prefix_lens.as_ref().map(|v| v.slice(r.clone()));
        out.encoder_seq_lens = encoder_seq_lens.as_ref().map(|v| v.slice(r.clone()));
        out.logits_indices = logits_indices.clone();
        out.extras = extras.clone();
        Ok(out)
    }
}
