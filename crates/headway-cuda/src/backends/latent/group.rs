//! Lifetime: the model, one per attention group and micro-batch. The part of a builder that no decode kernel matters to:
//! it checks a step, splits it, and plans the prefills' passes.

use super::{
    LatentSizes, LatentWorkspace, PrefillWork,
    rules::ALIGNMENT,
    work::{DevicePass, device_run, prefill_tiles},
};
use crate::{
    CudaExec,
    backends::common::{StepLimits, refuse},
    kernels::mla::{PrefillTile, Run},
};
use headway_attention::{
    AttentionError, CommonAttentionMetadata, DecodeSplit, GroupInfo, Result,
    group::arith::{
        mla::MlaStep,
        prefill_passes::{Pass, PassWorkspace, passes},
    },
};
use headway_tensor::{Persistent, Pod, View};
use std::{ops::Range, sync::Arc};

/// What every builder of latent attention does with a step.
pub(in crate::backends) struct LatentGroup {
    pub sizes: LatentSizes,
    pub workspace: Arc<LatentWorkspace>,
    backend: &'static str,
    limits: StepLimits,
    step: MlaStep,
    runs: Persistent<Run>,
    tiles: Persistent<PrefillTile>,
}

/// Writes a list, which the group's limits bound.
fn write<T: Pod>(cx: &CudaExec, to: &mut Persistent<T>, list: &[T]) -> Result<View<T>> {
    if to.capacity() < list.len() {
        return Err(AttentionError::Inputs(format!(
            "prefills of {} pieces; the group's limits allow for {}",
            list.len(),
            to.capacity()
        )));
    }
    Ok(to.write(cx, list.len(), |to| to.copy_from_slice(list)))
}

/// What a step's passes do, and which part of it each.
struct Lists {
    runs: Vec<Run>,
    tiles: Vec<PrefillTile>,
    shares: Vec<(Range<usize>, Range<usize>)>,
}

/// The lists of these passes over so many rows, in tiles of at most `most`.
fn lists(passes: &[Pass], rows: usize, most: usize) -> Lists {
    let mut met = vec![false; rows];
    let (mut runs, mut tiles, mut shares) = (vec![], vec![], vec![]);
    for pass in passes {
        let from = (runs.len(), tiles.len());
        runs.extend(pass.runs.iter().map(device_run));
        prefill_tiles(pass, most, &mut met, &mut tiles);
        // The longest first: what is left for the end is short.
        tiles[from.1..].sort_by_key(|t: &PrefillTile| std::cmp::Reverse(t.keys));
        shares.push((from.0..runs.len(), from.1..tiles.len()));
    }
    Lists { runs, tiles, shares }
}

impl LatentGroup {
    /// For a group of these sizes; allocates what its layers run in.
    pub fn new(cx: &CudaExec, backend: &'static str, group: &GroupInfo, sizes: LatentSizes) -> Result<Self> {
        let (runs, tiles) = sizes.most_runs_and_tiles(group);
        Ok(Self {
            sizes,
            workspace: Arc::new(LatentWorkspace::new(cx, &sizes)?),
            backend,
            limits: StepLimits::of(group),
            step: MlaStep::default(),
            runs: Persistent::new(cx, runs)?,
            tiles: Persistent::new(cx, tiles)?,
        })
    }

