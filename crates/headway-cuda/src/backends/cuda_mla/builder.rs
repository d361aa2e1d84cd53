//! Lifetime: the model, one per attention group and micro-batch. Class 2 of 3: splits a step into decodes and prefills,
//! plans both once for all layers, and owns the memory that the layers run in.

use super::{
    CudaMlaConfig,
    rules::{ALIGNMENT, NAME},
    sizes::{Chip, Sizes},
};
use crate::{
    CudaExec,
    backends::common::refuse,
    kernels::{
        attention::{Causality, Request, Tile},
        mla::{PrefillTile, Run},
    },
};
use headway_attention::{
    AttentionError, BuilderPlan, CommonAttentionMetadata, ContextParallel, DecodeSplit, GroupInfo,
    MetadataBuilder, Result, RuleBook,
    group::arith::{
        context_chunks::ChunkWorkspace,
        mla::{DecodeQueries, MlaConfig, MlaStep, capture_decodes_only},
        prefill_passes::{Pass, PassWorkspace, Source, passes},
    },
};
use headway_tensor::{DeviceMem, Exec, Persistent, Pod, View};
use std::sync::Arc;

/// Builds [`CudaMlaMetadata`].
pub struct CudaMlaBuilder {
    sizes: Sizes,
    max_num_reqs: usize,
    max_num_tokens: usize,
    step: MlaStep,
    list: Vec<Tile>,
    tiles: Persistent<Tile>,
    merges: Persistent<Tile>,
    runs: Persistent<Run>,
    prefill_tiles: Persistent<PrefillTile>,
    workspace: Arc<Workspace>,
}

/// What the layers run in, one after another.
#[derive(Debug)]
pub(super) struct Workspace {
    /// `[decode tokens, heads, rank]` in the activations' type.
    pub q_latent: Arc<dyn DeviceMem>,
    /// The same.
    pub out_latent: Arc<dyn DeviceMem>,
    /// `[part rows + blocks x rows of a tile, rank]`, float32.
    pub part_out: Arc<dyn DeviceMem>,
    /// `[part rows, 2]`, float32.
    pub part_sum: Arc<dyn DeviceMem>,
    /// `[2]`, int32, zeros between launches.
    pub next: Arc<dyn DeviceMem>,
    /// `[slots, rank + rope]` in the activations' type.
    pub latents: Arc<dyn DeviceMem>,
    /// `[slots, heads, nope + v]` in the activations' type.
    pub expanded: Arc<dyn DeviceMem>,
    /// `[prefill tokens, heads]`, float32.
    pub lse: Arc<dyn DeviceMem>,
}

/// A filling of the prefills' workspace.
#[derive(Clone, Debug)]
pub(super) struct DevicePass {
    pub runs: View<Run>,
    /// Tokens of the longest run.
    pub longest: usize,
    pub slots: usize,
    pub tiles: View<PrefillTile>,
}

/// A step's work, with the memory that its layers run in.
#[derive(Clone, Debug)]
pub struct CudaMlaMetadata {
    pub(super) sizes: Sizes,
    pub(super) split: DecodeSplit,
    pub(super) tiles: View<Tile>,
    pub(super) merges: View<Tile>,
    pub(super) block_table: View<i32>,
    pub(super) table_stride: usize,
    pub(super) query_start_loc: View<i32>,
    pub(super) seq_lens: View<i32>,
    pub(super) passes: Vec<DevicePass>,
    /// Rows of prefills that are not padding.
    pub(super) prefill_rows: usize,
    pub(super) workspace: Arc<Workspace>,
}

impl CudaMlaMetadata {
    /// How often the prefills' workspace is filled.
    pub fn num_passes(&self) -> usize {
        self.passes.len()
    }
}

impl Workspace {
    fn new(cx: &CudaExec, sizes: &Sizes) -> Result<Self> {
        let alloc = |bytes: usize| -> Result<Arc<dyn DeviceMem>> {
            let none = || AttentionError::Inputs(format!("{} has no memory of its own", cx.device()));
            cx.alloc(bytes.max(16))?.ok_or_else(none)
        };
        let ([part_out, part_sum], [latents, expanded, lse]) = (sizes.part_bytes(), sizes.prefill_bytes());
        let next = alloc(8)?;
        cx.zero(&next, 0, 8);
        Ok(Self {
            q_latent: alloc(sizes.latent_bytes())?,
            out_latent: alloc(sizes.latent_bytes())?,
            part_out: alloc(part_out)?,
            part_sum: alloc(part_sum)?,
            next,
            latents: alloc(latents)?,
            expanded: alloc(expanded)?,
            lse: alloc(lse)?,
        })
    }
}

