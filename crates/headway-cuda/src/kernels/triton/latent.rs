//! Decodes of latent attention by the Triton kernels of `csrc/triton/latent.py`: what a launch takes, checked.

use super::{LoadError, Loaded, block_fits, float, int, reciprocal, table_holds};
use crate::{
    CudaExec,
    device::{CudaError, Result},
    kernels::{
        elements::heads,
        mla::{DEEPSEEK, Dims, LatentCache, room},
    },
    modules::triton::{FormKind, MOST_PARTS, TritonFolder, TritonWant},
};
use headway_tensor::{DeviceMem, TensorRef, View};
use std::{f32::consts::LOG2_E, sync::Arc};

/// Rows of a tile of few, and of many.
const ROWS: [usize; 2] = [16, 64];

/// The kernels of a layer.
#[derive(Debug)]
pub struct LatentKernels {
    few: Loaded,
    many: Loaded,
    merge: Loaded,
}

impl LatentKernels {
    /// Loads a layer's kernels, each after its file was checked.
    ///
    /// # Errors
    /// One that is not built or not what it should be, in words; the driver's.
    pub fn load(cx: &CudaExec, folder: &TritonFolder, want: &TritonWant<'_>) -> Result<Self, LoadError> {
        let one = |kind| Loaded::of(cx, folder, &want.form(kind));
        Ok(Self {
            few: one(FormKind::LatentFewRows)?,
            many: one(FormKind::LatentManyRows)?,
            merge: one(FormKind::LatentMerge)?,
        })
    }
}

/// How a step's rows are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LatentPlan {
    /// In tiles of many rows.
    pub many: bool,
    /// Parts of the keys.
    pub parts: usize,
}

impl LatentPlan {
    /// For so many tokens and requests: keys are divided while tiles leave multiprocessors idle, which hold one block.
    pub fn of(heads: usize, multiprocessors: usize, num_tokens: usize, num_reqs: usize) -> Self {
        let rows = num_tokens * heads;
        let many = rows > ROWS[0] * num_reqs;
        let tiles = num_reqs.min(num_tokens).max(rows.div_ceil(ROWS[usize::from(many)])).max(1);
        Self { many, parts: (multiprocessors / tiles).clamp(1, MOST_PARTS) }
    }

    /// Rows of partial results that there are.
    fn part_rows(self, num_rows: usize) -> usize {
        if self.parts > 1 { self.parts * num_rows } else { 0 }
    }
}

/// Rows of partial results that any step needs at most: parts are only made while all fit on the device at once.
pub fn most_latent_part_rows(multiprocessors: usize) -> usize {
    multiprocessors * ROWS[1]
}

/// A step's decodes, as every layer of a group sees them: all on the device.
#[derive(Clone, Copy, Debug)]
pub struct LatentBatch<'a> {
    /// `[requests, table_stride]`.
    pub block_table: &'a View<i32>,
    /// Entries from one row to the next.
    pub table_stride: usize,
    /// `[requests + 1]`.
    pub query_start_loc: &'a View<i32>,
    /// `[requests]`.
    pub seq_lens: &'a View<i32>,
    /// Requests.
    pub num_reqs: usize,
    /// New tokens, padding included.
    pub num_tokens: usize,
    /// How rows are computed.
    pub plan: LatentPlan,
    /// Rows that there is room for in the two that follow.
    pub part_rows: usize,
    /// `[part rows, rank]`, float32.
    pub part_out: &'a Arc<dyn DeviceMem>,
    /// `[part rows, 2]`, float32.
    pub part_sums: &'a Arc<dyn DeviceMem>,
}

