//! A step of a state-space group: decodes advance a state by one token (or verify drafts), prefills scan
//! theirs in chunks. Decodes come first in the batch.

use super::{
    conv_blocks::{CONV_BLOCK, ConvBlocks},
    lengths::{context_lens, rebase},
    mamba_states::state_blocks,
    scan_chunks::ScanChunks,
};
use crate::{
    AttentionError, CommonAttentionMetadata, GroupInfo, KvCacheSpec, MambaSpec, Result,
    group::kv::{block_table::BlockRows, spec::MambaCacheMode},
    step::batch::{BatchSplit, SplitOptions},
};

/// What a group's steps are computed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mamba2Config {
    /// Tokens in a chunk of the scan: the model's.
    pub chunk_size: usize,
    /// Tokens in a block of the cache.
    pub block_size: usize,
    /// Which states are kept.
    pub cache_mode: MambaCacheMode,
    /// Drafted tokens that a decode verifies.
    pub num_speculative_tokens: usize,
}

impl Mamba2Config {
    /// Of a cache spec; its speculative blocks are the drafted tokens.
    pub fn new(spec: &MambaSpec, chunk_size: usize) -> Self {
        Self {
            chunk_size,
            block_size: spec.block_size,
            cache_mode: spec.cache_mode,
            num_speculative_tokens: spec.num_speculative_blocks,
        }
    }

    /// Most new tokens of a decode.
    pub fn reorder_batch_threshold(&self) -> usize {
        1 + self.num_speculative_tokens
    }
}

/// The spec and the chunk of a group whose backend keeps the running state alone, without drafts.
///
/// # Errors
/// What the group asks beyond that, and what to do instead.
pub fn running_state(group: &GroupInfo) -> std::result::Result<(&MambaSpec, usize), (String, &'static str)> {
    let KvCacheSpec::Mamba(spec) = &group.spec else {
        let what = format!("a cache of kind {}", group.spec.kind_name());
        return Err((what, "layers with a Mamba-2 state are"));
    };
    if spec.cache_mode != MambaCacheMode::None {
        return Err((
            "keeping states at block ends (prefix caching)".into(),
            "the running state alone is kept: turn prefix caching off for this model",
        ));
    }
    if spec.num_speculative_blocks > 0 || group.num_speculative_tokens > 0 {
        return Err(("speculative decoding".into(), "set --speculative-tokens to 0 for this model"));
    }
    match spec.chunk_size.filter(|c| *c > 0) {
        Some(chunk) => Ok((spec, chunk)),
        None => Err(("a scan without a chunk size".into(), "set chunk_size in the model's config.json")),
    }
}

/// Tokens in a chunk of a kernel that likes `most`: the largest divisor of the model's chunk that is no longer, so that
/// wherever a chunk of the model ends, one of these does.
pub fn chunk_within(model: usize, most: usize) -> usize {
    (1..=most.min(model)).rev().find(|n| model.is_multiple_of(*n)).unwrap_or(1)
}

/// One step's numbers, kept from step to step and filled anew.
#[derive(Clone, Debug, Default)]
pub struct Mamba2Step {
    /// The two halves. A short last piece of a prefill is a prefill: its state begins elsewhere.
    pub split: BatchSplit,
    /// `[prefills]`: the request has a state from an earlier step. Without one the scan begins at zero,
    /// whatever the block holds.
    pub has_initial_state: Vec<bool>,
    /// `[prefills + 1]`, tokens, from 0. Empty without prefills.
    pub prefill_start_loc: Vec<i32>,
    /// The prefills' chunks. Empty without prefills.
    pub chunks: ScanChunks,
    /// The prefills' blocks of the convolution.
    pub conv: ConvBlocks,
    /// `[prefills]`: the block of each state.
    pub prefill_states: Vec<i32>,
    /// `[decodes, 1 + num_speculative_tokens]`: the block of each state, and those after each drafted token.
    pub decode_states: Vec<i32>,
    /// `[decodes + 1]`, tokens. Empty unless decodes verify drafts: else each has one token.
    pub decode_start_loc: Vec<i32>,
    blocks: Vec<i32>,
}

impl Mamba2Step {
    /// Some prefill goes on from an earlier step.
    pub fn any_initial_state(&self) -> bool {
        self.has_initial_state.contains(&true)
    }

    /// Computes all but the states, from the lengths' bounds on the host, which are exact for prefills.
    ///
    /// # Errors
    /// Nothing says which requests still prefill; a chunk size of 0.
    pub fn fill(&mut self, common: &CommonAttentionMetadata, config: &Mamba2Config) -> Result<()> {
        let inputs = &common.inputs;
        self.split = common.split(&SplitOptions {
            threshold: config.reorder_batch_threshold(),
            require_uniform: false,
            short_extends_as_decodes: false,
        })?;
        let q = inputs.query_start_loc.host();
        let (n, decodes) = (inputs.num_reqs, self.split.decodes);
        self.decode_start_loc.clear();
        if config.num_speculative_tokens > 0 && decodes > 0 {
            self.decode_start_loc.extend_from_slice(&q[..=decodes]);
        }
        self.has_initial_state.clear();
        self.prefill_start_loc.clear();
        if decodes < n {
            rebase(q, decodes..n, &mut self.prefill_start_loc);
        }
        let context = context_lens(&q[decodes..], &inputs.seq_lens_upper_bound[decodes..]);
        self.has_initial_state.extend(context.clone().map(|c| c > 0));
        self.chunks.fill(context, &self.prefill_start_loc, config.chunk_size, None)?;
        self.conv.fill(&self.prefill_start_loc, CONV_BLOCK);
        Ok(())
    }

    /// The blocks of the states, by the split that [`Mamba2Step::fill`] made. Alone it is the
    /// block-table-only update: another group's states for the same batch. Takes the exact lengths: where
    /// a device decides how many drafts were accepted, and states at block ends are kept, it is the device
    /// that computes this.
    ///
    /// # Errors
    /// A block table too narrow for a state, or with fewer rows than there are lengths; fewer lengths than
    /// decodes.
    pub fn states(
        &mut self,
        common: &CommonAttentionMetadata,
        seq_lens: &[i32],
        config: &Mamba2Config,
    ) -> Result<()> {
        let table = BlockRows {
            blocks: common.block_table.host(),
            stride: common.block_table_stride,
            block_size: config.block_size,
        };
        let drafts = config.num_speculative_tokens;
        let width = state_blocks(table, seq_lens, config.cache_mode, drafts, &mut self.blocks)?;
        let needs = 1 + drafts;
        if width < needs {
            return Err(AttentionError::Inputs(format!(
                "{drafts} drafted tokens need {needs} blocks a request; the block table has {width}"
            )));
        }
        let of_decodes = self.split.decodes * width;
        let Some((decode, prefill)) = self.blocks.split_at_checked(of_decodes) else {
            return Err(AttentionError::Inputs(format!(
                "{} lengths for {} decodes",
                seq_lens.len(),
                self.split.decodes
            )));
        };
        self.decode_states.clear();
        self.decode_states.extend(decode.chunks_exact(width).flat_map(|row| &row[..needs]));
        self.prefill_states.clear();
        self.prefill_states.extend(prefill.chunks_exact(width).map(|row| row[0]));
        Ok(())
    }
}
