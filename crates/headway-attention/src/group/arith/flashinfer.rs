//! What FlashInfer's builder computes: which of the library's kernels each half of the batch gets, and
//! what their plans are called with. The planned kernels read page lists; the others a block table.

use super::{
    lengths::{max_query_len, push_prefix_sum, query_lens, rebase},
    pages::PageLists,
};
use crate::{
    AttentionError, Causal, CommonAttentionMetadata, ContextParallel, Result,
    group::kv::block_table::BlockRows,
    step::batch::{BatchSplit, SplitOptions},
};
use headway_tensor::DType;
use std::ops::Range;

/// The library's kernels for decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeKernel {
    /// Planned once a step. Decodes of one length, causal.
    Planned,
    /// Without a plan. Decodes of one length (padding aside), causal.
    TrtllmGen,
    /// Without a plan. Decodes of any lengths; what drafted tokens see of each other is a mask.
    Xqa,
}

/// The library's kernels for prefills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillKernel {
    /// Planned once a step.
    Planned,
    /// Without a plan, causal.
    TrtllmGen,
}

/// The kernels of a device of this compute capability. `without_plan` is the user's word: `None` takes the
/// kernels without a plan wherever there are some, `Some(false)` never.
pub fn kernels(capability: (u32, u32), without_plan: Option<bool>) -> (DecodeKernel, PrefillKernel) {
    match capability.0 {
        _ if without_plan == Some(false) => (DecodeKernel::Planned, PrefillKernel::Planned),
        10 => (DecodeKernel::TrtllmGen, PrefillKernel::TrtllmGen),
        9 | 12 => (DecodeKernel::Xqa, PrefillKernel::Planned),
        _ => (DecodeKernel::Planned, PrefillKernel::Planned),
    }
}

/// Most new tokens of a decode on a device of this compute capability: drafts are verified as decodes,
/// except by planned decodes from capability 9 on, and where ranks share a request's tokens.
pub fn reorder_batch_threshold(
    capability: (u32, u32),
    decode: DecodeKernel,
    num_speculative_tokens: usize,
    cp: ContextParallel,
) -> usize {
    let several = decode != DecodeKernel::Planned || capability.0 < 9;
    if several && cp.size <= 1 { 1 + num_speculative_tokens } else { 1 }
}

/// What a group's steps are computed by.
#[derive(Clone, Copy, Debug)]
pub struct FlashInferConfig {
    /// Kernel of the decodes.
    pub decode: DecodeKernel,
    /// Kernel of causal prefills.
    pub prefill: PrefillKernel,
    /// Most new tokens of a decode.
    pub threshold: usize,
    /// Tokens in a page.
    pub page_size: usize,
    /// What plans are made with.
    pub heads: PlanHeads,
}

/// What all plans of a group have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlanHeads {
    /// Query heads on this rank.
    pub num_heads: usize,
    /// Key heads on this rank.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_size: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Sliding window in tokens.
    pub window: Option<usize>,
    /// Cap of the scores; 0: none.
    pub logits_soft_cap: f32,
    /// Type of queries.
    pub q_dtype: DType,
    /// Type of the cache.
    pub kv_dtype: DType,
    /// Type of the result.
    pub out_dtype: DType,
    /// Keys in a piece, where the split must not follow the batch.
    pub fixed_split_size: Option<usize>,
    /// No splitting of keys at all.
    pub disable_split_kv: bool,
}

impl PlanHeads {
    /// Keys before a query's own that it sees; −1: all.
    pub fn window_left(&self) -> i32 {
        self.window.map_or(-1, |w| w.saturating_sub(1) as i32)
    }
}

/// What one plan is called with besides [`PlanHeads`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanCall {
    /// Its requests: rows of [`PageLists::last_page_len`] and of the lengths, and bounds of the pages.
    pub requests: Range<usize>,
    /// A query sees no later key.
    pub causal: bool,
    /// New tokens of each request in a plan for decodes; `None` in one for prefills, whose prefix sum is
    /// [`FlashInferStep::prefill_start_loc`].
    pub query_len_per_req: Option<usize>,
}

/// Decodes of a kernel without a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnplannedDecode {
    /// New tokens of each request, or the most where they differ.
    pub query_len_per_req: usize,
    /// They differ: the prefix sum of the decodes goes along.
    pub ragged: bool,
    /// Words of 16 bits in a row of the mask; 0: no mask.
    pub mask_words: usize,
}

