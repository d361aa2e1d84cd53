//! Lifetime: one step. [`StepInputs`], the part that all groups share, and
//! [`CommonAttentionMetadata`], a KV cache group's part: block table and slot mapping.

use crate::{AttentionError, Result};
use headway_tensor::{Dual, View};
use std::{
    any::Any,
    ops::Range,
    sync::{Arc, OnceLock},
};

/// Whether a query sees only keys up to its own position.
#[derive(Clone, Debug)]
pub enum Causal {
    /// One answer for the batch.
    All(bool),
    /// One answer a request `[num_reqs]`.
    PerRequest(View<u8>),
}

impl Causal {
    /// The answers of some of the requests.
    pub(super) fn slice(&self, requests: Range<usize>) -> Self {
        match self {
            Self::All(c) => Self::All(*c),
            Self::PerRequest(v) => Self::PerRequest(v.slice(requests)),
        }
    }

    /// The answer for a request.
    pub fn of(&self, request: usize) -> bool {
        match self {
            Self::All(c) => *c,
            Self::PerRequest(v) => v.host().and_then(|v| v.get(request)).is_none_or(|&c| c != 0),
        }
    }
}

/// A step's batch, shared by all groups. Requests are rows; request i has
/// `query_start_loc[i + 1] - query_start_loc[i]` new tokens and `seq_lens[i]` tokens with them.
/// Rows past the last live request are neutral: no new tokens, length 0.
#[derive(Debug)]
pub struct StepInputs {
    /// `[num_reqs + 1]`, tokens: prefix sum of the new tokens, host and device.
    pub query_start_loc: Dual<i32>,
    /// `[num_reqs]`, tokens, device, exact: context and new tokens.
    pub seq_lens: View<i32>,
    /// `[num_reqs]`, tokens, host: at least `seq_lens` (exact unless a device decides how many draft
    /// tokens were accepted).
    pub seq_lens_upper_bound: Vec<i32>,
    /// Requests, padding included.
    pub num_reqs: usize,
    /// New tokens, padding included.
    pub num_actual_tokens: usize,
    /// Most new tokens of a request.
    pub max_query_len: usize,
    /// At least the longest of `seq_lens`.
    pub max_seq_len: usize,
    /// Causal or not.
    pub causal: Causal,
    /// `[num_actual_tokens]`: each token's position in its request.
    pub positions: Option<View<i32>>,
    /// `[num_reqs]`, host: the request still has prompt tokens to compute after or in this step.
    pub is_prefilling: Option<Vec<bool>>,
    /// `[num_reqs]`, host: the row of each request in the engine's persistent state.
    pub request_index: Option<Vec<i32>>,
    /// `[num_reqs]`, tokens, device: what this rank holds under decode context parallelism.
    pub dcp_local_seq_lens: Option<View<i32>>,
    /// `[num_reqs]`, tokens, host: at least `dcp_local_seq_lens`.
    pub dcp_local_seq_lens_upper_bound: Option<Vec<i32>>,
    /// By request, ranges of positions whose tokens see each other in both directions (PrefixLM), ascending and
    /// apart: row i sees key j where causality and window allow it, or where one range holds both. A range must
    /// not end after the step's tokens, because its first rows could not see its last keys.
    pub mm_prefix_ranges: Option<Vec<Vec<Range<usize>>>>,
    /// `[num_reqs]`, tokens: the prefix of each request, its prompt, that reference sliding-window attention
    /// keeps visible: causal row i sees key j where `j <= i` and (`j < prefix` or `j > i - window`).
    pub rswa_prefix_lens: Option<View<i32>>,
    /// `[num_reqs]`, tokens: the encoder's lengths, for cross-attention.
    pub encoder_seq_lens: Option<Dual<i32>>,
    /// Indices of the tokens whose logits are needed, for fast prefill.
    pub logits_indices: Option<View<i32>>,
    /// What a model adds, by type.
    pub extras: Vec<Arc<dyn Any + Send + Sync>>,
    pub(super) token_to_req: OnceLock<Vec<i32>>,
    pub(super) computed: OnceLock<Vec<i32>>,
}

impl StepInputs {
    /// A batch by its prefix sum, its lengths and their host bound.
    ///
    /// # Errors
    /// A prefix sum that falls, starts elsewhere than at 0, or has another length than the lengths.
    pub fn new(
        query_start_loc: Dual<i32>,
        seq_lens: View<i32>,
        seq_lens_upper_bound: Vec<i32>,
    ) -> Result<Self> {
        let q = query_start_loc.host();
        let n = seq_lens_upper_bound.len();
        if q.len() != n + 1 || seq_lens.len() != n || q[0] != 0 || q.windows(2).any(|w| w[1] < w[0]) {
            return Err(AttentionError::Inputs(format!(
                "query_start_loc of {} entries must rise from 0 and have one more entry than the {n} lengths",
                q.len()
            )));
        }
        let num_actual_tokens = q[n] as usize;
        let max_query_len = q.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0) as usize;
        let max_seq_len = seq_lens_upper_bound.iter().copied().max().unwrap_or(0).max(0) as usize;
        Ok(Self {
            num_reqs: n,
            num_actual_tokens,
            max_query_len,
            max_seq_len,
            query_start_loc,
            seq_lens,
            seq_lens_upper_bound,
            causal: Causal::All(true),
            positions: None,
            is_prefilling: None,
            request_index: None,
            dcp_local_seq_lens: None,
            dcp_local_seq_lens_upper_bound: None,
            mm_prefix_ranges: None,
            rswa_prefix_lens: None,
            encoder_seq_lens: None,
            logits_indices: None,
            extras: vec![],
            token_to_req: OnceLock::new(),
            computed: OnceLock::new(),
        })
    }

    /// `[num_actual_tokens]`, host: the request of each token; 0 for padding. Computed once a step.
    pub fn token_to_req(&self) -> &[i32] {
        self.token_to_req.get_or_init(|| {
            let q = self.query_start_loc.host();
            let of = |(r, w): (usize, &[i32])| (w[0]..w[1]).map(move |_| r as i32);
            let mut requests: Vec<i32> = q.windows(2).enumerate().flat_map(of).collect();
            requests.resize(self.num_actual_tokens, 0);
            requests
        })
    }

    /// `[num_reqs]`, host, tokens: at least how many were computed before this step. Once a step.
    pub fn num_computed_tokens(&self) -> &[i32] {
        self.computed.get_or_init(|| {
            let q = self.query_start_loc.host();
            q.windows(2).zip(&self.seq_lens_upper_bound).map(|(w, s)| (s - (w[1] - w[0])).max(0)).collect()
        })
    }

    /// New tokens of a request.
    pub fn query_len(&self, request: usize) -> usize {
        let q = self.query_start_loc.host();
        (q[request + 1] - q[request]) as usize
    }

    /// What a model added of this type.
    pub fn extra<T: 'static>(&self) -> Option<&T> {
        self.extras.iter().find_map(|e| (**e).downcast_ref())
    }
}

