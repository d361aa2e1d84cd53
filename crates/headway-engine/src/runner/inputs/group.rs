//! A KV cache group's part of a step's inputs: its block table, and where each token's key and value go.

use super::table::BlockTable;
use crate::{
    runner::extent::Extent,
    scheduler::{RequestId, ScheduledRequest, StepPlan},
};
use headway_attention::{
    AttentionError, Causal, CommonAttentionMetadata, KvCacheSpec, Result, StepInputs,
    group::kv::block_table::{SKIP_SLOT, slot},
};
use headway_tensor::{Exec, Packed, Part};
use std::sync::Arc;

/// What the layers of a KV cache group keep.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keeps {
    /// Keys and values of the request's tokens.
    Tokens,
    /// Of its encoder's tokens.
    Encoded,
    /// Nothing: an encoder's layers, which see both ways.
    Nothing,
}

/// A step's inputs by what groups attend to.
pub(super) struct StepParts {
    pub decoder: Arc<StepInputs>,
    /// The encoder's own batch, and the decoder's over the encoder's tokens.
    pub encoder: Option<(Arc<StepInputs>, Arc<StepInputs>)>,
}

pub(super) struct GroupBuffers {
    block_size: usize,
    keeps: Keeps,
    pub non_causal: bool,
    /// Of the longest request.
    max_blocks: usize,
    table: BlockTable,
    /// What the last step wrote: entries of a row, and the slots.
    written: Option<(usize, Part<i64>)>,
}

impl GroupBuffers {
    /// For the layers of `spec`.
    ///
    /// # Errors
    /// No memory.
    pub fn new(
        cx: &dyn Exec,
        spec: &KvCacheSpec,
        max_num_reqs: usize,
        max_model_len: usize,
    ) -> headway_tensor::Result<Self> {
        let block_size = spec.block_size();
        let max_blocks = max_model_len.div_ceil(block_size);
        Ok(Self {
            block_size,
            keeps: match spec {
                KvCacheSpec::EncoderOnly(_) => Keeps::Nothing,
                KvCacheSpec::Cross(_) => Keeps::Encoded,
                _ => Keeps::Tokens,
            },
            non_causal: spec.attention().is_some_and(|a| a.non_causal),
            max_blocks,
            table: BlockTable::new(cx, max_num_reqs, max_blocks)?,
            written: None,
        })
    }

    pub fn reallocs(&self) -> usize {
        self.table.reallocs()
    }

    /// Writes block table and slots. `encodes`: the model has an encoder, whose layers have a batch of their own.
    ///
    /// # Errors
    /// A request without blocks for all its tokens.
    pub fn write<'t>(
        &mut self,
        cx: &dyn Exec,
        packed: &mut Packed,
        plan: &StepPlan,
        extent: &Extent,
        encodes: bool,
        table: impl Fn(RequestId) -> Option<&'t [u32]>,
    ) -> Result<()> {
        if self.keeps == Keeps::Nothing {
            let tokens = if encodes { plan.encoder_ids.len() } else { extent.attended };
            let slots = packed.write(tokens, |o: &mut [i64]| o.fill(SKIP_SLOT));
            self.written = Some((0, slots));
            return Ok(());
        }
        let size = self.block_size;
        let encoded = self.keeps == Keeps::Encoded;
        // Tokens that lie in this group's blocks.
        let kept = |r: &ScheduledRequest| if encoded { r.encoder_len } else { r.seq_len() };
        // Rows as wide as this step needs, or as a graph was captured with.
        let stride = match extent.whole_tables {
            true => self.max_blocks,
            false => plan.requests.iter().map(kept).max().unwrap_or(0).div_ceil(size),
        };
        let rows = plan.requests.iter().map(|r| {
            let used = kept(r).div_ceil(size);
            let blocks = table(r.id).and_then(|t| t.get(..used));
            blocks.ok_or_else(|| AttentionError::Inputs(format!("request {} has no block table", r.id)))
        });
        self.table.write(cx, (extent.reqs, stride), rows)?;
        let rows = self.table.rows(extent.reqs);
        let blocks = rows.host();
        let row = |i: usize| &blocks[i * stride..(i + 1) * stride];
        let slots = if encoded {
            packed.write(plan.num_tokens().max(plan.encoder_ids.len()), |o: &mut [i64]| {
                o.fill(SKIP_SLOT);
                for (i, r) in plan.requests.iter().enumerate() {
                    for (t, o) in o[r.encoder_range.clone()].iter_mut().enumerate() {
                        *o = slot(row(i), size, t).unwrap_or(SKIP_SLOT);
                    }
                }
            })
        } else {
            packed.write(extent.attended, |o: &mut [i64]| {
                if !extent.writes {
                    return o.fill(SKIP_SLOT);
                }
                o[plan.num_tokens()..].fill(SKIP_SLOT);
                for (i, r) in plan.requests.iter().enumerate() {
                    for (t, o) in o[r.token_range.clone()].iter_mut().enumerate() {
                        *o = slot(row(i), size, r.num_computed_tokens + t).unwrap_or(SKIP_SLOT);
                    }
                }
            })
        };
        self.written = Some((stride, slots));
        Ok(())
    }

    /// The group's common metadata, of what was written.
    ///
    /// # Errors
    /// Nothing written; as [`CommonAttentionMetadata::new`].
    pub fn common(
        &self,
        packed: &Packed,
        plan: &StepPlan,
        parts: &StepParts,
    ) -> Result<CommonAttentionMetadata> {
        let inputs = match (self.keeps, &parts.encoder) {
            (Keeps::Nothing, Some((own, _))) => own,
            (Keeps::Encoded, Some((_, seen))) => seen,
            _ => &parts.decoder,
        };
        let Some((stride, slots)) = self.written else {
            return Err(AttentionError::Inputs("a KV cache group's inputs were not written".into()));
        };
        let (rows, slots) = (self.table.rows(inputs.num_reqs), packed.view(slots));
        let mut common = CommonAttentionMetadata::new(inputs.clone(), rows, stride, slots)?;
        if self.keeps != Keeps::Tokens {
            common.causal_override = Some(Causal::All(false));
        }
        if self.keeps == Keeps::Encoded {
            // Keys and values come from the encoder's tokens of this step, not from the decoder's.
            common.slot_mapping = common.slot_mapping.slice(0..plan.encoder_ids.len());
        }
        Ok(common)
    }
}
