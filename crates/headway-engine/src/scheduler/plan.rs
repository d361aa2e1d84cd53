//! [`StepPlan`]: what one step computes.
//!
//! Lifetime: one step; the caller keeps the value and its buffers are used again. Not for block tables, which stay with
//! the KV cache manager ([`super::Scheduler::block_table`]).

use std::{ops::Range, sync::Arc};

use super::RequestId;

/// The kind of a request within a step, in the order that a builder with a reorder threshold asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BatchClass {
    /// Not prefilling, at most the threshold's query tokens.
    Decode,
    /// Prefilling with tokens before it in the cache, at most the threshold's query tokens.
    ShortExtend,
    /// Tokens before it in the cache, more query tokens than the threshold.
    LongExtend,
    /// Nothing in the cache before it.
    Prefill,
}

/// One request of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduledRequest {
    /// The request.
    pub id: RequestId,
    /// Tokens already in the KV cache: the position of the first query token.
    pub num_computed_tokens: usize,
    /// Query tokens of this step, at least 1, the drafted ones included.
    pub num_new_tokens: usize,
    /// Where the drafted ones stand in [`StepPlan::draft_token_ids`]; they are the last of the query tokens. Empty for a
    /// prefill.
    pub draft_range: Range<usize>,
    /// Where they stand in [`StepPlan::token_ids`].
    pub token_range: Range<usize>,
    /// Whether the step starts inside the prefill: `num_computed_tokens` is below what was known at the request's last
    /// admission (prompt, and after a preemption generated tokens too). `is_prefilling` of the common metadata. The last
    /// chunk of a prefill is prefilling and needs logits.
    pub is_prefilling: bool,
    /// Whether every known token is computed after this step, so that the next one is sampled from the last query
    /// token's logits; with drafted tokens, from the logits of the last known token and of each drafted one. `false`
    /// exactly when the prefill is not finished after this step.
    pub needs_logits: bool,
    /// Tokens that the request may still generate, the one of this step included. At 1 a sampled token is the last.
    pub remaining_tokens: usize,
    /// Prompt tokens that were found in the prefix cache at the first admission.
    pub num_cached_tokens: usize,
    /// Tokens of the encoder's input that the request attends to; 0 without an encoder.
    pub encoder_len: usize,
    /// Where they stand in [`StepPlan::encoder_ids`] in the step that encodes them, the request's first since its
    /// admission; empty in others.
    pub encoder_range: Range<usize>,
    /// Tokens of the prompt.
    pub num_prompt_tokens: usize,
    /// The ranges of the prompt that see each other in both directions, where a query token is in one.
    pub bidirectional_ranges: Option<Arc<[Range<usize>]>>,
}

impl ScheduledRequest {
    /// Tokens that attention sees in the step: the sequence length, drafted tokens included.
    pub fn seq_len(&self) -> usize {
        self.num_computed_tokens + self.num_new_tokens
    }

    /// Drafted tokens among the query tokens.
    pub fn num_draft_tokens(&self) -> usize {
        self.draft_range.len()
    }

    /// Tokens of the request itself that are in the cache after the step, hence the position of the first token that is
    /// sampled in it.
    pub fn num_known_tokens(&self) -> usize {
        self.seq_len() - self.num_draft_tokens()
    }

    /// Rows of logits that the step wants of this request, those of its last query tokens.
    pub fn num_logits(&self) -> usize {
        if self.needs_logits { 1 + self.num_draft_tokens() } else { 0 }
    }

    /// The kind of the request under a reorder threshold in query tokens.
    pub fn class(&self, threshold: usize) -> BatchClass {
        match (self.num_computed_tokens > 0, self.num_new_tokens <= threshold) {
            (false, _) => BatchClass::Prefill,
            (true, true) if self.is_prefilling => BatchClass::ShortExtend,
            (true, true) => BatchClass::Decode,
            (true, false) => BatchClass::LongExtend,
        }
    }
}

/// What one step computes. Empty when nothing is to be done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// The requests in batch order.
    pub requests: Vec<ScheduledRequest>,
    /// The query tokens of all requests in batch order, `[num_tokens]`.
    pub token_ids: Vec<u32>,
    /// The encoder's inputs of the requests that begin in this step, in batch order.
    pub encoder_ids: Vec<u32>,
    /// The drafted ones of them, in the order in which they were drafted.
    pub draft_token_ids: Vec<u32>,
    /// Requests that lost their pages while this step was planned; the runner drops what it kept for them.
    pub preempted: Vec<RequestId>,
    /// Number of the step since start-up, from 1.
    pub step: u64,
}

impl StepPlan {
    /// Whether there is nothing to compute.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Query tokens of all requests.
    pub fn num_tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// Requests that need logits, hence outcomes that [`super::Scheduler::finish_step`] wants.
    pub fn num_sampled(&self) -> usize {
        self.requests.iter().filter(|r| r.needs_logits).count()
    }

    /// Requests that need logits, in the order in which `finish_step` wants their outcomes.
    pub fn sampled(&self) -> impl Iterator<Item = &ScheduledRequest> {
        self.requests.iter().filter(|r| r.needs_logits)
    }

    /// Rows of logits of all requests.
    pub fn num_logits(&self) -> usize {
        self.requests.iter().map(ScheduledRequest::num_logits).sum()
    }

    /// The tokens drafted for a request of this plan.
    pub fn drafts(&self, request: &ScheduledRequest) -> &[u32] {
        self.draft_token_ids.get(request.draft_range.clone()).unwrap_or(&[])
    }

    pub(super) fn clear(&mut self) {
        self.requests.clear();
        self.token_ids.clear();
        self.encoder_ids.clear();
        self.draft_token_ids.clear();
        self.preempted.clear();
    }
}