/// Weighted latents of a step's decodes into `out`, `[tokens, heads, rank]`, of queries in the latent space `q_latent`
/// of the same shape and rotated parts that lie in `q`, `[tokens, heads, nope + rope]`. Rows of padding become zeros.
///
/// # Errors
/// Shapes, dtypes, devices, alignment; the driver's.
pub fn decode(
    cx: &CudaExec,
    kernels: &LatentKernels,
    d: &Dims,
    batch: &LatentBatch<'_>,
    scale: f32,
    (q_latent, q): (&Arc<dyn DeviceMem>, TensorRef<'_>),
    cache: &LatentCache<'_>,
    out: &Arc<dyn DeviceMem>,
) -> Result<()> {
    let (tokens, reqs, size) = (batch.num_tokens, batch.num_reqs, q.dtype().size());
    let (q_addr, [q_token, q_head]) = heads("queries", q.device_addr(), q, d.heads, d.qk())?;
    if (d.rank, d.rope) != DEEPSEEK || cache.width != d.latent() || cache.dtype != q.dtype() || size != 2 {
        return Err(CudaError::Argument(format!(
            "Triton's latent attention: {d:?} and queries of {}, with a cache of {} in rows of {}",
            q.dtype(),
            cache.dtype,
            cache.width
        )));
    }
    let views = [batch.block_table, batch.query_start_loc, batch.seq_lens];
    if q.shape()[0] < tokens
        || views.iter().any(|v| v.device_mem().is_none())
        || batch.query_start_loc.len() <= reqs
        || batch.seq_lens.len() < reqs
        || !table_holds(batch.block_table.len(), reqs, batch.table_stride)
    {
        return Err(CudaError::Argument(format!(
            "Triton's latent attention of {tokens} tokens of {reqs} requests: queries {:?}, metadata on the device of {:?}",
            q.shape(),
            views.map(View::len)
        )));
    }
    block_fits(cache.block_size, cache.width)?;
    let part_rows = batch.plan.part_rows(tokens * d.heads);
    if part_rows > batch.part_rows {
        return Err(CudaError::Argument(format!(
            "Triton's latent attention: {part_rows} partial results, room for {}",
            batch.part_rows
        )));
    }
    let latents = tokens * d.heads * d.rank * size;
    let out = room(cx, "weighted latents", out, latents)?;
    let part_out = room(cx, "partial results", batch.part_out, part_rows * d.rank * 4)?;
    let part_sums = room(cx, "sums of partial results", batch.part_sums, part_rows * 8)?;
    let parts = batch.plan.parts;
    let [stride_of_token, stride_of_head] =
        [q_token, q_head].map(|n| int("a stride", usize::try_from(n).unwrap_or(usize::MAX)));
    // Rows are counted in 32 bits too.
    let num_tokens = int("rows", tokens * d.heads).and(int("tokens", tokens))?;
    let words = [
        out,
        room(cx, "queries in the latent space", q_latent, latents)?,
        q_addr + (d.nope * size) as u64,
        cache.addr(cx)?,
        batch.block_table.addr(),
        batch.query_start_loc.addr(),
        batch.seq_lens.addr(),
        part_out,
        part_sums,
        stride_of_token?,
        stride_of_head?,
        (cache.block_stride / size) as u64,
        int("a block", cache.block_size)?,
        reciprocal(cache.block_size, batch.table_stride * cache.block_size)?,
        int("a row of the block table", batch.table_stride)?,
        int("requests", reqs)?,
        num_tokens,
        int("heads", d.heads)?,
        float(scale * LOG2_E),
        0,
        0,
    ];
    let loaded = if batch.plan.many { &kernels.many } else { &kernels.few };
    let tiles = tokens * d.heads / loaded.rows + reqs + 1;
    // SAFETY: shapes, strides and devices were checked, the words are the parameters that the file's entry lists, and
    // partial results have room; blocks of the table are the cache manager's, within the cache.
    unsafe { loaded.launch(cx, [tiles as u32, parts as u32, 1], &words)? };
    if parts == 1 {
        return Ok(());
    }
    let words = [out, part_out, part_sums, parts as u64, num_tokens, int("heads", d.heads)?, 0, 0];
    // SAFETY: as above; the launch before wrote what this one reads.
    unsafe { kernels.merge.launch(cx, [tokens as u32, d.heads as u32, 1], &words) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_divided_while_multiprocessors_are_idle() {
        let plan = |heads, tokens, reqs| {
            let plan = LatentPlan::of(heads, 132, tokens, reqs);
            (plan.many, plan.parts)
        };
        assert_eq!([plan(16, 1, 1), plan(16, 8, 8)], [(false, MOST_PARTS), (false, 16)]);
        assert_eq!([plan(16, 32, 32), plan(16, 128, 128)], [(false, 4), (false, 1)]);
        assert_eq!([plan(128, 8, 8), plan(128, 64, 64)], [(true, 8), (true, 1)]);
        // Drafts: a tile of many rows reads a request's keys once.
        assert_eq!(plan(16, 24, 8), (true, 16));
        for heads in [1, 8, 16, 20, 128, 130] {
            for (tokens, reqs) in [(1, 1), (3, 3), (40, 20), (7, 16), (2, 1), (0, 4)] {
                let rows = LatentPlan::of(heads, 132, tokens, reqs).part_rows(tokens * heads);
                assert!(rows <= most_latent_part_rows(132), "{heads}: {rows}");
            }
        }
    }
}
