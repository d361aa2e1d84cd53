//! Lifetime: the model, one per attention group and micro-batch. Class 2 of 3: splits a step, says how many blocks its decodes
//! take, and owns the workspaces.

use super::{
    TritonMlaConfig,
    rules::{LATENT, NAME},
};
use crate::{
    CudaExec,
    backends::{
        common::refuse,
        latent::{LatentGroup, LatentSizes, MOST_SHARED, PrefillWork, alloc},
    },
    kernels::triton::{LatentPlan, most_latent_part_rows},
};
use headway_attention::{
    BuilderPlan, CommonAttentionMetadata, DecodeSplit, GroupInfo, MetadataBuilder, Result, RuleBook,
    group::arith::mla::capture_decodes_only,
};
use headway_tensor::{DeviceMem, View};
use std::sync::Arc;

/// Multiprocessors where the device is not known yet.
const USUAL_MULTIPROCESSORS: usize = 132;

/// Builds [`TritonMlaMetadata`].
pub struct TritonMlaBuilder {
    group: LatentGroup,
    multiprocessors: usize,
    parts: Arc<Parts>,
}

/// What decodes whose keys are divided leave between their two kernels.
#[derive(Debug)]
pub(super) struct Parts {
    /// Rows that there is room for.
    pub rows: usize,
    /// `[rows, rank]`, float32.
    pub out: Arc<dyn DeviceMem>,
    /// `[rows, 2]`, float32.
    pub sums: Arc<dyn DeviceMem>,
}

/// A step: where its numbers are on the device, how many blocks take its decodes, and its prefills' passes.
#[derive(Debug)]
pub struct TritonMlaMetadata {
    pub(super) query_start_loc: View<i32>,
    pub(super) seq_lens: View<i32>,
    pub(super) prefills: PrefillWork,
    pub(super) split: DecodeSplit,
    /// Requests that the decodes' rows are looked for among.
    pub(super) num_reqs: usize,
    pub(super) plan: LatentPlan,
    pub(super) parts: Arc<Parts>,
}

impl TritonMlaMetadata {
    /// How often the prefills' workspace is filled.
    pub fn num_passes(&self) -> usize {
        self.prefills.passes.len()
    }
}

/// The sizes of a group on a device with so much shared memory a block.
fn sizes(group: &GroupInfo, config: &TritonMlaConfig, shared_per_block: usize) -> Result<LatentSizes> {
    let sizes = LatentSizes::new(NAME, group, config.workspace_tokens, shared_per_block)?;
    let choose = |what: String| refuse(NAME, what, "choose another backend for these layers");
    if (sizes.dims.rank, sizes.dims.rope) != LATENT {
        return Err(choose(format!("latents of {} + {}", sizes.dims.rank, sizes.dims.rope)));
    }
    if group.batch_invariant {
        return Err(choose("batch invariance".into()));
    }
    Ok(sizes)
}

/// Bytes of partial results, and of their sums.
fn part_bytes(multiprocessors: usize) -> [usize; 2] {
    let rows = most_latent_part_rows(multiprocessors);
    [rows * LATENT.0 * size_of::<f32>(), rows * 2 * size_of::<f32>()]
}

impl MetadataBuilder for TritonMlaBuilder {
    type Exec = CudaExec;
    type Config = TritonMlaConfig;
    type Metadata = TritonMlaMetadata;

    fn plan(group: &GroupInfo, rules: &RuleBook, config: &TritonMlaConfig) -> Result<BuilderPlan> {
        let sizes = sizes(group, config, MOST_SHARED)?;
        let parts: usize = part_bytes(USUAL_MULTIPROCESSORS).iter().sum();
        Ok(BuilderPlan {
            graph_support: rules.graph_support,
            reorder_batch_threshold: Some(sizes.threshold),
            persistent_bytes: sizes.list_bytes(group) as u64,
            workspace_bytes: (sizes.bytes() + parts) as u64,
        })
    }

    fn new(cx: &CudaExec, group: &GroupInfo, _: &BuilderPlan, config: &TritonMlaConfig) -> Result<Self> {
        let sizes = sizes(group, config, cx.info().shared_per_block as usize)?;
        let multiprocessors = cx.info().multiprocessors as usize;
        let rows = most_latent_part_rows(multiprocessors);
        let [out, sums] = part_bytes(multiprocessors);
        Ok(Self {
            group: LatentGroup::new(cx, NAME, group, sizes)?,
            multiprocessors,
            parts: Arc::new(Parts { rows, out: alloc(cx, out)?, sums: alloc(cx, sums)? }),
        })
    }

    fn build(&mut self, cx: &CudaExec, common: &CommonAttentionMetadata) -> Result<TritonMlaMetadata> {
        let (split, prefills) = self.group.split(cx, common)?;
        let x = &common.inputs;
        // Where all rows are decodes', so are those of requests without new tokens, whose number a graph can't know.
        let all = split.decode_tokens == x.num_actual_tokens;
        let num_reqs = if all { x.num_reqs } else { split.decodes };
        let heads = self.group.sizes.dims.heads;
        Ok(TritonMlaMetadata {
            query_start_loc: x.query_start_loc.dev().clone(),
            seq_lens: x.seq_lens.clone(),
            prefills,
            split,
            num_reqs,
            plan: LatentPlan::of(heads, self.multiprocessors, split.decode_tokens, num_reqs),
            parts: Arc::clone(&self.parts),
        })
    }

    fn build_for_capture(
        &mut self,
        cx: &CudaExec,
        common: &CommonAttentionMetadata,
    ) -> Result<TritonMlaMetadata> {
        capture_decodes_only(common, self.group.sizes.threshold)?;
        self.build(cx, common)
    }

    fn split(metadata: &TritonMlaMetadata) -> DecodeSplit {
        metadata.split
    }

    fn frozen(m: &TritonMlaMetadata) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut h = DefaultHasher::new();
        let (p, space) = (&m.prefills, &m.prefills.workspace);
        [p.block_table.addr(), m.query_start_loc.addr(), m.seq_lens.addr()].hash(&mut h);
        [&space.q_latent, &space.out_latent, &m.parts.out, &m.parts.sums].map(|x| x.addr()).hash(&mut h);
        (p.table_stride, m.split.decode_tokens, m.num_reqs, m.plan, p.passes.len()).hash(&mut h);
        h.finish()
    }
}
