//! A step of a latent-attention group: decodes attend to the latents as they are, prefills to keys and
//! values expanded from them, cached context in chunks. Decodes come first in the batch.

use super::{
    context_chunks::{ChunkWorkspace, ContextChunks},
    flash_attn::{ScheduleCall, kernel_window},
    lengths::{context_lens, max_query_len, rebase},
};
use crate::{
    AttentionError, CommonAttentionMetadata, ContextParallel, GroupInfo, Result,
    group::kv::page::gcd,
    step::{
        batch::{BatchSplit, SplitOptions},
        context_parallel::{local_seq_len, max_local_seq_len},
    },
};
use headway_tensor::DType;

/// Most tokens that the workspace is made for when nothing else asks for more: 144 MiB of latents of 576
/// elements of 16 bits; expanded for 128 heads of 192, 3 GiB.
pub const MAX_WORKSPACE_TOKENS: usize = 64 * 1024;

/// How many new tokens of a request the decode kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeQueries {
    /// One.
    Single,
    /// Several, as many in every request.
    Uniform,
    /// Several, in each request its own number.
    Varlen,
}

impl DecodeQueries {
    /// Most new tokens of a decode. A kernel that takes several takes at least `kernel_most`, and verifies
    /// drafts as decodes. Where ranks share a request's tokens it is one, unless `several_over_ranks`: the
    /// kernel knows which of a rank's keys each of several new tokens sees.
    pub fn reorder_batch_threshold(
        self,
        kernel_most: usize,
        num_speculative_tokens: usize,
        cp: ContextParallel,
        several_over_ranks: bool,
    ) -> usize {
        match self {
            Self::Single => 1,
            _ if cp.size > 1 && !several_over_ranks => 1,
            Self::Uniform | Self::Varlen => kernel_most.max(1 + num_speculative_tokens),
        }
    }
}

/// Tokens of context that the prefills' workspace holds: eight requests of full length, or four pages for
/// each of the most requests if that is more, but no more than [`MAX_WORKSPACE_TOKENS`]; then at least a
/// page for each request, in whole pages of every rank.
pub fn workspace_tokens(group: &GroupInfo) -> usize {
    let ContextParallel { size, interleave, .. } = group.context_parallel;
    let page = group.spec.block_size().max(1);
    let turn = size.max(1) * interleave.max(1);
    let align = if size > 1 { page / gcd(page, turn) * turn } else { page };
    let wanted = (8 * group.max_model_len).max(4 * group.max_num_reqs * page).min(MAX_WORKSPACE_TOKENS);
    wanted.max(group.max_num_reqs * align).next_multiple_of(align)
}

/// Rows of the workspace's memory: under decode context parallelism a rank's own share lies beside the
/// ranks' shares together.
pub fn workspace_rows(tokens: usize, cp: ContextParallel) -> usize {
    if cp.size > 1 { tokens + tokens / cp.size } else { tokens }
}

/// What a group's steps are computed by.
#[derive(Clone, Copy, Debug)]
pub struct MlaConfig {
    /// Most new tokens of a decode.
    pub threshold: usize,
    /// How many new tokens of a request the decode kernel takes.
    pub queries: DecodeQueries,
    /// A short last piece of a prefill may pass for a decode.
    pub short_extends_as_decodes: bool,
    /// What the prefills' context goes through.
    pub workspace: ChunkWorkspace,
}

/// One step's numbers, kept from step to step and filled anew. Decodes are the first `split.decodes` rows
/// of block table and lengths, prefills the rest.
#[derive(Clone, Debug, Default)]
pub struct MlaStep {
    /// The two halves.
    pub split: BatchSplit,
    /// Most new tokens of a decode.
    pub max_decode_query_len: usize,
    /// At least the most keys of a request that a decode kernel meets on this rank.
    pub max_key_len: usize,
    /// `[prefills + 1]`, tokens, from 0. Empty without prefills.
    pub prefill_start_loc: Vec<i32>,
    /// Chunks of the prefills' context. Empty where there is none.
    pub context: ContextChunks,
}

