//! Lifetime: the model, one per attention group and micro-batch. Class 2 of 3: a step's requests, chunks, segments and
//! states, listed once for all layers, and the kernels' memory.

use super::{
    Mamba2Config,
    rules::{NAME, refuse},
};
use crate::{
    CudaExec,
    backends::common::StepLimits,
    kernels::state_space::{
        Batch, Bounds, CHUNK, Chunk, Lists, MAX_CONV_KERNEL, Request, Segment, StatePage, Workspace,
    },
};
use headway_attention::{
    AttentionError, BuilderPlan, CommonAttentionMetadata, DecodeSplit, GroupInfo, MambaSpec, MetadataBuilder,
    Result, RuleBook,
    group::arith::{
        mamba2::{Mamba2Config as StepConfig, Mamba2Step, chunk_within, running_state},
        mamba2_dims::Mamba2Dims,
    },
    step::batch::BatchSplit,
};
use headway_tensor::{Persistent, View};
use std::sync::Arc;

/// Multiprocessors, and bytes of shared memory of each, where the device is not known yet.
const USUAL_DEVICE: (usize, usize) = (132, 228 << 10);
/// Blocks of a launch in the direction of chunks and of requests.
const MOST_BLOCKS: usize = 65535;

/// Builds [`Mamba2Metadata`].
#[derive(Debug)]
pub struct Mamba2Builder {
    page: StatePage,
    config: StepConfig,
    limits: StepLimits,
    bounds: Bounds,
    stepwise: bool,
    step: Mamba2Step,
    lists: Arc<Lists>,
    requests: Persistent<Request>,
    chunks: Persistent<Chunk>,
    segments: Persistent<Segment>,
    /// `None`: a group that only swaps block tables runs in another one's. Should a step's batches differ from that one's,
    /// it is made then.
    workspace: Option<Arc<Workspace>>,
}

/// A step's lists and states, with the memory that its layers run in.
#[derive(Clone, Debug)]
pub struct Mamba2Metadata {
    pub(super) page: StatePage,
    lists: Arc<Lists>,
    requests: View<Request>,
    chunks: View<Chunk>,
    segments: View<Segment>,
    largest_block: usize,
    stepwise: bool,
    workspace: Arc<Workspace>,
    split: BatchSplit,
}

impl Mamba2Metadata {
    /// As the kernels take it.
    pub(super) fn batch(&self) -> Batch<'_> {
        Batch {
            lists: &self.lists,
            requests: &self.requests,
            chunks: &self.chunks,
            segments: &self.segments,
            largest_block: self.largest_block,
            stepwise: self.stepwise,
            workspace: &self.workspace,
        }
    }

    /// The step's lists.
    pub fn lists(&self) -> &Lists {
        &self.lists
    }
}

fn page_of(spec: &MambaSpec) -> std::result::Result<StatePage, String> {
    let dims = Mamba2Dims::of_shapes(&spec.shapes, MAX_CONV_KERNEL)?;
    match spec.dtypes[..] {
        [conv, ssm] => StatePage::new(dims, conv, ssm),
        _ => Err(format!("states of {} element types: two are supported", spec.dtypes.len())),
    }
}

/// The group's sizes, how its steps are computed, and what bounds their lists.
fn sizes(group: &GroupInfo, device: (usize, usize)) -> Result<(StatePage, StepConfig, Bounds)> {
    let (spec, chunk) = running_state(group).map_err(|(what, remedy)| refuse(what, remedy))?;
    let page = page_of(spec).map_err(|why| refuse(why, "choose another backend for these layers"))?;
    let chunk = chunk_within(chunk, CHUNK);
    let bounds = Bounds {
        segments_at_once: page.segments_at_once(device.0, device.1),
        max_num_reqs: group.max_num_reqs,
        max_num_tokens: group.max_num_tokens,
        chunk,
    };
    if bounds.chunks().max(bounds.segments()) > MOST_BLOCKS {
        return Err(refuse(
            format!("steps of up to {} chunks", bounds.chunks()),
            "lower --max-num-batched-tokens or --max-num-seqs",
        ));
    }
    Ok((page, StepConfig::new(spec, chunk), bounds))
}

