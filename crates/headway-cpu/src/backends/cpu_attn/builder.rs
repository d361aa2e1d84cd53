//! Lifetime: the model, one per attention group and micro-batch. Class 2 of 3: plans a step's work once
//! for all layers, and owns the kernels' memory.

use super::{
    CpuAttnConfig,
    own_pages::{OwnPages, OwnRows},
    rules::NAME,
};
use crate::{
    CpuExec,
    backends::common::{StepLimits, refuse},
    kernels::attention::{Batch, Masks, Plan, Request, Shape, Workspace},
};
use headway_attention::{
    AttentionError, BuilderPlan, Causal, CommonAttentionMetadata, GroupInfo, KvCacheSpec, MetadataBuilder,
    Result, RuleBook,
    group::kv::spec::{KvQuantMode, TokensPerState},
};
use std::{ops::Range, sync::Arc};

/// Builds [`CpuAttnMetadata`].
#[derive(Debug)]
pub struct CpuAttnBuilder {
    shape: Shape,
    window: Option<usize>,
    rswa_window: Option<usize>,
    block_size: usize,
    limits: StepLimits,
    plan: Arc<Plan>,
    workspace: Arc<Workspace>,
    /// Of a group without a cache.
    own_pages: Option<Arc<OwnPages>>,
    reallocs: usize,
}

/// A step's work items and block table, with the memory that its layers run in.
#[derive(Clone, Debug)]
pub struct CpuAttnMetadata {
    pub(super) batch: Batch,
    pub(super) workspace: Arc<Workspace>,
    /// Where the keys and values of layers without a cache go.
    pub(super) own_rows: Option<OwnRows>,
}

impl CpuAttnMetadata {
    /// The work items.
    pub fn plan(&self) -> &Plan {
        self.batch.plan()
    }
}

/// What the kernels are sized by, from the group.
fn shape_of(group: &GroupInfo) -> Result<Shape> {
    let attention = match &group.spec {
        KvCacheSpec::Full(a)
        | KvCacheSpec::SlidingWindow { attention: a, .. }
        | KvCacheSpec::Rswa { attention: a, .. }
        | KvCacheSpec::Cross(a)
        | KvCacheSpec::EncoderOnly(a) => a,
        other => {
            return Err(refuse(
                NAME,
                format!("a KV cache of {other:?}"),
                "full, sliding-window, R-SWA and cross-attention caches of keys and values are, and encoders without one",
            ));
        }
    };
    let plain = matches!(attention.quant, KvQuantMode::None | KvQuantMode::Fp8PerTensor)
        && attention.tokens_per_state == TokensPerState::ONE
        && attention.num_head_slots.is_none_or(|n| n == attention.num_kv_heads)
        && attention.state_content_bytes.is_none()
        && attention.chunk_mask.is_none()
        && attention.cache_format.is_none();
    if !plain {
        return Err(refuse(
            NAME,
            "a packed, compressed or chunked KV cache",
            "keys and values of one token each, unquantised or as 8-bit floats with one scale, are",
        ));
    }
    Shape::new(
        group.num_heads,
        attention.num_kv_heads,
        attention.head_size,
        attention.head_size_v,
        group.max_model_len,
    )
    .map_err(|why| refuse(NAME, why, "choose another backend for these layers"))
}

impl CpuAttnBuilder {
    /// How often metadata that was still alive forced a fresh plan to be allocated.
    pub fn reallocs(&self) -> usize {
        self.reallocs
    }

    fn batch(&self, plan: Arc<Plan>, common: &CommonAttentionMetadata) -> Result<CpuAttnMetadata> {
        let own_rows = self.own_pages.as_ref().map(|p| p.rows(plan.requests())).transpose()?;
        let (table, stride) = match &own_rows {
            Some(rows) => (rows.table.clone(), rows.stride),
            None => (common.block_table.dev().clone(), common.block_table_stride),
        };
        let batch = Batch::new(plan, table, stride, self.block_size)?;
        Ok(CpuAttnMetadata { batch, workspace: Arc::clone(&self.workspace), own_rows })
    }
}

/// The tokens of each request that R-SWA keeps visible.
fn prefixes(common: &CommonAttentionMetadata) -> Result<&[i32]> {
    let x = &common.inputs;
    let prefixes = x.rswa_prefix_lens.as_ref().and_then(|p| p.host()).filter(|p| p.len() >= x.num_reqs);
    let prefixes = prefixes.filter(|p| p.iter().all(|&p| p >= 0));
    prefixes.ok_or_else(|| {
        AttentionError::Inputs(
            "R-SWA needs rswa_prefix_lens on the host: for each request the tokens that stay visible".into(),
        )
    })
}

/// Each request's ranges that see each other in both directions.
fn spans(common: &CommonAttentionMetadata) -> Result<Option<&[Vec<Range<usize>>]>> {
    let x = &common.inputs;
    match x.mm_prefix_ranges.as_deref() {
        Some(spans) if spans.len() != x.num_reqs => Err(AttentionError::Inputs(format!(
            "mm_prefix_ranges of {} requests for a step of {}",
            spans.len(),
            x.num_reqs
        ))),
        spans => Ok(spans),
    }
}