impl MlaStep {
    /// Computes a step. Prefills' lengths are read by their bound on the host, which is exact for them.
    ///
    /// # Errors
    /// A batch without causality; as [`CommonAttentionMetadata::split`] and [`ContextChunks::fill`].
    pub fn fill(&mut self, common: &CommonAttentionMetadata, config: &MlaConfig) -> Result<()> {
        let inputs = &common.inputs;
        if (0..inputs.num_reqs).any(|r| !common.causal().of(r)) {
            return Err(AttentionError::Inputs(
                "latent attention splits causal batches only; give these layers a backend without latents"
                    .into(),
            ));
        }
        self.split = common.split(&SplitOptions {
            threshold: config.threshold,
            require_uniform: config.queries != DecodeQueries::Varlen,
            short_extends_as_decodes: config.short_extends_as_decodes,
        })?;
        let q = inputs.query_start_loc.host();
        let (n, decodes) = (inputs.num_reqs, self.split.decodes);
        self.max_decode_query_len = max_query_len(&q[..=decodes]);
        self.max_key_len = inputs.max_seq_len;
        let cp = config.workspace.context_parallel;
        if cp.size > 1 && decodes > 0 {
            self.max_key_len = max_local_seq_len(inputs.max_seq_len, cp);
        }
        self.prefill_start_loc.clear();
        if decodes < n {
            rebase(q, decodes..n, &mut self.prefill_start_loc);
        }
        let context = context_lens(&q[decodes..], &inputs.seq_lens_upper_bound[decodes..]);
        self.context.fill(context, &self.prefill_start_loc, &config.workspace)
    }
}

/// Refuses to capture a batch that isn't of decodes alone: prefills go through chunks on the host.
///
/// # Errors
/// A request with more new tokens than a decode has.
pub fn capture_decodes_only(common: &CommonAttentionMetadata, threshold: usize) -> Result<()> {
    let inputs = &common.inputs;
    if inputs.max_query_len > threshold || inputs.num_reqs > inputs.num_actual_tokens * threshold {
        return Err(AttentionError::Graph(format!(
            "latent attention captures batches of decodes with at most {threshold} new tokens each, not {} requests \
             with {} new tokens in all and up to {} each; --graph-mode FULL_DECODE_ONLY captures no other",
            inputs.num_reqs, inputs.num_actual_tokens, inputs.max_query_len
        )));
    }
    Ok(())
}

/// `[decodes]`, tokens: what the decode kernel reads of each request on this rank.
pub fn decode_key_lens(seq_lens: &[i32], cp: ContextParallel) -> impl Iterator<Item = i32> + '_ {
    seq_lens.iter().map(move |&s| if cp.size > 1 { local_seq_len(s, cp) } else { s })
}

/// What a decode kernel of the FlashAttention kind is scheduled by: one key head, the rotary part as keys,
/// the latents as values.
#[derive(Clone, Copy, Debug)]
pub struct LatentHeads {
    /// Query heads on this rank.
    pub num_heads: usize,
    /// Elements with rotary position.
    pub qk_rope_head_dim: usize,
    /// Width of the latent.
    pub kv_lora_rank: usize,
    /// Type of queries and latents.
    pub dtype: DType,
    /// Tokens in a page.
    pub page_size: usize,
}

impl MlaStep {
    /// The ahead-of-time scheduler's call for the decodes. Its key lengths are [`decode_key_lens`].
    pub fn decode_schedule(
        &self,
        heads: &LatentHeads,
        cp: ContextParallel,
        num_splits: usize,
    ) -> ScheduleCall {
        ScheduleCall {
            batch_size: self.split.decodes,
            max_query_len: self.max_decode_query_len,
            max_key_len: self.max_key_len,
            num_heads: heads.num_heads * cp.size.max(1),
            num_kv_heads: 1,
            head_size: heads.qk_rope_head_dim,
            head_size_v: Some(heads.kv_lora_rank),
            dtype: heads.dtype,
            page_size: heads.page_size,
            causal: true,
            window: kernel_window(None, true),
            num_splits,
        }
    }
}
