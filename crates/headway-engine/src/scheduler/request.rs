//! One request as the scheduler sees it: its tokens and how far they are computed.
//!
//! Lifetime: one request. Not for sampling parameters or text, which the engine keeps.

use super::RequestId;
use crate::kv::BlockHashes;
use std::{ops::Range, sync::Arc};

/// A request handed to [`super::Scheduler::add`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewRequest {
    /// Token ids of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// What an encoder reads for the decoder to attend to; empty without an encoder.
    pub encoder_ids: Vec<u32>,
    /// The most tokens to generate, at least 1.
    pub max_tokens: usize,
    /// Whether cached blocks may stand in for computing the prompt. `false` for requests that want something of every
    /// prompt position: cached tokens have no logits.
    pub use_prefix_cache: bool,
    /// Ranges of the prompt whose tokens see each other in both directions, ascending, apart and not empty. Each is
    /// computed whole in one step.
    pub bidirectional_ranges: Arc<[Range<usize>]>,
    /// The whole prompt is computed in one step, and nothing else of the request in it: for layers that are not causal
    /// over a prompt.
    pub whole_prompt: bool,
}

impl NewRequest {
    /// A request that uses the prefix cache and sees causally.
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Self {
        let bidirectional_ranges = Arc::default();
        Self {
            prompt,
            encoder_ids: vec![],
            max_tokens,
            use_prefix_cache: true,
            bidirectional_ranges,
            whole_prompt: false,
        }
    }

    /// Ranges that are computed in one step each.
    pub(super) fn whole_ranges(&self) -> Vec<Range<usize>> {
        let prompt = (self.whole_prompt && !self.prompt.is_empty()).then_some(0..self.prompt.len());
        prompt.into_iter().chain(self.bidirectional_ranges.iter().cloned()).collect()
    }
}

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestState {
    /// Never run so far.
    Waiting,
    /// Lost its pages and waits to be computed again.
    Preempted,
    /// Has pages; some tokens that were known at its (re)admission are not computed yet.
    Prefilling,
    /// Has pages and generates.
    Decoding,
}

/// "Prompt" and "tokens to compute before the next one can be sampled" are two things: after a preemption the second
/// contains generated tokens.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) id: RequestId,
    /// Prompt and generated tokens. The last generated one is not computed yet.
    pub(super) tokens: Vec<u32>,
    pub(super) num_prompt_tokens: usize,
    pub(super) encoder_ids: Vec<u32>,
    pub(super) max_tokens: usize,
    pub(super) use_prefix_cache: bool,
    pub(super) bidirectional_ranges: Arc<[Range<usize>]>,
    pub(super) whole_prompt: bool,
    /// Tokens whose keys and values are in the cache.
    pub(super) num_computed: usize,
    /// Tokens known at the last admission: below it, the request is prefilling.
    pub(super) prefill_target: usize,
    /// The most tokens ever computed; computing below it is recomputing.
    pub(super) high_water: usize,
    /// Prompt tokens found in the cache at the first admission.
    pub(super) num_cached: usize,
    pub(super) preemptions: u32,
    pub(super) running: bool,
    pub(super) admitted_before: bool,
    /// Aborted while a step is under way; its pages go back when the step ends.
    pub(super) aborted: bool,
    pub(super) hashes: BlockHashes,
}

impl Request {
    /// `rswa`: some layers see a window beside the prompt.
    pub(super) fn new(id: RequestId, new: NewRequest, rswa: bool) -> Self {
        let hashes = BlockHashes::with_masks(new.whole_ranges(), rswa.then_some(new.prompt.len()));
        Self {
            id,
            num_prompt_tokens: new.prompt.len(),
            tokens: new.prompt,
            encoder_ids: new.encoder_ids,
            max_tokens: new.max_tokens,
            use_prefix_cache: new.use_prefix_cache,
            bidirectional_ranges: new.bidirectional_ranges,
            whole_prompt: new.whole_prompt,
            num_computed: 0,
            prefill_target: 0,
            high_water: 0,
            num_cached: 0,
            preemptions: 0,
            running: false,
            admitted_before: false,
            aborted: false,
            hashes,
        }
    }

    /// Tokens that its encoder reads in its next step: all, in the first since its admission.
    pub(super) fn encodes(&self) -> usize {
        if self.num_computed == 0 { self.encoder_ids.len() } else { 0 }
    }

    pub(super) fn num_generated(&self) -> usize {
        self.tokens.len() - self.num_prompt_tokens
    }

    /// How many of the next `n` tokens after `computed` a step may compute so that it cuts no range; 0: a range is longer
    /// than what `n` leaves room for.
    pub(super) fn uncut(&self, computed: usize, n: usize) -> usize {
        let prompt = self.num_prompt_tokens;
        let mut end = computed + n;
        if self.whole_prompt && computed < prompt {
            end = if end < prompt { computed } else { prompt };
        }
        let cut = self.bidirectional_ranges.iter().find(|r| r.start < end && end < r.end);
        cut.map_or(end, |r| r.start).saturating_sub(computed)
    }

    /// The ranges, where the tokens `computed..end` have part in any.
    pub(super) fn ranges_in(&self, computed: usize, end: usize) -> Option<Arc<[Range<usize>]>> {
        let any = self.bidirectional_ranges.iter().any(|r| r.start < end && r.end > computed);
        any.then(|| Arc::clone(&self.bidirectional_ranges))
    }

    pub(super) fn is_prefilling(&self) -> bool {
        self.num_computed < self.prefill_target
    }

    pub(super) fn num_uncomputed(&self) -> usize {
        self.tokens.len() - self.num_computed
    }

    pub(super) fn state(&self) -> RequestState {
        match (self.running, self.preemptions > 0) {
            (true, _) if self.is_prefilling() => RequestState::Prefilling,
            (true, _) => RequestState::Decoding,
            (false, true) => RequestState::Preempted,
            (false, false) => RequestState::Waiting,
        }
    }
}