/// The requests of a step as the planner takes them; without `prefixes`, none has one.
fn requests<'a>(
    common: &'a CommonAttentionMetadata,
    prefixes: &'a [i32],
) -> Result<impl Iterator<Item = Request> + 'a> {
    let x = &common.inputs;
    let starts = x.query_start_loc.host();
    let lengths =
        x.seq_lens.host().ok_or_else(|| AttentionError::Inputs("seq_lens are not on the host".into()))?;
    let rises = starts.first() == Some(&0) && starts.windows(2).all(|w| w[0] <= w[1]);
    if starts.len() != lengths.len() + 1 || !rises || lengths.iter().any(|&l| l < 0) {
        return Err(AttentionError::Inputs(format!(
            "query_start_loc of {} entries does not rise from 0 beside {} lengths of at least 0",
            starts.len(),
            lengths.len()
        )));
    }
    let all = match common.causal() {
        Causal::All(c) => Some(*c),
        Causal::PerRequest(_) => None,
    };
    Ok(starts.windows(2).zip(lengths).enumerate().map(move |(i, (w, &seq_len))| Request {
        first_row: w[0] as usize,
        q_len: (w[1] - w[0]) as usize,
        seq_len: seq_len as usize,
        causal: all.unwrap_or_else(|| common.causal().of(i)),
        prefix: prefixes.get(i).map_or(0, |&p| p as usize),
    }))
}

impl MetadataBuilder for CpuAttnBuilder {
    type Exec = CpuExec;
    type Config = CpuAttnConfig;
    type Metadata = CpuAttnMetadata;
    const UPDATES_BLOCK_TABLE: bool = true;

    fn plan(group: &GroupInfo, rules: &RuleBook, _: &CpuAttnConfig) -> Result<BuilderPlan> {
        let threads = std::thread::available_parallelism().map_or(1, Into::into);
        let shape = shape_of(group)?;
        let own = match group.spec {
            KvCacheSpec::EncoderOnly(_) => {
                OwnPages::num_pages(group.max_num_reqs, group.max_num_tokens) * OwnPages::page_bytes(&shape)
            }
            _ => 0,
        };
        Ok(BuilderPlan {
            graph_support: rules.graph_support,
            reorder_batch_threshold: rules.reorder_batch_threshold,
            persistent_bytes: Plan::bytes(&shape, group.max_num_reqs, group.max_num_tokens) as u64,
            workspace_bytes: (Workspace::bytes(&shape, threads) + own) as u64,
        })
    }

    fn new(cx: &CpuExec, group: &GroupInfo, _: &BuilderPlan, _: &CpuAttnConfig) -> Result<Self> {
        let shape = shape_of(group)?;
        let own_pages = match group.spec {
            KvCacheSpec::EncoderOnly(_) => {
                Some(Arc::new(OwnPages::new(&shape, group.max_num_reqs, group.max_num_tokens)?))
            }
            _ => None,
        };
        let block_size = match &own_pages {
            Some(_) => OwnPages::block_size(),
            None => group.kernel_block_size,
        };
        Ok(Self {
            shape,
            own_pages,
            window: group.spec.sliding_window(),
            rswa_window: match group.spec {
                KvCacheSpec::Rswa { rswa_window, .. } => Some(rswa_window),
                _ => None,
            },
            block_size,
            limits: StepLimits::of(group),
            plan: Arc::new(Plan::with_capacity(&shape, group.max_num_reqs, group.max_num_tokens)),
            workspace: Arc::new(Workspace::new(&shape, cx.pool().threads())?),
            reallocs: 0,
        })
    }

    fn build(&mut self, cx: &CpuExec, common: &CommonAttentionMetadata) -> Result<CpuAttnMetadata> {
        self.limits.check(NAME, common)?;
        let prefixes = if self.rswa_window.is_some() { prefixes(common)? } else { &[] };
        let requests = requests(common, prefixes)?;
        let masks = Masks { window: self.window, rswa_window: self.rswa_window, spans: spans(common)? };
        if Arc::get_mut(&mut self.plan).is_none() {
            self.reallocs += 1;
            let StepLimits { max_num_reqs, max_num_tokens } = self.limits;
            self.plan = Arc::new(Plan::with_capacity(&self.shape, max_num_reqs, max_num_tokens));
        }
        if let Some(plan) = Arc::get_mut(&mut self.plan) {
            let threads = cx.pool().threads();
            plan.build(&self.shape, threads, masks, requests).map_err(AttentionError::Inputs)?;
        }
        self.batch(Arc::clone(&self.plan), common)
    }

    fn update_block_table(
        &mut self,
        _: &CpuExec,
        first: &CpuAttnMetadata,
        common: &CommonAttentionMetadata,
    ) -> Result<CpuAttnMetadata> {
        if first.plan().shape() != Some(&self.shape) || first.plan().window() != self.window {
            return Err(AttentionError::Inputs(
                "block-table update from a group of another shape or window".into(),
            ));
        }
        self.batch(Arc::clone(first.batch.plan()), common)
    }
}
