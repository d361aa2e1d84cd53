//! Lifetime: the model, one per attention group and micro-batch. Class 2 of 3: splits a step into decodes and prefills,
//! plans both once for all layers, and owns the memory that the layers run in.

use super::{CudaMlaConfig, rules::NAME, sizes::Sizes};
use crate::{
    CudaExec,
    backends::latent::{LatentGroup, PrefillWork, alloc},
    kernels::attention::{Causality, Request, Tile},
};
use headway_attention::{
    AttentionError, BuilderPlan, CommonAttentionMetadata, DecodeSplit, GroupInfo, MetadataBuilder, Result,
    RuleBook, group::arith::mla::capture_decodes_only,
};
use headway_tensor::{DeviceMem, Exec, Persistent, View};
use std::sync::Arc;

/// Builds [`CudaMlaMetadata`].
pub struct CudaMlaBuilder {
    sizes: Sizes,
    group: LatentGroup,
    list: Vec<Tile>,
    tiles: Persistent<Tile>,
    merges: Persistent<Tile>,
    parts: Arc<Parts>,
}

/// What decodes whose keys are divided leave between their two kernels.
#[derive(Debug)]
pub(super) struct Parts {
    /// `[part rows + blocks x rows of a tile, rank]`, float32.
    pub out: Arc<dyn DeviceMem>,
    /// `[part rows, 2]`, float32.
    pub sum: Arc<dyn DeviceMem>,
    /// `[2]`, int32, zeros between launches.
    pub next: Arc<dyn DeviceMem>,
}

/// A step's work, with the memory that its layers run in.
#[derive(Clone, Debug)]
pub struct CudaMlaMetadata {
    pub(super) sizes: Sizes,
    pub(super) split: DecodeSplit,
    pub(super) tiles: View<Tile>,
    pub(super) merges: View<Tile>,
    pub(super) query_start_loc: View<i32>,
    pub(super) seq_lens: View<i32>,
    pub(super) parts: Arc<Parts>,
    pub(super) prefills: PrefillWork,
}

impl CudaMlaMetadata {
    /// How often the prefills' workspace is filled.
    pub fn num_passes(&self) -> usize {
        self.prefills.passes.len()
    }
}

impl Parts {
    fn new(cx: &CudaExec, sizes: &Sizes) -> Result<Self> {
        let [out, sum] = sizes.part_bytes();
        let next = alloc(cx, 8)?;
        cx.zero(&next, 0, 8);
        Ok(Self { out: alloc(cx, out)?, sum: alloc(cx, sum)?, next })
    }
}

fn causal(q_len: i32, seq_len: i32) -> Request {
    Request { q_len: q_len as usize, seq_len: seq_len as usize, causal: Causality::Yes }
}

impl CudaMlaBuilder {
    /// What the group is sized by.
    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    /// The decodes' tiles, and which of their parts are to be merged.
    fn decodes(
        &mut self,
        cx: &CudaExec,
        common: &CommonAttentionMetadata,
        split: DecodeSplit,
    ) -> Result<(View<Tile>, View<Tile>)> {
        let x = &common.inputs;
        let starts = &x.query_start_loc.host()[..=split.decodes];
        let lengths = &x.seq_lens_upper_bound[..split.decodes];
        let requests = starts.windows(2).zip(lengths).map(|(w, &len)| causal(w[1] - w[0], len));
        let live = starts[split.decodes] as usize;
        let padding = live..split.decode_tokens.max(live);
        self.sizes.planner.plan(requests, padding, &mut self.list).map_err(AttentionError::Inputs)?;
        let list = &self.list;
        let tiles = self.tiles.write(cx, list.len(), |to| to.copy_from_slice(list));
        let divided = || list[1..].iter().filter(|t| t.splits > 1 && t.split == 0);
        let count = divided().count();
        let merges = self.merges.write(cx, 1 + count, |to| {
            to[0] = Tile { request: count as i32, ..Tile::default() };
            to[1..].iter_mut().zip(divided()).for_each(|(to, t)| *to = *t);
        });
        Ok((tiles, merges))
    }
}

impl MetadataBuilder for CudaMlaBuilder {
    type Exec = CudaExec;
    type Config = CudaMlaConfig;
    type Metadata = CudaMlaMetadata;

    fn plan(group: &GroupInfo, rules: &RuleBook, config: &CudaMlaConfig) -> Result<BuilderPlan> {
        let sizes = Sizes::new(group, config, None)?;
        Ok(BuilderPlan {
            graph_support: rules.graph_support,
            reorder_batch_threshold: Some(sizes.latent.threshold),
            persistent_bytes: (sizes.list_bytes() + sizes.latent.list_bytes(group)) as u64,
            workspace_bytes: sizes.bytes() as u64,
        })
    }

    fn new(cx: &CudaExec, group: &GroupInfo, _: &BuilderPlan, config: &CudaMlaConfig) -> Result<Self> {
        let sizes = Sizes::new(group, config, Some(cx.info()))?;
        let tiles = sizes.planner.max_tiles + 1;
        Ok(Self {
            group: LatentGroup::new(cx, NAME, group, sizes.latent)?,
            list: Vec::with_capacity(tiles),
            tiles: Persistent::new(cx, tiles)?,
            merges: Persistent::new(cx, tiles)?,
            parts: Arc::new(Parts::new(cx, &sizes)?),
            sizes,
        })
    }

    fn build(&mut self, cx: &CudaExec, common: &CommonAttentionMetadata) -> Result<CudaMlaMetadata> {
        let (split, prefills) = self.group.split(cx, common)?;
        let (tiles, merges) = self.decodes(cx, common, split)?;
        let x = &common.inputs;
        Ok(CudaMlaMetadata {
            sizes: self.sizes,
            split,
            tiles,
            merges,
            query_start_loc: x.query_start_loc.dev().clone(),
            seq_lens: x.seq_lens.clone(),
            parts: Arc::clone(&self.parts),
            prefills,
        })
    }

    fn build_for_capture(
        &mut self,
        cx: &CudaExec,
        common: &CommonAttentionMetadata,
    ) -> Result<CudaMlaMetadata> {
        capture_decodes_only(common, self.sizes.latent.threshold)?;
        self.build(cx, common)
    }

    fn split(metadata: &CudaMlaMetadata) -> DecodeSplit {
        metadata.split
    }

    fn frozen(m: &CudaMlaMetadata) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut h = DefaultHasher::new();
        let (p, lists) = (&m.prefills, [m.tiles.addr(), m.merges.addr()]);
        let views = [p.block_table.addr(), m.query_start_loc.addr(), m.seq_lens.addr()];
        let memory = [p.workspace.q_latent.addr(), m.parts.out.addr()];
        (lists, views, memory).hash(&mut h);
        (p.table_stride, m.split.decode_tokens, p.passes.len(), m.sizes.planner.slots).hash(&mut h);
        h.finish()
    }
}