/// One step's numbers, kept from step to step and filled anew.
#[derive(Clone, Debug, Default)]
pub struct FlashInferStep {
    /// The two halves.
    pub split: BatchSplit,
    /// One causality for the batch.
    pub causal: bool,
    /// Pages of the whole batch. Empty unless some half is planned.
    pub pages: PageLists,
    /// Plan of the prefills.
    pub prefill_plan: Option<PlanCall>,
    /// Plan of the decodes.
    pub decode_plan: Option<PlanCall>,
    /// Decodes without a plan.
    pub decode: Option<UnplannedDecode>,
    /// `[prefills + 1]`, tokens, from 0. Empty without prefills.
    pub prefill_start_loc: Vec<i32>,
    /// `[prefills + 1]`: prefix sum of the pages of prefills without a plan. Empty unless there are some.
    pub prefill_page_indptr: Vec<i32>,
    /// Most new tokens of a prefill.
    pub max_prefill_query_len: usize,
    /// `[decode tokens, mask_words]`: bit j of a row says that the token sees the request's j-th new one.
    pub mask: Vec<u16>,
}

impl FlashInferStep {
    /// Computes a step from the lengths' bounds on the host. A planned half needs them exact, since it
    /// attends to all that its page lists hold.
    ///
    /// # Errors
    /// Causality by request; a request longer than its row of the block table; as
    /// [`CommonAttentionMetadata::split`].
    pub fn fill(&mut self, common: &CommonAttentionMetadata, config: &FlashInferConfig) -> Result<()> {
        let inputs = &common.inputs;
        let Causal::All(causal) = *common.causal() else {
            return Err(AttentionError::Inputs(
                "FlashInfer's kernels have one causality for the batch, not one a request".into(),
            ));
        };
        self.causal = causal;
        let n = inputs.num_reqs;
        self.split = if causal || config.decode == DecodeKernel::Xqa {
            common.split(&SplitOptions {
                threshold: config.threshold,
                require_uniform: config.decode != DecodeKernel::Xqa,
                short_extends_as_decodes: true,
            })?
        } else {
            // No decode kernel leaves out the mask; the planned prefill does.
            BatchSplit { prefills: n, prefill_tokens: inputs.num_actual_tokens, ..BatchSplit::default() }
        };
        let (q, decodes) = (inputs.query_start_loc.host(), self.split.decodes);
        self.prefill(q, n, config);
        self.decode(&q[..=decodes], config);
        let table = BlockRows {
            blocks: common.block_table.host(),
            stride: common.block_table_stride,
            block_size: config.page_size,
        };
        let planned = self.prefill_plan.is_some() || self.decode_plan.is_some();
        self.pages.fill(if planned { &inputs.seq_lens_upper_bound } else { &[] }, table)?;
        if !self.prefill_start_loc.is_empty() && self.prefill_plan.is_none() {
            let pages = |&s: &i32| usize::try_from(s).unwrap_or(0).div_ceil(config.page_size.max(1)) as i32;
            let lens = inputs.seq_lens_upper_bound[decodes..].iter().map(pages);
            push_prefix_sum(lens, &mut self.prefill_page_indptr);
        }
        Ok(())
    }

    fn prefill(&mut self, q: &[i32], n: usize, config: &FlashInferConfig) {
        let decodes = self.split.decodes;
        self.prefill_start_loc.clear();
        self.prefill_page_indptr.clear();
        self.prefill_plan = None;
        if decodes < n {
            rebase(q, decodes..n, &mut self.prefill_start_loc);
            let planned = config.prefill == PrefillKernel::Planned || !self.causal;
            self.prefill_plan = planned.then_some(PlanCall {
                requests: decodes..n,
                causal: self.causal,
                query_len_per_req: None,
            });
        }
        self.max_prefill_query_len = max_query_len(&self.prefill_start_loc);
    }

    fn decode(&mut self, q: &[i32], config: &FlashInferConfig) {
        let decodes = self.split.decodes;
        (self.decode, self.decode_plan) = (None, None);
        self.mask.clear();
        if decodes == 0 {
            return;
        }
        let most = max_query_len(q);
        if config.decode == DecodeKernel::Planned {
            self.decode_plan =
                Some(PlanCall { requests: 0..decodes, causal: self.causal, query_len_per_req: Some(most) });
            return;
        }
        let ragged = most > 1 && query_lens(q).any(|l| l as usize != most);
        let masked = config.decode == DecodeKernel::Xqa && most > 1;
        let mask_words = if masked { 2 * most.div_ceil(32) } else { 0 };
        if masked {
            draft_mask(q, mask_words, self.causal, &mut self.mask);
        }
        self.decode = Some(UnplannedDecode { query_len_per_req: most, ragged, mask_words });
    }
}

/// Writes a row of `words` words of 16 bits for each new token: which of its request's new tokens it sees.
/// That is up to itself, or all without causality.
pub fn draft_mask(query_start_loc: &[i32], words: usize, causal: bool, out: &mut Vec<u16>) {
    out.clear();
    for len in query_lens(query_start_loc) {
        for token in 0..len {
            let sees = if causal { token + 1 } else { len } as usize;
            out.extend((0..words).map(|w| match sees.saturating_sub(16 * w) {
                rest if rest >= 16 => u16::MAX,
                rest => (1 << rest) - 1,
            }));
        }
    }
}