    fn check(&self, common: &CommonAttentionMetadata) -> Result<()> {
        self.limits.check(self.backend, common)?;
        let x = &common.inputs;
        if x.mm_prefix_ranges.as_ref().is_some_and(|r| r.iter().any(|r| !r.is_empty())) {
            return Err(refuse(self.backend, "bidirectional multimodal prefixes", "choose another backend"));
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
        Ok(())
    }

    /// Splits a step and plans its prefills.
    ///
    /// # Errors
    /// Inputs that contradict each other or the group's limits; what latent attention does not do.
    pub fn split(
        &mut self,
        cx: &CudaExec,
        common: &CommonAttentionMetadata,
    ) -> Result<(DecodeSplit, PrefillWork)> {
        self.check(common)?;
        self.step.fill(common, &self.sizes.config())?;
        let split: DecodeSplit = self.step.split.into();
        if split.decode_tokens > self.sizes.decode_tokens {
            return Err(AttentionError::Inputs(format!(
                "{} new tokens of decodes; the group was built for {}",
                split.decode_tokens, self.sizes.decode_tokens
            )));
        }
        let work = PrefillWork {
            sizes: self.sizes,
            passes: self.passes(cx, split)?,
            rows: self.step.prefill_start_loc.last().map_or(0, |&n| n as usize),
            block_table: common.block_table.dev().clone(),
            table_stride: common.block_table_stride,
            workspace: Arc::clone(&self.workspace),
        };
        Ok((split, work))
    }

    /// The prefills' passes.
    fn passes(&mut self, cx: &CudaExec, split: DecodeSplit) -> Result<Vec<DevicePass>> {
        let workspace = PassWorkspace { slots: self.sizes.workspace_tokens, alignment: ALIGNMENT };
        let starts = &self.step.prefill_start_loc;
        let all = passes(&self.step.context, starts, split.decodes, workspace);
        let rows = starts.last().map_or(0, |&n| n as usize);
        let Lists { runs, tiles, shares } = lists(&all, rows, self.sizes.prefill.rows());
        let runs = write(cx, &mut self.runs, &runs)?;
        let tiles = write(cx, &mut self.tiles, &tiles)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::mla::{Dims, PrefillForm};
    use headway_attention::{
        AttentionSpec, ContextParallel, KvCacheSpec,
        group::arith::context_chunks::{ChunkWorkspace, ContextChunks},
    };
    use headway_tensor::DType;
    use headway_testkit::Rng;

    #[test]
    fn lists_made_at_start_hold_the_prefills_of_every_step() {
        let dims = Dims { heads: 16, nope: 128, rope: 64, rank: 512, v: 128 };
        let prefill = PrefillForm::choose(&dims, 227 << 10).unwrap();
        let (mut rng, mut nearest) = (Rng::new(7), 0.0f64);
        for _ in 0..2000 {
            let tokens = rng.between(1, 700);
            let group = GroupInfo {
                max_num_reqs: rng.between(1, 12),
                max_num_tokens: tokens,
                max_model_len: rng.between(1, 3000),
                ..GroupInfo::new(KvCacheSpec::Mla(AttentionSpec::new(16, 1, 576, DType::BF16)), 16)
            };
            let most = if rng.chance(0.5) { 4 } else { 80 };
            let slots = 16 * rng.between(1, most);
            let sizes = LatentSizes {
                dims,
                cache: DType::BF16,
                prefill,
                workspace_tokens: slots,
                threshold: 1,
                decode_tokens: 1,
                prefill_tokens: tokens,
            };
            // As many requests as there may be, long ones and short ones.
            let (mut starts, mut contexts) = (vec![0], vec![]);
            for _ in 0..group.max_num_reqs {
                let end = starts[starts.len() - 1];
                let left = (tokens as i32 - end).min(group.max_model_len as i32) as usize;
                if left == 0 {
                    break;
                }
                let new = if rng.chance(0.5) { rng.between(1, left.min(20)) } else { rng.between(1, left) };
                let most = group.max_model_len - new;
                let long = if rng.chance(0.3) { most } else { most.min(40) };
                starts.push(end + new as i32);
                contexts.push(rng.between(0, long) as i32);
            }
            let mut context = ContextChunks::default();
            let context_parallel = ContextParallel::default();
            let chunks = ChunkWorkspace { tokens: slots, alignment: ALIGNMENT, context_parallel };
            context.fill(contexts, &starts, &chunks).unwrap();
            let all = passes(&context, &starts, 0, PassWorkspace { slots, alignment: ALIGNMENT });
            let of = lists(&all, starts[starts.len() - 1] as usize, prefill.rows());
            let (runs, tiles) = sizes.most_runs_and_tiles(&group);
            assert!(of.runs.len() <= runs, "{} runs of {runs}: {group:?}, {slots}", of.runs.len());
            assert!(of.tiles.len() <= tiles, "{} tiles of {tiles}: {group:?}, {slots}", of.tiles.len());
            nearest = nearest.max(of.runs.len() as f64 / runs as f64);
        }
        // No bound that nothing comes near.
        assert!(nearest > 0.4, "{nearest}");
    }
}
