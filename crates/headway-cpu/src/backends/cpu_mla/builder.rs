//! Lifetime: the model, one per attention group and micro-batch. Class 2 of 3: splits a step into decodes and prefills,
//! plans both once for all layers, and owns the memory that the layers run in.

use super::{CpuMlaConfig, Sizes, rules::NAME};
use crate::{
    CpuExec,
    backends::common::{StepLimits, refuse_mm_prefixes},
    kernels::{
        attention::{Batch, GROUP, Plan, Request, Shape, Workspace},
        mla::{Dims, Pages},
    },
};
use headway_attention::{
    AttentionError, BuilderPlan, CommonAttentionMetadata, ContextParallel, DecodeSplit, GroupInfo,
    MetadataBuilder, Result, RuleBook,
    group::arith::{
        context_chunks::ChunkWorkspace,
        mla::{DecodeQueries, MlaConfig, MlaStep},
        prefill_passes::{Attends, Pass, PassWorkspace, passes},
    },
};
use headway_tensor::View;
use std::{
    ops::Range,
    sync::{Arc, Mutex},
};

/// Builds [`CpuMlaMetadata`].
#[derive(Debug)]
pub struct CpuMlaBuilder {
    sizes: Sizes,
    block_size: usize,
    limits: StepLimits,
    step: MlaStep,
    plans: Vec<Arc<Plan>>,
    memory: Arc<Mutex<Memory>>,
}

/// A step's work, with the memory that its layers run in.
#[derive(Debug)]
pub struct CpuMlaMetadata {
    pub(super) split: DecodeSplit,
    pub(super) dims: Dims,
    /// Decode rows in slabs.
    pub(super) slabs: Vec<(Range<usize>, Batch)>,
    /// Prefill rows in passes.
    pub(super) passes: Vec<(Pass, Batch)>,
    /// `[requests, stride]`.
    pub(super) table: View<i32>,
    pub(super) stride: usize,
    pub(super) memory: Arc<Mutex<Memory>>,
}

/// What a layer's call works in: one call at a time.
#[derive(Debug)]
pub(super) struct Memory {
    /// `[heads, slab rows, rank + rope]`, `[heads, slab rows, rank]`, `[heads, slab rows, v]`.
    pub(super) slab: [Vec<f32>; 3],
    pub(super) decode: Workspace,
    /// `[slots, rank + rope]`.
    pub(super) latents: Vec<f32>,
    pub(super) pages: Pages,
    pub(super) prefill: Option<Workspace>,
    /// `[prefill rows, heads]`.
    pub(super) lse: Vec<f32>,
    /// Queries and results in float32 where activations are narrower; grown by the first such call.
    pub(super) wide: [Vec<f32>; 2],
}

impl Memory {
    fn new(sizes: &Sizes, threads: usize) -> Result<Self> {
        let slots = sizes.slots();
        Ok(Self {
            slab: sizes.slab_floats().map(|n| vec![0.0; n]),
            decode: Workspace::new(&sizes.decode, threads)?,
            latents: vec![0.0; slots * sizes.dims.latent()],
            pages: Pages::new(&sizes.dims, slots),
            prefill: if slots == 0 { None } else { Some(Workspace::new(&sizes.prefill, threads)?) },
            lse: vec![0.0; sizes.prefill_rows * sizes.dims.heads],
            wide: [vec![], vec![]],
        })
    }
}

impl CpuMlaMetadata {
    /// How often the prefills' workspace is filled.
    pub fn num_passes(&self) -> usize {
        self.passes.len()
    }
}

impl CpuMlaBuilder {
    /// What the group is sized by.
    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    fn config(&self) -> MlaConfig {
        MlaConfig {
            threshold: self.sizes.threshold,
            queries: DecodeQueries::Varlen,
            short_extends_as_decodes: true,
            workspace: ChunkWorkspace {
                tokens: self.sizes.workspace_tokens,
                alignment: GROUP,
                context_parallel: ContextParallel::default(),
            },
        }
    }

    /// A plan that no metadata refers to, built of these requests.
    fn plan(
        &mut self,
        cx: &CpuExec,
        shape: &Shape,
        requests: impl Iterator<Item = Request>,
    ) -> Result<Arc<Plan>> {
        let free = self.plans.iter_mut().position(|p| Arc::get_mut(p).is_some());
        let at = free.unwrap_or(self.plans.len());
        if free.is_none() {
            self.plans.push(Arc::default());
        }
        if let Some(plan) = Arc::get_mut(&mut self.plans[at]) {
            plan.build(shape, cx.pool().threads(), None, requests).map_err(AttentionError::Inputs)?;
        }
        Ok(Arc::clone(&self.plans[at]))
    }

