//! Lifetime: the model, one per attention group and micro-batch. Class 2 of 3: splits a step, deals out its decodes' pages
//! once for all layers, and owns the workspaces.

use super::{FlashMlaConfig, rules::NAME};
use crate::{
    CudaExec,
    backends::{
        common::refuse,
        extensions::{open, pages_end},
        latent::{LatentGroup, LatentSizes, MOST_SHARED, PrefillWork, alloc},
    },
    kernels::flash_mla::{LATENT, MlaBatch, NUMBERS, ROW, deal, scratch_bytes, shares},
    modules::extension::{Extension, Extensions},
};
use headway_attention::{
    AttentionError, BuilderPlan, CommonAttentionMetadata, DecodeSplit, GroupInfo, MetadataBuilder, Result,
    RuleBook, group::arith::mla::capture_decodes_only,
};
use headway_tensor::{DeviceMem, Persistent};
use std::sync::Arc;

/// Multiprocessors where the device is not known yet.
const USUAL_MULTIPROCESSORS: u32 = 132;
/// Bytes of an activation.
const ACTIVATION: usize = 2;

/// Builds [`FlashMlaMetadata`].
pub struct FlashMlaBuilder {
    module: Arc<Extension>,
    group: LatentGroup,
    space: Arc<Space>,
    numbers: Persistent<i32>,
    parts: Persistent<i32>,
    /// Kept from step to step.
    dealt: [Vec<i32>; 2],
}

/// What a group's decodes run in, one layer after another.
#[derive(Debug)]
pub(super) struct Space {
    /// `[decode tokens, heads, 576]`.
    pub q: Arc<dyn DeviceMem>,
    /// Partial results.
    pub scratch: Arc<dyn DeviceMem>,
}

/// A step's deal and passes, with the memory that its layers run in.
#[derive(Debug)]
pub struct FlashMlaMetadata {
    pub(super) module: Arc<Extension>,
    pub(super) decodes: Option<MlaBatch>,
    pub(super) prefills: PrefillWork,
    pub(super) space: Arc<Space>,
    split: DecodeSplit,
}

/// The sizes of a group on a device with so much shared memory a block.
fn sizes(group: &GroupInfo, config: &FlashMlaConfig, shared_per_block: usize) -> Result<LatentSizes> {
    let sizes = LatentSizes::new(NAME, group, config.workspace_tokens, shared_per_block)?;
    let choose = |what: String| refuse(NAME, what, "choose another backend for these layers");
    if (sizes.dims.rank, sizes.dims.rope) != LATENT {
        return Err(choose(format!("latents of {} + {}", sizes.dims.rank, sizes.dims.rope)));
    }
    match (group.batch_invariant, sizes.threshold) {
        (true, _) => Err(choose("batch invariance".into())),
        (false, 1) => Ok(sizes),
        (false, n) => Err(choose(format!("decodes of {n} new tokens"))),
    }
}

/// Bytes of the decodes' queries, and of their partial results.
fn space_bytes(sizes: &LatentSizes, multiprocessors: u32) -> [usize; 2] {
    let (tokens, heads) = (sizes.decode_tokens, sizes.dims.heads);
    [tokens * heads * ROW * ACTIVATION, scratch_bytes(multiprocessors, heads, tokens)]
}

impl MetadataBuilder for FlashMlaBuilder {
    type Exec = CudaExec;
    type Config = FlashMlaConfig;
    type Metadata = FlashMlaMetadata;

    fn plan(group: &GroupInfo, rules: &RuleBook, config: &FlashMlaConfig) -> Result<BuilderPlan> {
        let sizes = sizes(group, config, MOST_SHARED)?;
        let lists = USUAL_MULTIPROCESSORS as usize * NUMBERS + group.max_num_reqs + 1;
        let space: usize = space_bytes(&sizes, USUAL_MULTIPROCESSORS).iter().sum();
        Ok(BuilderPlan {
            graph_support: rules.graph_support,
            reorder_batch_threshold: rules.reorder_batch_threshold,
            persistent_bytes: (lists * size_of::<i32>() + sizes.list_bytes(group)) as u64,
            workspace_bytes: (sizes.bytes() + space) as u64,
        })
    }

