//! Lifetime: the model, one per attention group and micro-batch. Class 2 of 3: says how many blocks a step takes, from its
//! tokens and requests, and owns the room for partial results.

use super::{TritonAttnConfig, rules::NAME};
use crate::{
    CudaExec,
    backends::common::{StepLimits, causal_flags, refuse, softmax_shape},
    kernels::{
        attention::Shape,
        triton::{Mask, Plan, most_part_rows, slots},
    },
};
use headway_attention::{
    AttentionError, BuilderPlan, Causal, CommonAttentionMetadata, GroupInfo, MetadataBuilder, Result,
    RuleBook, group::kv::spec::KvQuantMode,
};
use headway_tensor::{DType, Persistent, Tensor, View};
use std::sync::Arc;

/// Blocks of the kernel that run at once where the device is not known yet.
const USUAL_SLOTS: usize = 264;

/// Builds [`TritonAttnMetadata`].
pub struct TritonAttnBuilder {
    shape: Shape,
    limits: StepLimits,
    slots: usize,
    /// Causal flags that came on the host.
    flags: Persistent<u8>,
    scratch: Arc<Scratch>,
}

/// Rows out of parts of their keys, between two launches; layers run one after another.
#[derive(Debug)]
pub(super) struct Scratch {
    /// `[part rows, head size]`, float32.
    pub part_out: Tensor,
    /// `[part rows, 2]`, float32.
    pub part_sums: Tensor,
}

/// A step: where its numbers are on the device, and how many blocks take it.
#[derive(Clone, Debug)]
pub struct TritonAttnMetadata {
    pub(super) shape: Shape,
    pub(super) block_table: View<i32>,
    pub(super) table_stride: usize,
    pub(super) query_start_loc: View<i32>,
    pub(super) seq_lens: View<i32>,
    pub(super) mask: Mask,
    pub(super) num_reqs: usize,
    /// New tokens, padding included.
    pub(super) num_tokens: usize,
    pub(super) plan: Plan,
    pub(super) scratch: Arc<Scratch>,
}

fn shape_of(group: &GroupInfo) -> Result<Shape> {
    softmax_shape(NAME, group, &[KvQuantMode::None])
}

impl TritonAttnBuilder {
    fn mask(&mut self, cx: &CudaExec, common: &CommonAttentionMetadata) -> Mask {
        match (common.causal(), causal_flags(common)) {
            (_, Some(flags)) => Mask::Flags(flags.clone()),
            (Causal::All(causal), _) => Mask::All(*causal),
            (answers, None) => Mask::Flags(self.flags.write(cx, common.inputs.num_reqs, |to| {
                to.iter_mut().enumerate().for_each(|(i, t)| *t = u8::from(answers.of(i)));
            })),
        }
    }

    fn metadata(&self, mask: Mask, common: &CommonAttentionMetadata) -> TritonAttnMetadata {
        let x = &common.inputs;
        TritonAttnMetadata {
            shape: self.shape,
            block_table: common.block_table.dev().clone(),
            table_stride: common.block_table_stride,
            query_start_loc: x.query_start_loc.dev().clone(),
            seq_lens: x.seq_lens.clone(),
            mask,
            num_reqs: x.num_reqs,
            num_tokens: x.num_actual_tokens,
            plan: Plan::of(&self.shape, self.slots, x.num_actual_tokens, x.num_reqs),
            scratch: Arc::clone(&self.scratch),
        }
    }
}

impl MetadataBuilder for TritonAttnBuilder {
    type Exec = CudaExec;
    type Config = TritonAttnConfig;
    type Metadata = TritonAttnMetadata;
    const UPDATES_BLOCK_TABLE: bool = true;

    fn plan(group: &GroupInfo, rules: &RuleBook, _: &TritonAttnConfig) -> Result<BuilderPlan> {
        let workspace = most_part_rows(USUAL_SLOTS) * (shape_of(group)?.head_size + 2) * 4;
        Ok(BuilderPlan {
            graph_support: rules.graph_support,
            reorder_batch_threshold: rules.reorder_batch_threshold,
            persistent_bytes: group.max_num_reqs as u64,
            workspace_bytes: workspace as u64,
        })
    }

    fn new(cx: &CudaExec, group: &GroupInfo, _: &BuilderPlan, _: &TritonAttnConfig) -> Result<Self> {
        let (shape, slots) = (shape_of(group)?, slots(cx.info()));
        let rows = most_part_rows(slots);
        let zeros = |width| Tensor::zeros(cx, DType::F32, &[rows, width]);
        let scratch = Scratch { part_out: zeros(shape.head_size)?, part_sums: zeros(2)? };
        let flags = Persistent::new(cx, group.max_num_reqs.max(1))?;
        Ok(Self { shape, limits: StepLimits::of(group), slots, flags, scratch: Arc::new(scratch) })
    }

    fn build(&mut self, cx: &CudaExec, common: &CommonAttentionMetadata) -> Result<TritonAttnMetadata> {
        self.limits.check(NAME, common)?;
        if common.inputs.mm_prefix_ranges.as_ref().is_some_and(|r| r.iter().any(|r| !r.is_empty())) {
            return Err(refuse(NAME, "bidirectional multimodal prefixes", "choose another backend"));
        }
        let mask = self.mask(cx, common);
        Ok(self.metadata(mask, common))
    }

    fn update_block_table(
        &mut self,
        _: &CudaExec,
        first: &TritonAttnMetadata,
        common: &CommonAttentionMetadata,
    ) -> Result<TritonAttnMetadata> {
        if first.shape != self.shape {
            return Err(AttentionError::Inputs("block-table update from a group of other heads".into()));
        }
        Ok(self.metadata(first.mask.clone(), common))
    }

    fn frozen(m: &TritonAttnMetadata) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut h = DefaultHasher::new();
        [m.block_table.addr(), m.query_start_loc.addr(), m.seq_lens.addr()].hash(&mut h);
        match &m.mask {
            Mask::All(causal) => (*causal, 0).hash(&mut h),
            Mask::Flags(v) => (true, v.addr()).hash(&mut h),
        }
        (m.table_stride, m.num_reqs, m.num_tokens, m.plan).hash(&mut h);
        m.scratch.part_out.view().device_addr().hash(&mut h);
        h.finish()
    }
}