    /// The decodes, at most so many rows at a time; a long one is cut, and its later rows see what they saw.
    fn slabs(
        &mut self,
        cx: &CpuExec,
        common: &CommonAttentionMetadata,
    ) -> Result<Vec<(Range<usize>, Batch)>> {
        let x = &common.inputs;
        let starts = x.query_start_loc.host();
        let lengths = x.seq_lens.host();
        let lengths = lengths.ok_or_else(|| AttentionError::Inputs("seq_lens are not on the host".into()))?;
        let end = starts[self.step.split.decodes] as usize;
        let (most, shape, stride) = (self.sizes.slab_rows, self.sizes.decode, common.block_table_stride);
        let request_of = |row: usize| starts.partition_point(|&s| s as usize <= row) - 1;
        let mut out = vec![];
        for first in (0..end).step_by(most) {
            let rows = first..end.min(first + most);
            let requests = request_of(rows.start)..request_of(rows.end - 1) + 1;
            let parts = requests.clone().map(|r| {
                let own = starts[r] as usize..starts[r + 1] as usize;
                let part = own.start.max(rows.start)..own.end.min(rows.end);
                Request {
                    first_row: part.start - rows.start,
                    q_len: part.len(),
                    seq_len: (lengths[r].max(0) as usize).saturating_sub(own.end - part.end),
                    causal: true,
                    prefix: 0,
                }
            });
            let plan = self.plan(cx, &shape, parts)?;
            let table = common.block_table.dev();
            let own = requests.start * stride..requests.end * stride;
            if own.end > table.len() {
                return Err(AttentionError::Inputs(format!(
                    "a block table of {} numbers for {} requests of {stride}",
                    table.len(),
                    requests.end
                )));
            }
            let table = table.slice(own);
            out.push((rows, Batch::new(plan, table, stride, self.block_size)?));
        }
        Ok(out)
    }

    fn passes(&mut self, cx: &CpuExec) -> Result<Vec<(Pass, Batch)>> {
        let (split, shape) = (self.step.split, self.sizes.prefill);
        let workspace = PassWorkspace { slots: self.sizes.workspace_tokens, alignment: GROUP };
        let all = passes(&self.step.context, &self.step.prefill_start_loc, split.decodes, workspace);
        all.into_iter()
            .map(|pass| {
                let request = |a: &Attends| Request {
                    first_row: a.rows.start,
                    q_len: a.rows.len(),
                    seq_len: pass.runs[a.run].len,
                    causal: a.causal,
                    prefix: 0,
                };
                let plan = self.plan(cx, &shape, pass.attends.iter().map(request))?;
                let stride = pass.runs.iter().map(|r| r.len.div_ceil(GROUP)).max().unwrap_or(0);
                let first = pass.attends.iter().map(|a| pass.runs[a.run].slot / GROUP);
                let table = first.flat_map(|b| (b..b + stride).map(|b| b as i32)).collect();
                let batch = Batch::new(plan, View::from_vec(table), stride, GROUP)?;
                Ok((pass, batch))
            })
            .collect()
    }
}

impl MetadataBuilder for CpuMlaBuilder {
    type Exec = CpuExec;
    type Config = CpuMlaConfig;
    type Metadata = CpuMlaMetadata;

    fn plan(group: &GroupInfo, rules: &RuleBook, config: &CpuMlaConfig) -> Result<BuilderPlan> {
        let threads = std::thread::available_parallelism().map_or(1, Into::into);
        let s = Sizes::new(group, config)?;
        let plans = Plan::bytes(&s.decode, group.max_num_reqs, group.max_num_tokens)
            + Plan::bytes(&s.prefill, group.max_num_reqs, group.max_num_tokens);
        Ok(BuilderPlan {
            graph_support: rules.graph_support,
            reorder_batch_threshold: Some(s.threshold),
            persistent_bytes: plans as u64,
            workspace_bytes: s.bytes(threads) as u64,
        })
    }

    fn new(cx: &CpuExec, group: &GroupInfo, _: &BuilderPlan, config: &CpuMlaConfig) -> Result<Self> {
        let sizes = Sizes::new(group, config)?;
        let plan = |shape| Arc::new(Plan::with_capacity(shape, group.max_num_reqs, group.max_num_tokens));
        Ok(Self {
            block_size: group.kernel_block_size,
            limits: StepLimits::of(group),
            step: MlaStep::default(),
            plans: vec![plan(&sizes.decode), plan(&sizes.prefill)],
            memory: Arc::new(Mutex::new(Memory::new(&sizes, cx.pool().threads())?)),
            sizes,
        })
    }

    fn build(&mut self, cx: &CpuExec, common: &CommonAttentionMetadata) -> Result<CpuMlaMetadata> {
        refuse_mm_prefixes(NAME, common)?;
        self.limits.check(NAME, common)?;
        let config = self.config();
        self.step.fill(common, &config)?;
        let slabs = self.slabs(cx, common)?;
        let passes = self.passes(cx)?;
        Ok(CpuMlaMetadata {
            split: self.step.split.into(),
            dims: self.sizes.dims,
            slabs,
            passes,
            table: common.block_table.dev().clone(),
            stride: common.block_table_stride,
            memory: Arc::clone(&self.memory),
        })
    }

    fn split(metadata: &CpuMlaMetadata) -> DecodeSplit {
        metadata.split
    }
}