    fn new(cx: &CudaExec, group: &GroupInfo, _: &BuilderPlan, config: &FlashMlaConfig) -> Result<Self> {
        let sizes = sizes(group, config, cx.info().shared_per_block as usize)?;
        let multiprocessors = cx.info().multiprocessors;
        let [q, scratch] = space_bytes(&sizes, multiprocessors);
        Ok(Self {
            module: open(NAME, Extensions::FlashMla)?,
            group: LatentGroup::new(cx, NAME, group, sizes)?,
            space: Arc::new(Space { q: alloc(cx, q)?, scratch: alloc(cx, scratch)? }),
            numbers: Persistent::new(cx, shares(multiprocessors, sizes.dims.heads) * NUMBERS)?,
            parts: Persistent::new(cx, sizes.decode_tokens + 1)?,
            dealt: [vec![], vec![]],
        })
    }

    fn build(&mut self, cx: &CudaExec, common: &CommonAttentionMetadata) -> Result<FlashMlaMetadata> {
        let (split, prefills) = self.group.split(cx, common)?;
        let decodes = if split.decode_tokens > 0 { Some(self.decodes(cx, common, split)?) } else { None };
        Ok(FlashMlaMetadata {
            module: Arc::clone(&self.module),
            decodes,
            prefills,
            space: Arc::clone(&self.space),
            split,
        })
    }

    fn build_for_capture(
        &mut self,
        cx: &CudaExec,
        common: &CommonAttentionMetadata,
    ) -> Result<FlashMlaMetadata> {
        capture_decodes_only(common, self.group.sizes.threshold)?;
        self.build(cx, common)
    }

    fn split(metadata: &FlashMlaMetadata) -> DecodeSplit {
        metadata.split
    }

    fn frozen(m: &FlashMlaMetadata) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut h = DefaultHasher::new();
        if let Some(d) = &m.decodes {
            [&d.seq_lens, &d.block_table, &d.numbers, &d.parts].map(|v| (v.addr(), v.len())).hash(&mut h);
            d.table_stride.hash(&mut h);
        }
        let space = &m.prefills.workspace;
        [&space.q_latent, &space.out_latent, &m.space.q, &m.space.scratch].map(|x| x.addr()).hash(&mut h);
        (m.split.decode_tokens, m.prefills.passes.len()).hash(&mut h);
        h.finish()
    }
}

impl FlashMlaBuilder {
    /// The first requests are the decodes, one new token each; rows of padding behind them are requests without keys.
    fn decodes(
        &mut self,
        cx: &CudaExec,
        common: &CommonAttentionMetadata,
        split: DecodeSplit,
    ) -> Result<MlaBatch> {
        let x = &common.inputs;
        // Rows that no request is left for are nobody's.
        let rows = split.decode_tokens.min(x.num_reqs);
        let lens = &x.seq_lens_upper_bound[..rows];
        let alike = x.query_start_loc.host().windows(2).zip(lens).all(|(w, &len)| {
            let new = w[1] - w[0];
            new == 1 || (new == 0 && len == 0)
        });
        if !alike {
            return Err(AttentionError::Inputs(
                "decodes that do not come first, one new token each, with requests without keys behind them"
                    .into(),
            ));
        }
        let [numbers, parts] = &mut self.dealt;
        deal(lens, self.numbers.capacity() / NUMBERS, numbers, parts);
        Ok(MlaBatch {
            seq_lens: x.seq_lens.slice(0..rows),
            block_table: common.block_table.dev().clone(),
            table_stride: common.block_table_stride,
            pages_end: pages_end(common, rows, crate::kernels::flash_mla::PAGE)?,
            numbers: self.numbers.write(cx, numbers.len(), |to| to.copy_from_slice(numbers)),
            parts: self.parts.write(cx, parts.len(), |to| to.copy_from_slice(parts)),
        })
    }
}