/// Writes into a buffer that grows with the largest step so far.
fn write<T: Pod>(cx: &CudaExec, to: &mut Persistent<T>, list: &[T]) -> Result<View<T>> {
    if to.capacity() < list.len() {
        *to = Persistent::new(cx, list.len().next_power_of_two())?;
    }
    Ok(to.write(cx, list.len(), |to| to.copy_from_slice(list)))
}

fn causal(q_len: i32, seq_len: i32) -> Request {
    Request { q_len: q_len as usize, seq_len: seq_len as usize, causal: Causality::Yes }
}

impl CudaMlaBuilder {
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
                alignment: ALIGNMENT,
                context_parallel: ContextParallel::default(),
            },
        }
    }

    fn check(&self, common: &CommonAttentionMetadata) -> Result<()> {
        let x = &common.inputs;
        if x.dcp_local_seq_lens.is_some() {
            return Err(refuse(NAME, "decode context parallelism", "run without it"));
        }
        if x.mm_prefix_ranges.as_ref().is_some_and(|r| r.iter().any(|r| !r.is_empty())) {
            return Err(refuse(NAME, "bidirectional multimodal prefixes", "choose another backend"));
        }
        let (starts, lengths) = (x.query_start_loc.host(), &x.seq_lens_upper_bound);
        let rises = starts.first() == Some(&0) && starts.windows(2).all(|w| w[0] <= w[1]);
        if starts.len() != lengths.len() + 1 || !rises || lengths.iter().any(|&l| l < 0) {
            return Err(AttentionError::Inputs(format!(
                "query_start_loc of {} entries does not rise from 0 beside {} lengths of at least 0",
                starts.len(),
                lengths.len()
            )));
        }
        if x.num_reqs > self.max_num_reqs || x.num_actual_tokens > self.max_num_tokens {
            return Err(AttentionError::Inputs(format!(
                "{} requests with {} new tokens; the group was built for {} with {}",
                x.num_reqs, x.num_actual_tokens, self.max_num_reqs, self.max_num_tokens
            )));
        }
        Ok(())
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
        if split.decode_tokens > self.sizes.decode_tokens {
            return Err(AttentionError::Inputs(format!(
                "{} new tokens of decodes; the group was built for {}",
                split.decode_tokens, self.sizes.decode_tokens
            )));
        }
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

    /// The prefills' passes.
    fn prefills(&mut self, cx: &CudaExec, split: DecodeSplit) -> Result<Vec<DevicePass>> {
        let workspace = PassWorkspace { slots: self.sizes.workspace_tokens, alignment: ALIGNMENT };
        let starts = &self.step.prefill_start_loc;
        let all = passes(&self.step.context, starts, split.decodes, workspace);
        let mut met = vec![false; starts.last().map_or(0, |&n| n as usize)];
        let (mut runs, mut tiles) = (vec![], vec![]);
        let mut shares = vec![];
        for pass in &all {
            let from = (runs.len(), tiles.len());
            runs.extend(pass.runs.iter().map(device_run));
            prefill_tiles(pass, self.sizes.prefill.rows(), &mut met, &mut tiles);
            // The longest first: what is left for the end is short.
            tiles[from.1..].sort_by_key(|t: &PrefillTile| std::cmp::Reverse(t.keys));
            shares.push((from.0..runs.len(), from.1..tiles.len()));
        }
        let runs = write(cx, &mut self.runs, &runs)?;
        let tiles = write(cx, &mut self.prefill_tiles, &tiles)?;
        let mut passes = Vec::with_capacity(all.len());
        for (pass, (own_runs, own_tiles)) in all.iter().zip(shares) {
            passes.push(DevicePass {
                runs: runs.slice(own_runs),
                longest: pass.runs.iter().map(|r| r.len).max().unwrap_or(0),
                slots: pass.slots,
                tiles: tiles.slice(own_tiles),
            });
        }
        Ok(passes)
    }
}

fn device_run(run: &headway_attention::group::arith::prefill_passes::Run) -> Run {
    let (request, start) = match run.source {
        Source::Cached { request, start } => (request as i32, start),
        Source::New { row } => (-1, row),
    };
    Run { request, start: start as i32, len: run.len as i32, slot: run.slot as i32 }
}

/// A pass's tiles of at most so many rows. `met`: rows that an earlier pass has a result of.
fn prefill_tiles(pass: &Pass, most: usize, met: &mut [bool], tiles: &mut Vec<PrefillTile>) {
    for a in &pass.attends {
        let run = &pass.runs[a.run];
        let rows = pass.rows.start + a.rows.start..pass.rows.start + a.rows.end;
        for from in rows.clone().step_by(most) {
            let n = most.min(rows.end - from);
            let at = from - rows.start;
            let keys = if a.causal { run.len.min(at + n) } else { run.len };
            tiles.push(PrefillTile {
                row0: from as i32,
                rows: n as i32,
                slot: run.slot as i32,
                keys: keys as i32,
                sees: if a.causal { at as i32 + 1 } else { run.len as i32 },
                first: i32::from(!met[from]),
            });
        }
        met[rows].fill(true);
    }
}