/// Lists to write: metadata that is still alive keeps those it has.
fn own(lists: &mut Arc<Lists>) -> Result<&mut Lists> {
    if Arc::get_mut(lists).is_none() {
        *lists = Arc::default();
    }
    Arc::get_mut(lists)
        .ok_or_else(|| AttentionError::Inputs("a step's lists are read while they are made".into()))
}

impl Mamba2Builder {
    fn workspace(&mut self, cx: &CudaExec) -> Result<Arc<Workspace>> {
        if let Some(w) = &self.workspace {
            return Ok(Arc::clone(w));
        }
        let made = Arc::new(Workspace::new(cx, &self.page, &self.bounds)?);
        Ok(Arc::clone(self.workspace.insert(made)))
    }

    /// Writes this group's states for the split that `self.step` has into the lists, and uploads them.
    fn place(
        &mut self,
        cx: &CudaExec,
        common: &CommonAttentionMetadata,
        idle: bool,
    ) -> Result<View<Request>> {
        // The bounds are exact: nothing is drafted.
        self.step.states(common, &common.inputs.seq_lens_upper_bound, &self.config)?;
        let (step, starts) = (&self.step, common.inputs.query_start_loc.host());
        let blocks: Vec<i32> = step.decode_states.iter().chain(&step.prefill_states).copied().collect();
        let lists = own(&mut self.lists)?;
        lists.place(blocks.into_iter(), starts, idle).map_err(AttentionError::Inputs)?;
        let from = lists.requests();
        Ok(self.requests.write(cx, from.len(), |to| to.copy_from_slice(from)))
    }

    fn metadata(
        &mut self,
        cx: &CudaExec,
        common: &CommonAttentionMetadata,
        idle: bool,
    ) -> Result<Mamba2Metadata> {
        self.limits.check(NAME, common)?;
        self.step.fill(common, &self.config)?;
        let (step, bounds) = (&self.step, self.bounds);
        let (starts, computed) = (common.inputs.query_start_loc.host(), common.inputs.num_computed_tokens());
        own(&mut self.lists)?
            .fill(
                &bounds,
                starts,
                step.split.decodes,
                |r| computed[r] == 0,
                &step.chunks.cu_chunk_seqlen,
                common.inputs.num_actual_tokens,
            )
            .map_err(AttentionError::Inputs)?;
        let requests = self.place(cx, common, idle)?;
        let lists = Arc::clone(&self.lists);
        let (chunks, segments) = (lists.chunks(), lists.segments());
        Ok(Mamba2Metadata {
            page: self.page,
            requests,
            chunks: self.chunks.write(cx, chunks.len(), |to| to.copy_from_slice(chunks)),
            segments: self.segments.write(cx, segments.len(), |to| to.copy_from_slice(segments)),
            largest_block: lists.largest_block(),
            stepwise: self.stepwise,
            workspace: self.workspace(cx)?,
            split: self.step.split,
            lists,
        })
    }
}

impl MetadataBuilder for Mamba2Builder {
    type Exec = CudaExec;
    type Config = Mamba2Config;
    type Metadata = Mamba2Metadata;
    const UPDATES_BLOCK_TABLE: bool = true;

    fn plan(group: &GroupInfo, rules: &RuleBook, _: &Mamba2Config) -> Result<BuilderPlan> {
        let (page, _, bounds) = sizes(group, USUAL_DEVICE)?;
        let lists = bounds.max_num_reqs * size_of::<Request>()
            + bounds.chunks() * size_of::<Chunk>()
            + bounds.segments() * size_of::<Segment>();
        let workspace = if group.shares_metadata { 0 } else { Workspace::bytes(&page, &bounds) };
        Ok(BuilderPlan {
            graph_support: rules.graph_support,
            reorder_batch_threshold: Some(1),
            persistent_bytes: lists as u64,
            workspace_bytes: workspace as u64,
        })
    }

