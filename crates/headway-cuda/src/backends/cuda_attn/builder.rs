//! Lifetime: the model, one per attention group and micro-batch. Class 2 of 3: cuts a step into tiles once for all
//! layers, and owns what they share: the list of tiles, partial results, counters.

use super::{CudaAttnConfig, rules::NAME};
use crate::{
    CudaExec,
    backends::common::{StepLimits, causal_flags, refuse, softmax_shape},
    kernels::attention::{Causality, FEW_ROWS, Planner, Request, Shape, Tile, USUAL_WAVES},
};
use headway_attention::{
    AttentionError, BuilderPlan, CommonAttentionMetadata, GroupInfo, MetadataBuilder, Result, RuleBook,
    group::kv::spec::KvQuantMode,
};
use headway_tensor::{DType, Persistent, Tensor, View};
use std::sync::Arc;

/// Blocks of the kernel that run at once where the device is not known yet.
const USUAL_SLOTS: usize = 264;

/// Builds [`CudaAttnMetadata`].
pub struct CudaAttnBuilder {
    shape: Shape,
    planner: Planner,
    limits: StepLimits,
    list: Vec<Tile>,
    tiles: Persistent<Tile>,
    scratch: Arc<Scratch>,
}

/// What the kernel's blocks leave for one another in one launch; layers run one after another.
#[derive(Debug)]
pub(super) struct Scratch {
    /// `[kv heads, part rows, head size]`, float32.
    pub part_out: Tensor,
    /// `[kv heads, part rows, 2]`, float32.
    pub part_sum: Tensor,
    /// `[kv heads, counters]`, int32, zeros between launches.
    pub counters: Tensor,
    /// `[2]`, int32, zeros between launches.
    pub next: Tensor,
    /// Rows of partial results of a head.
    pub part_rows: usize,
    /// Counters of a head.
    pub num_counters: usize,
    /// Blocks of a launch.
    pub grid: usize,
}

/// A step's tiles, with the batch that they are of.
#[derive(Clone, Debug)]
pub struct CudaAttnMetadata {
    pub(super) shape: Shape,
    pub(super) tiles: View<Tile>,
    pub(super) block_table: View<i32>,
    pub(super) table_stride: usize,
    pub(super) query_start_loc: View<i32>,
    pub(super) seq_lens: View<i32>,
    pub(super) causal: Option<View<u8>>,
    /// New tokens, padding included.
    pub(super) num_tokens: usize,
    pub(super) scratch: Arc<Scratch>,
}

/// What the kernels are sized by, from the group.
fn shape_of(group: &GroupInfo) -> Result<Shape> {
    softmax_shape(NAME, group, &[KvQuantMode::None, KvQuantMode::Fp8PerTensor])
}

fn planner(group: &GroupInfo, shape: &Shape, slots: usize) -> Planner {
    let mut planner = Planner {
        group: shape.group(),
        kv_heads: shape.kv_heads,
        few_rows: FEW_ROWS,
        many_rows: Some(shape.many_rows()),
        slots,
        waves: USUAL_WAVES,
        window: group.spec.sliding_window(),
        batch_invariant: group.batch_invariant,
        max_tiles: 0,
        max_part_rows: 0,
    };
    (planner.max_tiles, planner.max_part_rows) = planner.limits(group.max_num_reqs, group.max_num_tokens);
    planner
}

/// The requests of a step as the planner takes them.
fn requests(common: &CommonAttentionMetadata) -> Result<impl Iterator<Item = Request> + Clone + '_> {
    let x = &common.inputs;
    let (starts, lengths) = (x.query_start_loc.host(), &x.seq_lens_upper_bound);
    let rises = starts.first() == Some(&0) && starts.windows(2).all(|w| w[0] <= w[1]);
    if starts.len() != lengths.len() + 1 || !rises || lengths.iter().any(|&l| l < 0) {
        return Err(AttentionError::Inputs(format!(
            "query_start_loc of {} entries does not rise from 0 beside {} lengths of at least 0",
            starts.len(),
            lengths.len()
        )));
    }
    let on_device = causal_flags(common).is_some();
    let of = move |(i, (w, &seq_len)): (usize, (&[i32], &i32))| Request {
        q_len: (w[1] - w[0]) as usize,
        seq_len: seq_len as usize,
        causal: match common.causal().of(i) {
            _ if on_device => Causality::OnDevice,
            true => Causality::Yes,
            false => Causality::No,
        },
    };
    Ok(starts.windows(2).zip(lengths).enumerate().map(of))
}

