//! What FlashAttention's builder computes. From version 3 on the kernel can have its work scheduled
//! ahead of time, once for all layers. Under decode context parallelism queries attend to the local
//! share of the context, without a mask, and to the new tokens apart.

use super::lengths::context_lens;
use crate::{
    AttentionError, CommonAttentionMetadata, ContextParallel, Result,
    step::{
        batch::{ThreeWaySplit, split_decodes_prefills_and_extends},
        context_parallel::{local_seq_len, max_local_seq_len},
    },
};
use headway_tensor::DType;

/// Most pieces that a row's keys are split into in a captured graph: the pieces' memory, rows x heads x
/// pieces, must be bounded there.
pub const MAX_SPLITS_IN_GRAPH: usize = 32;

/// Pieces of a row's keys: as many as the kernel finds best.
pub const SPLITS_BY_KERNEL: usize = 0;

/// The most that a row's keys are split into. A graph bounds it; batch invariance forbids it, since the
/// order of the sum would follow the batch.
pub fn max_num_splits(num_tokens: usize, max_graph_tokens: Option<usize>, batch_invariant: bool) -> usize {
    match max_graph_tokens {
        _ if batch_invariant => 1,
        Some(most) if num_tokens <= most => MAX_SPLITS_IN_GRAPH,
        _ => SPLITS_BY_KERNEL,
    }
}

/// Entries of the ahead-of-time schedule of a batch: one, and four a request, requests rounded up to 4.
pub const fn schedule_len(batch: usize) -> usize {
    1 + batch.next_multiple_of(4) * 4
}

/// What a kernel's scheduler is called with, apart from the batch's lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduleCall {
    /// Requests.
    pub batch_size: usize,
    /// Most new tokens of a request.
    pub max_query_len: usize,
    /// At least the most keys of a request.
    pub max_key_len: usize,
    /// Query heads, of all ranks that share the keys.
    pub num_heads: usize,
    /// Key heads.
    pub num_kv_heads: usize,
    /// Elements of a key head.
    pub head_size: usize,
    /// Elements of a value head, where another number.
    pub head_size_v: Option<usize>,
    /// Type of queries, keys and values.
    pub dtype: DType,
    /// Tokens in a page.
    pub page_size: usize,
    /// A query sees no later key.
    pub causal: bool,
    /// Keys before and after a query's own position that it sees; −1: all.
    pub window: (i32, i32),
    /// Most pieces of a row's keys; [`SPLITS_BY_KERNEL`]: no bound.
    pub num_splits: usize,
}

/// The window of a mask: `window` keys, the query's own included. Without causality it reaches as far
/// forward as back.
pub fn kernel_window(window: Option<usize>, causal: bool) -> (i32, i32) {
    match window.map(|w| w.saturating_sub(1) as i32) {
        None => (-1, -1),
        Some(back) if causal => (back, 0),
        Some(back) => (back, back),
    }
}

/// What a group's steps are computed by.
#[derive(Clone, Copy, Debug)]
pub struct FlashAttnConfig {
    /// The kernel takes a schedule made ahead of time.
    pub ahead_of_time: bool,
    /// Most tokens of a batch that runs as a full graph; `None`: no full graph.
    pub max_graph_tokens: Option<usize>,
    /// Query heads on this rank.
    pub num_heads: usize,
    /// Key heads on this rank.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_size: usize,
    /// Type of queries, keys and values.
    pub dtype: DType,
    /// Tokens in a page that the kernel sees.
    pub page_size: usize,
    /// Sliding window in tokens.
    pub window: Option<usize>,
    /// Ranks that share a request's tokens.
    pub context_parallel: ContextParallel,
    /// `--batch-invariant`.
    pub batch_invariant: bool,
}

/// One step's numbers, kept from step to step and filled anew.
#[derive(Clone, Debug, Default)]
pub struct FlashAttnStep {
    /// Most pieces of a row's keys.
    pub max_num_splits: usize,
    /// The scheduler's call; `None`: it isn't called. Its key lengths are `seq_lens`, or
    /// [`local_context_lens`] under decode context parallelism.
    pub schedule: Option<ScheduleCall>,
    /// Under decode context parallelism at least the most context that any rank holds of a request; 0: no
    /// request has context, so attention to it is left out.
    pub max_local_context_len: usize,
    /// Which rows attend to context: decodes, then extends; prefills don't. Zero in a batch of single
    /// tokens, where all rows do, and without decode context parallelism.
    pub context_split: ThreeWaySplit,
}

impl FlashAttnStep {
    /// Computes a step from the lengths' bounds on the host.
    ///
    /// # Errors
    /// Causality by request, which one schedule for the batch can't have.
    pub fn fill(&mut self, common: &CommonAttentionMetadata, config: &FlashAttnConfig) -> Result<()> {
        let inputs = &common.inputs;
        let cp = config.context_parallel;
        let ahead = config.ahead_of_time && !common.hints.fast_build;
        self.max_num_splits = SPLITS_BY_KERNEL;
        if config.ahead_of_time || config.batch_invariant {
            let graph = config.max_graph_tokens.filter(|_| config.ahead_of_time);
            self.max_num_splits = max_num_splits(inputs.num_actual_tokens, graph, config.batch_invariant);
        }
        self.max_local_context_len = 0;
        self.context_split = ThreeWaySplit::default();
        let (mut causal, mut max_key_len) = (true, inputs.max_seq_len);
        if cp.size > 1 {
            let some_context = self.context(common, cp);
            (causal, max_key_len) = (false, self.max_local_context_len);
            if !some_context {
                self.schedule = None;
                return Ok(());
            }
        } else if ahead {
            let crate::Causal::All(all) = common.causal() else {
                return Err(AttentionError::Inputs(
                    "an ahead-of-time schedule has one causality for the batch, not one a request".into(),
                ));
            };
            causal = *all;
        }
        self.schedule = ahead.then(|| ScheduleCall {
            batch_size: inputs.num_reqs,
            max_query_len: inputs.max_query_len,
            max_key_len,
            num_heads: config.num_heads * cp.size.max(1),
            num_kv_heads: config.num_kv_heads,
            head_size: config.head_size,
            head_size_v: None,
            dtype: config.dtype,
            page_size: config.page_size,
            causal,
            window: kernel_window(config.window, causal),
            num_splits: self.max_num_splits,
        });
        Ok(())
    }

    /// The context's share. Returns whether any request has context.
    fn context(&mut self, common: &CommonAttentionMetadata, cp: ContextParallel) -> bool {
        let inputs = &common.inputs;
        let (q, lens) = (inputs.query_start_loc.host(), &inputs.seq_lens_upper_bound);
        if inputs.max_query_len > 1 {
            let tokens = inputs.num_actual_tokens;
            self.context_split = split_decodes_prefills_and_extends(q, lens, tokens, inputs.max_query_len, 1);
        }
        let some_context = context_lens(q, lens).any(|c| c > 0);
        if some_context {
            self.max_local_context_len = max_local_seq_len(inputs.max_seq_len, cp);
        }
        some_context
    }
}

/// `[num_reqs]`, tokens: what this rank holds of each request's context. Takes the exact lengths: where a
/// device decides how many drafts were accepted, it is the device that computes this.
pub fn local_context_lens(
    query_start_loc: &[i32],
    seq_lens: &[i32],
    cp: ContextParallel,
    out: &mut Vec<i32>,
) {
    out.clear();
    out.extend(context_lens(query_start_loc, seq_lens).map(|c| local_seq_len(c, cp)));
}
