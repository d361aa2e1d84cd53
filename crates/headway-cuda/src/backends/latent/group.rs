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
        prefill_passes::{PassWorkspace, passes},
    },
};
use headway_tensor::{Persistent, Pod, View};
use std::sync::Arc;

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

/// Writes into a buffer that grows with the largest step so far.
fn write<T: Pod>(cx: &CudaExec, to: &mut Persistent<T>, list: &[T]) -> Result<View<T>> {
    if to.capacity() < list.len() {
        *to = Persistent::new(cx, list.len().next_power_of_two())?;
    }
    Ok(to.write(cx, list.len(), |to| to.copy_from_slice(list)))
}

impl LatentGroup {
    /// For a group of these sizes; allocates what its layers run in.
    pub fn new(cx: &CudaExec, backend: &'static str, group: &GroupInfo, sizes: LatentSizes) -> Result<Self> {
        Ok(Self {
            sizes,
            workspace: Arc::new(LatentWorkspace::new(cx, &sizes)?),
            backend,
            limits: StepLimits::of(group),
            step: MlaStep::default(),
            runs: Persistent::new(cx, group.max_num_reqs + 1)?,
            tiles: Persistent::new(cx, group.max_num_reqs + 1)?,
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