impl CudaAttnBuilder {
    fn metadata(&self, tiles: View<Tile>, common: &CommonAttentionMetadata) -> CudaAttnMetadata {
        let x = &common.inputs;
        CudaAttnMetadata {
            shape: self.shape,
            tiles,
            block_table: common.block_table.dev().clone(),
            table_stride: common.block_table_stride,
            query_start_loc: x.query_start_loc.dev().clone(),
            seq_lens: x.seq_lens.clone(),
            causal: causal_flags(common).cloned(),
            num_tokens: x.num_actual_tokens,
            scratch: Arc::clone(&self.scratch),
        }
    }
}

impl MetadataBuilder for CudaAttnBuilder {
    type Exec = CudaExec;
    type Config = CudaAttnConfig;
    type Metadata = CudaAttnMetadata;
    const UPDATES_BLOCK_TABLE: bool = true;

    fn plan(group: &GroupInfo, rules: &RuleBook, _: &CudaAttnConfig) -> Result<BuilderPlan> {
        let shape = shape_of(group)?;
        let p = planner(group, &shape, USUAL_SLOTS);
        let parts = shape.kv_heads * p.max_part_rows * (shape.head_size + 2) * 4;
        Ok(BuilderPlan {
            graph_support: rules.graph_support,
            reorder_batch_threshold: rules.reorder_batch_threshold,
            persistent_bytes: ((p.max_tiles + 1) * size_of::<Tile>()) as u64,
            workspace_bytes: (parts + shape.kv_heads * p.max_tiles * 4) as u64,
        })
    }

    fn new(cx: &CudaExec, group: &GroupInfo, _: &BuilderPlan, _: &CudaAttnConfig) -> Result<Self> {
        let shape = shape_of(group)?;
        shape
            .check_shared(group.spec.dtype(), cx.info().shared_per_block as usize)
            .map_err(|why| refuse(NAME, why, "choose another backend for these layers"))?;
        let grid = shape.slots(cx.info());
        let planner = planner(group, &shape, grid);
        let zeros = |dtype, dims: &[usize]| Tensor::zeros(cx, dtype, dims);
        let (h, rows, counters) = (shape.kv_heads, planner.max_part_rows, planner.max_tiles);
        let scratch = Scratch {
            part_out: zeros(DType::F32, &[h, rows, shape.head_size])?,
            part_sum: zeros(DType::F32, &[h, rows, 2])?,
            counters: zeros(DType::I32, &[h, counters])?,
            next: zeros(DType::I32, &[2])?,
            part_rows: rows,
            num_counters: counters,
            grid,
        };
        Ok(Self {
            shape,
            planner,
            limits: StepLimits::of(group),
            list: Vec::with_capacity(planner.max_tiles + 1),
            tiles: Persistent::new(cx, planner.max_tiles + 1)?,
            scratch: Arc::new(scratch),
        })
    }

    fn build(&mut self, cx: &CudaExec, common: &CommonAttentionMetadata) -> Result<CudaAttnMetadata> {
        self.limits.check(NAME, common)?;
        if common.inputs.mm_prefix_ranges.as_ref().is_some_and(|r| r.iter().any(|r| !r.is_empty())) {
            return Err(refuse(NAME, "bidirectional multimodal prefixes", "choose another backend"));
        }
        let live = common.inputs.query_start_loc.host().last().map_or(0, |&t| t as usize);
        let padding = live..common.inputs.num_actual_tokens.max(live);
        self.planner.plan(requests(common)?, padding, &mut self.list).map_err(AttentionError::Inputs)?;
        let list = &self.list;
        let tiles = self.tiles.write(cx, list.len(), |to| to.copy_from_slice(list));
        Ok(self.metadata(tiles, common))
    }

    fn update_block_table(
        &mut self,
        _: &CudaExec,
        first: &CudaAttnMetadata,
        common: &CommonAttentionMetadata,
    ) -> Result<CudaAttnMetadata> {
        if first.shape != self.shape {
            return Err(AttentionError::Inputs("block-table update from a group of other heads".into()));
        }
        // Its tiles, this group's scratch.
        Ok(self.metadata(first.tiles.clone(), common))
    }

    fn frozen(m: &CudaAttnMetadata) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut h = DefaultHasher::new();
        let views = [m.block_table.addr(), m.query_start_loc.addr(), m.seq_lens.addr(), m.tiles.addr()];
        m.causal.as_ref().map(View::addr).hash(&mut h);
        (views, m.table_stride, m.scratch.grid, m.scratch.part_out.view().device_addr()).hash(&mut h);
        h.finish()
    }
}