    fn new(cx: &CudaExec, group: &GroupInfo, _: &BuilderPlan, _: &Mamba2Config) -> Result<Self> {
        let info = cx.info();
        let device = (info.multiprocessors as usize, info.shared_per_multiprocessor as usize);
        let (page, config, bounds) = sizes(group, device)?;
        let workspace = match group.shares_metadata {
            true => None,
            false => Some(Arc::new(Workspace::new(cx, &page, &bounds)?)),
        };
        Ok(Self {
            page,
            config,
            limits: StepLimits::of(group),
            bounds,
            stepwise: group.batch_invariant || cx.batch_invariant(),
            step: Mamba2Step::default(),
            lists: Arc::default(),
            requests: Persistent::new(cx, bounds.max_num_reqs)?,
            chunks: Persistent::new(cx, bounds.chunks())?,
            segments: Persistent::new(cx, bounds.segments())?,
            workspace,
        })
    }

    fn build(&mut self, cx: &CudaExec, common: &CommonAttentionMetadata) -> Result<Mamba2Metadata> {
        self.metadata(cx, common, false)
    }

    /// Requests need no blocks: a recording keeps no state.
    fn build_for_capture(
        &mut self,
        cx: &CudaExec,
        common: &CommonAttentionMetadata,
    ) -> Result<Mamba2Metadata> {
        let metadata = self.metadata(cx, common, true)?;
        match metadata.split.prefills {
            0 => Ok(metadata),
            n => Err(AttentionError::Graph(format!(
                "{NAME} captures decodes of one token each, and {n} requests of this step prefill"
            ))),
        }
    }

    fn update_block_table(
        &mut self,
        cx: &CudaExec,
        first: &Mamba2Metadata,
        common: &CommonAttentionMetadata,
    ) -> Result<Mamba2Metadata> {
        if first.page != self.page {
            return Err(AttentionError::Inputs("block-table update from a group of other states".into()));
        }
        self.step.split = first.split;
        own(&mut self.lists)?.clone_from(&first.lists);
        // The first group's step was a recording's where none of its requests has a block.
        let requests = self.place(cx, common, first.largest_block == 0)?;
        let (lists, largest_block) = (Arc::clone(&self.lists), self.lists.largest_block());
        Ok(Mamba2Metadata { lists, requests, largest_block, ..first.clone() })
    }

    fn split(metadata: &Mamba2Metadata) -> DecodeSplit {
        metadata.split.into()
    }

    fn frozen(m: &Mamba2Metadata) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut h = DefaultHasher::new();
        let addresses = [m.requests.addr(), m.chunks.addr(), m.segments.addr(), m.workspace.addr()];
        let counts = [m.lists.decodes(), m.chunks.len(), m.segments.len(), m.lists.covered()];
        (addresses, counts, m.lists.segmented(), m.stepwise).hash(&mut h);
        h.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_attention::KvCacheSpec;
    use headway_tensor::DType;

    #[test]
    fn the_plan_counts_the_workspace_of_groups_that_have_one() {
        // 64 heads of 64, states of 128 in 8 groups, a convolution of 4.
        let shapes = vec![vec![3, 64 * 64 + 2 * 8 * 128], vec![64, 64, 128]];
        let spec = MambaSpec {
            chunk_size: Some(256),
            ..MambaSpec::new(4096, shapes, vec![DType::BF16, DType::F32])
        };
        let group = GroupInfo {
            max_num_reqs: 16,
            max_num_tokens: 8192,
            max_model_len: 4096,
            ..GroupInfo::new(KvCacheSpec::Mamba(spec), 64)
        };
        let bytes = |group: &GroupInfo| {
            Mamba2Builder::plan(group, &RuleBook::default(), &Mamba2Config::default()).unwrap()
        };
        let own = bytes(&group);
        let (page, _, bounds) = sizes(&group, USUAL_DEVICE).unwrap();
        assert_eq!(own.workspace_bytes, Workspace::bytes(&page, &bounds) as u64);
        assert!(own.workspace_bytes > 100 << 20, "{}", own.workspace_bytes);
        let shared = bytes(&GroupInfo { shares_metadata: true, ..group.clone() });
        assert_eq!((shared.workspace_bytes, shared.persistent_bytes), (0, own.persistent_bytes));
    }
}