/// Hints to a builder, which it may leave unused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BuildHints {
    /// The metadata will serve few layers: prefer a fast build to fast kernels.
    pub fast_build: bool,
    /// Tokens that all requests have in common at their beginning (0: none, or unknown).
    pub common_prefix_len: usize,
}

/// What a builder gets: the step's batch, and its KV cache group's own part. Made by
/// [`CommonAttentionMetadata::new`]; optional fields are set afterwards.
#[derive(Clone, Debug)]
pub struct CommonAttentionMetadata {
    /// Shared by all groups.
    pub inputs: Arc<StepInputs>,
    /// `[num_reqs, block_table_stride]`: block numbers of each request, in kernel blocks. Entries past
    /// a request's blocks hold 0, the null block.
    pub block_table: Dual<i32>,
    /// Entries from one row to the next.
    pub block_table_stride: usize,
    /// `[num_actual_tokens]`: where each token's key and value go, −1 nowhere.
    pub slot_mapping: View<i64>,
    /// `is_prefilling` of a group whose model decides otherwise.
    pub is_prefilling_override: Option<Vec<bool>>,
    /// `causal` of a group whose model decides otherwise.
    pub causal_override: Option<Causal>,
    /// Hints.
    pub hints: BuildHints,
    /// The same with the tokens whose logits are wanted alone, for the layers that compute no others; `None`: they
    /// compute all of this step's. [`FastPrefill::attach`](super::fast_prefill::FastPrefill::attach) sets it.
    pub fast_prefill: Option<Arc<CommonAttentionMetadata>>,
    /// What a model adds for this group alone, by type.
    pub extras: Vec<Arc<dyn Any + Send + Sync>>,
}

impl CommonAttentionMetadata {
    /// A group's part of a step.
    ///
    /// # Errors
    /// A block table that isn't `[num_reqs, block_table_stride]`; a slot mapping shorter than the new
    /// tokens.
    pub fn new(
        inputs: Arc<StepInputs>,
        block_table: Dual<i32>,
        block_table_stride: usize,
        slot_mapping: View<i64>,
    ) -> Result<Self> {
        if block_table.len() != inputs.num_reqs * block_table_stride {
            return Err(AttentionError::Inputs(format!(
                "a block table of {} entries is not [{}, {block_table_stride}]",
                block_table.len(),
                inputs.num_reqs
            )));
        }
        if slot_mapping.len() < inputs.num_actual_tokens {
            return Err(AttentionError::Inputs(format!(
                "a slot mapping of {} entries for {} new tokens",
                slot_mapping.len(),
                inputs.num_actual_tokens
            )));
        }
        Ok(Self {
            inputs,
            block_table,
            block_table_stride,
            slot_mapping,
            is_prefilling_override: None,
            causal_override: None,
            hints: BuildHints::default(),
            fast_prefill: None,
            extras: vec![],
        })
    }

    /// Whether each request still prefills; the group's own answer wins.
    pub fn is_prefilling(&self) -> Option<&[bool]> {
        self.is_prefilling_override.as_deref().or(self.inputs.is_prefilling.as_deref())
    }

    /// Causal or not; the group's own answer wins.
    pub fn causal(&self) -> &Causal {
        self.causal_override.as_ref().unwrap_or(&self.inputs.causal)
    }

    /// What the attention groups of layers that compute only tokens with logits get, or the others.
    pub(crate) fn of_group(&self, fast_prefill: bool) -> &Self {
        self.fast_prefill.as_deref().filter(|_| fast_prefill).unwrap_or(self)
    }

    /// Whether a group's metadata would be this group's but for block table and slots: the same batch, and
    /// nothing of their own. A state has no mask, so causality counts for `masked` groups alone.
    pub(crate) fn differs_in_table_alone(&self, other: &Self, masked: bool) -> bool {
        let plain = |c: &Self| {
            c.is_prefilling_override.is_none()
                && (!masked || c.causal_override.is_none())
                && c.extras.is_empty()
        };
        Arc::ptr_eq(&self.inputs, &other.inputs) && plain(self) && plain(other) && self.hints == other.hints
    }

    /// What a model added of this type, for the group or for all.
    pub fn extra<T: 'static>(&self) -> Option<&T> {
        self.extras.iter().find_map(|e| (**e).downcast_ref()).or_else(|| self.inputs.extra())
    }

    /// Row of a request in the block table.
    pub fn blocks_of(&self, request: usize) -> &[i32] {
        let s = self.block_table_stride;
        &self.block_table.host()[request * s..(request + 1) * s]
    }
}