impl MetadataBuilder for CudaMlaBuilder {
    type Exec = CudaExec;
    type Config = CudaMlaConfig;
    type Metadata = CudaMlaMetadata;

    fn plan(group: &GroupInfo, rules: &RuleBook, config: &CudaMlaConfig) -> BuilderPlan {
        let sizes = Sizes::new(group, config, Chip::USUAL).ok();
        BuilderPlan {
            graph_support: rules.graph_support,
            reorder_batch_threshold: sizes.map_or(rules.reorder_batch_threshold, |s| Some(s.threshold)),
            persistent_bytes: sizes.map_or(0, |s| s.list_bytes()) as u64,
            workspace_bytes: sizes.map_or(0, |s| s.bytes()) as u64,
        }
    }

    fn new(cx: &CudaExec, group: &GroupInfo, _: &BuilderPlan, config: &CudaMlaConfig) -> Result<Self> {
        let sizes = Sizes::new(group, config, Chip::of(cx.info()))?;
        let tiles = sizes.planner.max_tiles + 1;
        Ok(Self {
            max_num_reqs: group.max_num_reqs,
            max_num_tokens: group.max_num_tokens,
            step: MlaStep::default(),
            list: Vec::with_capacity(tiles),
            tiles: Persistent::new(cx, tiles)?,
            merges: Persistent::new(cx, tiles)?,
            runs: Persistent::new(cx, group.max_num_reqs + 1)?,
            prefill_tiles: Persistent::new(cx, group.max_num_reqs + 1)?,
            workspace: Arc::new(Workspace::new(cx, &sizes)?),
            sizes,
        })
    }

    fn build(&mut self, cx: &CudaExec, common: &CommonAttentionMetadata) -> Result<CudaMlaMetadata> {
        self.check(common)?;
        let config = self.config();
        self.step.fill(common, &config)?;
        let split: DecodeSplit = self.step.split.into();
        let (tiles, merges) = self.decodes(cx, common, split)?;
        let passes = self.prefills(cx, split)?;
        let x = &common.inputs;
        Ok(CudaMlaMetadata {
            sizes: self.sizes,
            split,
            tiles,
            merges,
            block_table: common.block_table.dev().clone(),
            table_stride: common.block_table_stride,
            query_start_loc: x.query_start_loc.dev().clone(),
            seq_lens: x.seq_lens.clone(),
            passes,
            prefill_rows: self.step.prefill_start_loc.last().map_or(0, |&n| n as usize),
            workspace: Arc::clone(&self.workspace),
        })
    }

    fn build_for_capture(
        &mut self,
        cx: &CudaExec,
        common: &CommonAttentionMetadata,
    ) -> Result<CudaMlaMetadata> {
        capture_decodes_only(common, self.sizes.threshold)?;
        self.build(cx, common)
    }

    fn split(metadata: &CudaMlaMetadata) -> DecodeSplit {
        metadata.split
    }

    fn frozen(m: &CudaMlaMetadata) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut h = DefaultHasher::new();
        let lists = [m.tiles.addr(), m.merges.addr()];
        let views = [m.block_table.addr(), m.query_start_loc.addr(), m.seq_lens.addr()];
        let memory = [m.workspace.q_latent.addr(), m.workspace.part_out.addr()];
        (lists, views, memory).hash(&mut h);
        (m.table_stride, m.split.decode_tokens, m.passes.len(), m.sizes.planner.slots).hash(&mut h);
        h.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_attention::group::arith::prefill_passes::Attends;

    #[test]
    fn tiles_see_what_their_rows_see_and_know_what_came_before() {
        let run = |len, slot| headway_attention::group::arith::prefill_passes::Run {
            source: Source::New { row: 0 },
            len,
            slot,
        };
        let pass = Pass {
            rows: 7..77,
            runs: vec![run(40, 0), run(30, 48)],
            attends: vec![
                Attends { rows: 0..40, run: 0, causal: true },
                Attends { rows: 40..70, run: 1, causal: false },
            ],
            slots: 80,
        };
        let mut met = vec![false; 77];
        met[7..47].fill(true);
        let mut tiles = vec![];
        prefill_tiles(&pass, 32, &mut met, &mut tiles);
        let tile = |row0, rows, slot, keys, sees, first| PrefillTile { row0, rows, slot, keys, sees, first };
        assert_eq!(tiles, [tile(7, 32, 0, 32, 1, 0), tile(39, 8, 0, 40, 33, 0), tile(47, 30, 48, 30, 30, 1)]);
        assert!(met[7..].iter().all(|m| *m));
    }
}
