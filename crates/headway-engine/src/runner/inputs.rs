//! Step inputs: from the scheduler's plan to token ids, positions, lengths, block tables and slot
//! mappings, in buffers that live as long as the model.

use crate::models::decoder::DecoderInput;
use crate::scheduler::{RequestId, StepPlan};
use headway_attention::{
    AttentionError, Causal, CommonAttentionMetadata, KvCacheSpec, Result, StepInputs,
    group::kv::block_table::{SKIP_SLOT, slot},
};
use headway_tensor::{Exec, Persistent, View};
use std::sync::Arc;

/// What a step's forward pass reads besides metadata.
pub(super) struct TokenInputs {
    pub token_ids: View<i32>,
    pub positions: View<i32>,
    pub logits_rows: View<i32>,
}

impl TokenInputs {
    /// As the decoder takes them.
    pub fn decoder(&self) -> DecoderInput<'_> {
        DecoderInput {
            token_ids: &self.token_ids,
            positions: &self.positions,
            logits_rows: &self.logits_rows,
        }
    }
}

/// Persistent buffers of all steps.
pub(super) struct InputBuffers {
    token_ids: Persistent<i32>,
    positions: Persistent<i32>,
    logits_rows: Persistent<i32>,
    query_start_loc: Persistent<i32>,
    seq_lens: Persistent<i32>,
    groups: Vec<GroupBuffers>,
}

struct GroupBuffers {
    block_size: usize,
    /// Whether its layers keep keys and values: an encoder's don't, and see both ways.
    has_cache: bool,
    block_table: Persistent<i32>,
    slot_mapping: Persistent<i64>,
}

impl InputBuffers {
    /// Sized for the largest step; `specs` are the KV cache groups'.
    pub(super) fn new(
        cx: &dyn Exec,
        max_num_reqs: usize,
        max_num_tokens: usize,
        max_model_len: usize,
        specs: &[KvCacheSpec],
    ) -> Self {
        let groups = specs
            .iter()
            .map(|spec| (spec, spec.block_size()))
            .map(|(spec, block_size)| GroupBuffers {
                block_size,
                has_cache: !matches!(spec, KvCacheSpec::EncoderOnly(_)),
                block_table: Persistent::new(cx, max_num_reqs * max_model_len.div_ceil(block_size)),
                slot_mapping: Persistent::new(cx, max_num_tokens),
            })
            .collect();
        Self {
            token_ids: Persistent::new(cx, max_num_tokens),
            positions: Persistent::new(cx, max_num_tokens),
            logits_rows: Persistent::new(cx, max_num_reqs),
            query_start_loc: Persistent::new(cx, max_num_reqs + 1),
            seq_lens: Persistent::new(cx, max_num_reqs),
            groups,
        }
    }

    /// How often a buffer could not be recycled because a view of an earlier step was alive.
    pub(super) fn reallocs(&self) -> usize {
        let own =
            [&self.token_ids, &self.positions, &self.logits_rows, &self.query_start_loc, &self.seq_lens];
        let groups = self.groups.iter().map(|g| g.block_table.reallocs() + g.slot_mapping.reallocs());
        own.iter().map(|p| p.reallocs()).sum::<usize>() + groups.sum::<usize>()
    }

    /// Writes this step's inputs; the common metadata goes into `commons`, one a KV cache group.
    pub(super) fn write<'t>(
        &mut self,
        cx: &dyn Exec,
        plan: &StepPlan,
        table: impl Fn(RequestId, usize) -> Option<&'t [u32]>,
        commons: &mut Vec<CommonAttentionMetadata>,
    ) -> Result<TokenInputs> {
        let n = plan.num_tokens();
        let reqs = &plan.requests;
        let token_ids = self.token_ids.write(cx, n, |o| {
            o.iter_mut().zip(&plan.token_ids).for_each(|(o, &t)| *o = t as i32);
        });
        let positions = self.positions.write(cx, n, |o| {
            for r in reqs {
                let first = r.num_computed_tokens;
                o[r.token_range.clone()].iter_mut().enumerate().for_each(|(i, p)| *p = (first + i) as i32);
            }
        });
        let logits_rows = self.logits_rows.write(cx, plan.num_sampled(), |o| {
            o.iter_mut().zip(plan.sampled()).for_each(|(o, r)| *o = r.token_range.end as i32 - 1);
        });
        let query_start_loc = self.query_start_loc.write_dual(cx, reqs.len() + 1, |o| {
            o[0] = 0;
            o[1..].iter_mut().zip(reqs).for_each(|(o, r)| *o = r.token_range.end as i32);
        });
        let seq_lens = self.seq_lens.write(cx, reqs.len(), |o| {
            o.iter_mut().zip(reqs).for_each(|(o, r)| *o = r.seq_len() as i32);
        });
        let bound = reqs.iter().map(|r| r.seq_len() as i32).collect();
        let mut inputs = StepInputs::new(query_start_loc, seq_lens, bound)?;
        inputs.positions = Some(positions.clone());
        inputs.is_prefilling = Some(reqs.iter().map(|r| r.is_prefilling).collect());
        let inputs = Arc::new(inputs);
        commons.clear();
        for (index, group) in self.groups.iter_mut().enumerate() {
            commons.push(group.write(cx, plan, &inputs, |id| table(id, index))?);
        }
        Ok(TokenInputs { token_ids, positions, logits_rows })
    }
}

impl GroupBuffers {
    fn write<'t>(
        &mut self,
        cx: &dyn Exec,
        plan: &StepPlan,
        inputs: &Arc<StepInputs>,
        table: impl Fn(RequestId) -> Option<&'t [u32]>,
    ) -> Result<CommonAttentionMetadata> {
        if !self.has_cache {
            let table = self.block_table.write_dual(cx, 0, |_| ());
            let slots = self.slot_mapping.write(cx, plan.num_tokens(), |o| o.fill(SKIP_SLOT));
            let mut common = CommonAttentionMetadata::new(inputs.clone(), table, 0, slots)?;
            common.causal_override = Some(Causal::All(false));
            return Ok(common);
        }
        let size = self.block_size;
        let missing = |id: RequestId| AttentionError::Inputs(format!("request {id} has no block table"));
        // Rows as wide as this step needs; entries past a request's blocks are the null block.
        let stride = inputs.max_seq_len.div_ceil(size);
        let mut error = None;
        let block_table = self.block_table.write_dual(cx, plan.requests.len() * stride, |o| {
            for (row, r) in o.chunks_exact_mut(stride.max(1)).zip(&plan.requests) {
                let used = r.seq_len().div_ceil(size);
                match table(r.id).and_then(|t| t.get(..used)) {
                    Some(blocks) => {
                        row.iter_mut().zip(blocks).for_each(|(o, &b)| *o = b as i32);
                        row[used..].fill(0);
                    }
                    None => error = Some(missing(r.id)),
                }
            }
        });
        if let Some(e) = error {
            return Err(e);
        }
        let blocks = block_table.host();
        let slot_mapping = self.slot_mapping.write(cx, plan.num_tokens(), |o| {
            for (i, r) in plan.requests.iter().enumerate() {
                let row = &blocks[i * stride..(i + 1) * stride];
                for (t, o) in o[r.token_range.clone()].iter_mut().enumerate() {
                    *o = slot(row, size, r.num_computed_tokens + t).unwrap_or(SKIP_SLOT);
                }
            }
        });
        CommonAttentionMetadata::new(inputs.clone(), block_table, stride, slot_mapping)
    }
}
