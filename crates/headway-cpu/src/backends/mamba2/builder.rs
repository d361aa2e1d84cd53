//! Lifetime: the model, one per attention group and micro-batch. Class 2 of 3: a step's requests, chunks and
//! states, computed once for all layers, and the kernels' memory.

use super::{
    Mamba2Config,
    rules::{NAME, refuse},
};
use crate::{
    CpuExec,
    backends::common::StepLimits,
    kernels::state_space::{MAX_CONV_KERNEL, Plan, Request, StatePage, States, Workspace},
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
use headway_tensor::DType;
use std::sync::Arc;

/// Chunks that the kernels like best, in tokens: the work inside a chunk grows with its length, that of the
/// states shrinks.
const CHUNK: usize = 64;

/// Builds [`Mamba2Metadata`].
#[derive(Debug)]
pub struct Mamba2Builder {
    page: StatePage,
    config: StepConfig,
    limits: StepLimits,
    step: Mamba2Step,
    plan: Arc<Plan>,
    states: Arc<States>,
    workspace: Arc<Workspace>,
    reallocs: usize,
}

/// A step's requests and states, with the memory that its layers run in.
#[derive(Clone, Debug)]
pub struct Mamba2Metadata {
    pub(super) page: StatePage,
    pub(super) plan: Arc<Plan>,
    pub(super) states: Arc<States>,
    pub(super) workspace: Arc<Workspace>,
    split: BatchSplit,
}

impl Mamba2Metadata {
    /// The requests.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Where their states are.
    pub fn states(&self) -> &States {
        &self.states
    }

    /// The kernels' memory.
    pub fn workspace(&self) -> &Arc<Workspace> {
        &self.workspace
    }
}

/// The group's sizes, and how its steps are computed.
fn sizes(group: &GroupInfo) -> Result<(StatePage, StepConfig)> {
    let (spec, chunk) = running_state(group).map_err(|(what, remedy)| refuse(what, remedy))?;
    let page = page_of(spec).map_err(|why| refuse(why, "choose another backend for these layers"))?;
    if group.batch_invariant && page.dtypes().0 != DType::F32 {
        return Err(refuse(
            format!("--batch-invariant with a convolution state of {}", page.dtypes().0),
            "keep that state in float32, as the activations are, or leave the option out",
        ));
    }
    Ok((page, StepConfig::new(spec, chunk_within(chunk, CHUNK))))
}

fn page_of(spec: &MambaSpec) -> std::result::Result<StatePage, String> {
    let dims = Mamba2Dims::of_shapes(&spec.shapes, MAX_CONV_KERNEL)?;
    match spec.dtypes[..] {
        [conv, ssm] => StatePage::new(dims, conv, ssm),
        _ => Err(format!("states of {} element types: two are supported", spec.dtypes.len())),
    }
}

impl Mamba2Builder {
    /// How often metadata that was still alive forced fresh memory to be allocated.
    pub fn reallocs(&self) -> usize {
        self.reallocs
    }

    /// This group's states for the split that `self.step` has.
    fn states(&mut self, plan: &Plan, common: &CommonAttentionMetadata) -> Result<Arc<States>> {
        let lengths = common
            .inputs
            .seq_lens
            .host()
            .ok_or_else(|| AttentionError::Inputs("seq_lens are not on the host".into()))?;
        self.step.states(common, lengths, &self.config)?;
        if Arc::get_mut(&mut self.states).is_none() {
            self.reallocs += 1;
            self.states = Arc::default();
        }
        if let Some(states) = Arc::get_mut(&mut self.states) {
            let blocks = self.step.decode_states.iter().chain(&self.step.prefill_states);
            states.fill(plan, blocks.copied()).map_err(AttentionError::Inputs)?;
        }
        Ok(Arc::clone(&self.states))
    }
}

/// The requests of a step, from what the contract's arithmetic says of it.
fn fill(plan: &mut Plan, step: &Mamba2Step, common: &CommonAttentionMetadata) -> Result<()> {
    let (starts, computed) = (common.inputs.query_start_loc.host(), common.inputs.num_computed_tokens());
    let decodes = step.split.decodes;
    let mut first_chunk = 0;
    let requests = starts.windows(2).enumerate().map(|(r, w)| {
        let rows = w[0] as usize..w[1] as usize;
        match r.checked_sub(decodes) {
            None => Request { rows, fresh: computed[r] == 0, chunks: 0..0 },
            Some(p) => {
                let chunks = first_chunk..(step.chunks.last_chunk_indices[p] + 1) as usize;
                first_chunk = chunks.end;
                Request { rows, fresh: !step.has_initial_state[p], chunks }
            }
        }
    });
    let chunks = step.chunks.cu_chunk_seqlen.windows(2).map(|w| (w[1] - w[0]) as usize);
    plan.fill(requests, chunks).map_err(AttentionError::Inputs)
}

impl MetadataBuilder for Mamba2Builder {
    type Exec = CpuExec;
    type Config = Mamba2Config;
    type Metadata = Mamba2Metadata;
    const UPDATES_BLOCK_TABLE: bool = true;

    fn plan(group: &GroupInfo, rules: &RuleBook, _: &Mamba2Config) -> Result<BuilderPlan> {
        let threads = std::thread::available_parallelism().map_or(1, Into::into);
        let (page, config) = sizes(group)?;
        let workspace = Workspace::bytes(page.dims(), config.chunk_size, group.max_num_tokens, threads);
        Ok(BuilderPlan {
            graph_support: rules.graph_support,
            reorder_batch_threshold: Some(1),
            persistent_bytes: (group.max_num_reqs * size_of::<Request>()) as u64,
            workspace_bytes: workspace as u64,
        })
    }

    fn new(cx: &CpuExec, group: &GroupInfo, _: &BuilderPlan, _: &Mamba2Config) -> Result<Self> {
        let (page, config) = sizes(group)?;
        let workspace =
            Workspace::new(page.dims(), config.chunk_size, group.max_num_tokens, cx.pool().threads())?;
        Ok(Self {
            page,
            config,
            limits: StepLimits::of(group),
            step: Mamba2Step::default(),
            plan: Arc::default(),
            states: Arc::default(),
            workspace: Arc::new(workspace),
            reallocs: 0,
        })
    }

    fn build(&mut self, _: &CpuExec, common: &CommonAttentionMetadata) -> Result<Mamba2Metadata> {
        self.limits.check(NAME, common)?;
        self.step.fill(common, &self.config)?;
        if Arc::get_mut(&mut self.plan).is_none() {
            self.reallocs += 1;
            self.plan = Arc::default();
        }
        if let Some(plan) = Arc::get_mut(&mut self.plan) {
            fill(plan, &self.step, common)?;
        }
        let plan = Arc::clone(&self.plan);
        let states = self.states(&plan, common)?;
        let (page, workspace, split) = (self.page, Arc::clone(&self.workspace), self.step.split);
        Ok(Mamba2Metadata { page, plan, states, workspace, split })
    }

    fn update_block_table(
        &mut self,
        _: &CpuExec,
        first: &Mamba2Metadata,
        common: &CommonAttentionMetadata,
    ) -> Result<Mamba2Metadata> {
        if first.page != self.page {
            return Err(AttentionError::Inputs("block-table update from a group of other states".into()));
        }
        self.step.split = first.split;
        let states = self.states(&first.plan, common)?;
        Ok(Mamba2Metadata { states, ..first.clone() })
    }

    fn split(metadata: &Mamba2Metadata) -> DecodeSplit {
        metadata.split.into()
    }
}
