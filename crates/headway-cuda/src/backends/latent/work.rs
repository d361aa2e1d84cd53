//! Lifetime: the memory, the model; the rest, one step. What layers run in, and what a step's prefills are.

use super::LatentSizes;
use crate::{
    CudaExec,
    kernels::mla::{PrefillTile, Run},
};
use headway_attention::{
    AttentionError, Result,
    group::arith::prefill_passes::{Pass, Source},
};
use headway_tensor::{DeviceMem, Exec, View};
use std::sync::Arc;

/// What the layers of a group run in, one after another.
#[derive(Debug)]
pub struct LatentWorkspace {
    /// `[decode tokens, heads, rank]` in the activations' type.
    pub q_latent: Arc<dyn DeviceMem>,
    /// The same.
    pub out_latent: Arc<dyn DeviceMem>,
    /// `[slots, rank + rope]` in the activations' type.
    pub latents: Arc<dyn DeviceMem>,
    /// `[slots, heads, nope + v]` in the activations' type.
    pub expanded: Arc<dyn DeviceMem>,
    /// `[prefill tokens, heads]`, float32.
    pub lse: Arc<dyn DeviceMem>,
}

/// So many bytes of the device, at least 16.
pub(in crate::backends) fn alloc(cx: &CudaExec, bytes: usize) -> Result<Arc<dyn DeviceMem>> {
    let none = || AttentionError::Inputs(format!("{} has no memory of its own", cx.device()));
    cx.alloc(bytes.max(16))?.ok_or_else(none)
}

impl LatentWorkspace {
    pub(super) fn new(cx: &CudaExec, sizes: &LatentSizes) -> Result<Self> {
        let [latents, expanded, lse] = sizes.prefill_bytes();
        Ok(Self {
            q_latent: alloc(cx, sizes.latent_bytes())?,
            out_latent: alloc(cx, sizes.latent_bytes())?,
            latents: alloc(cx, latents)?,
            expanded: alloc(cx, expanded)?,
            lse: alloc(cx, lse)?,
        })
    }
}

/// A filling of the prefills' workspace.
#[derive(Clone, Debug)]
pub(in crate::backends) struct DevicePass {
    pub runs: View<Run>,
    /// Tokens of the longest run.
    pub longest: usize,
    pub slots: usize,
    pub tiles: View<PrefillTile>,
}

/// A step's prefills, with the memory that layers run in.
#[derive(Clone, Debug)]
pub(in crate::backends) struct PrefillWork {
    pub sizes: LatentSizes,
    pub passes: Vec<DevicePass>,
    /// Rows of prefills that are not padding.
    pub rows: usize,
    pub block_table: View<i32>,
    pub table_stride: usize,
    pub workspace: Arc<LatentWorkspace>,
}

/// A run of tokens as the kernels read it.
pub(super) fn device_run(run: &headway_attention::group::arith::prefill_passes::Run) -> Run {
    let (request, start) = match run.source {
        Source::Cached { request, start } => (request as i32, start),
        Source::New { row } => (-1, row),
    };
    Run { request, start: start as i32, len: run.len as i32, slot: run.slot as i32 }
}

/// A pass's tiles of at most so many rows. `met`: rows that an earlier pass has a result of.
pub(super) fn prefill_tiles(pass: &Pass, most: usize, met: &mut [bool], tiles: &mut Vec<PrefillTile>) {
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
