//! Attention by the Triton kernels of `csrc/triton/attention.py`: what a launch takes, checked.
//!
//! The grid follows from how many tokens and requests a step has; lengths are read on the device.

use super::{LoadError, Loaded, block_fits, float, int, reciprocal, table_holds};
use crate::{
    CudaExec, DeviceInfo,
    device::{CudaError, Result},
    kernels::{
        attention::{LayerNumbers, Shape},
        cache::CacheLayout,
        elements::heads,
    },
    modules::{
        module_dtype,
        triton::{FormKind, MOST_PARTS, TritonFolder, TritonWant, WantOf},
    },
};
use headway_tensor::{DType, Tensor, TensorMut, TensorRef, View};
use std::f32::consts::LOG2_E;

/// Rows of a tile of few.
const FEW_ROWS: usize = 16;
/// Rows that the requests of a step have on average, where tiles of few rows are used.
const FEW_ROWS_EACH: usize = 2 * FEW_ROWS;
/// Blocks that a multiprocessor holds at once.
const BLOCKS_EACH: usize = 2;

/// The kernels of a layer.
#[derive(Debug)]
pub struct TritonKernels {
    few: Loaded,
    few_parts: Loaded,
    many: Loaded,
    merge: Loaded,
    of: WantOf,
    dtype: String,
}

impl TritonKernels {
    /// Loads a layer's kernels, each after its file was checked.
    ///
    /// # Errors
    /// One that is not built or not what it should be, in words; the driver's.
    pub fn load(cx: &CudaExec, folder: &TritonFolder, want: &TritonWant<'_>) -> Result<Self, LoadError> {
        let one = |kind| Loaded::of(cx, folder, &want.form(kind));
        Ok(Self {
            few: one(FormKind::FewRows)?,
            few_parts: one(FormKind::FewRowsParts)?,
            many: one(FormKind::ManyRows)?,
            merge: one(FormKind::Merge)?,
            of: want.of,
            dtype: want.dtype.to_owned(),
        })
    }

    /// That they were compiled for such a layer.
    fn expect(&self, head_size: usize, dtype: DType, soft_cap: bool) -> Result<()> {
        if self.of == (WantOf::Paged { head_size, soft_cap }) && module_dtype(dtype) == Some(&*self.dtype) {
            return Ok(());
        }
        Err(CudaError::Argument(format!(
            "attention: heads of {head_size} elements of {dtype}, soft cap {soft_cap}, by kernels of {:?}, {}",
            self.of, self.dtype
        )))
    }
}

/// How a step's rows are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Plan {
    /// In tiles of few rows, the keys in so many parts.
    Few(usize),
    /// In tiles of many rows.
    Many,
}

impl Plan {
    /// For so many tokens and requests: decodes too few to fill the device are divided.
    pub fn of(shape: &Shape, slots: usize, num_tokens: usize, num_reqs: usize) -> Self {
        let rows = num_tokens * shape.group();
        if rows > FEW_ROWS_EACH * num_reqs {
            return Self::Many;
        }
        let tiles = num_reqs.min(num_tokens).max(rows.div_ceil(FEW_ROWS)) * shape.kv_heads;
        Self::Few((slots / tiles.max(1)).clamp(1, MOST_PARTS))
    }

    /// Rows of partial results that there are.
    fn part_rows(self, num_rows: usize) -> usize {
        match self {
            Self::Few(parts) if parts > 1 => parts * num_rows,
            _ => 0,
        }
    }
}

/// Blocks that run at once on a device.
pub fn slots(device: &DeviceInfo) -> usize {
    device.multiprocessors as usize * BLOCKS_EACH
}

/// Rows of partial results that any step needs at most: parts are only made while all fit on the device at once.
pub fn most_part_rows(slots: usize) -> usize {
    slots * FEW_ROWS
}

/// Which rows see keys up to their own position alone.
#[derive(Clone, Debug)]
pub enum Mask {
    /// All, or none.
    All(bool),
    /// A flag for each request `[requests]`, on the device.
    Flags(View<u8>),
}

/// A step, as every layer of a group sees it: all on the device.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// `[requests, table_stride]`.
    pub block_table: &'a View<i32>,
    /// Entries from one row to the next.
    pub table_stride: usize,
    /// `[requests + 1]`.
    pub query_start_loc: &'a View<i32>,
    /// `[requests]`.
    pub seq_lens: &'a View<i32>,
    /// Causal or not.
    pub mask: &'a Mask,
    /// Requests.
    pub num_reqs: usize,
    /// New tokens, padding included.
    pub num_tokens: usize,
    /// How rows are computed.
    pub plan: Plan,
    /// `[part rows, head size]`, float32.
    pub part_out: &'a Tensor,
    /// `[part rows, 2]`, float32.
    pub part_sums: &'a Tensor,
}

fn addr(x: &Tensor) -> u64 {
    x.view().device_addr().unwrap_or(0)
}

/// Room for `rows` partial results of a `[rows, width]` float32 tensor on the device.
fn expect_parts(what: &str, x: &Tensor, rows: usize, width: usize) -> Result<()> {
    let v = x.view();
    let fits = matches!(v.shape(), [n, w] if *n >= rows && *w == width) && v.dtype() == DType::F32;
    if fits && (rows == 0 || v.device_addr().is_some()) {
        return Ok(());
    }
    Err(CudaError::Argument(format!(
        "attention: {what}: {:?} of {} where [{rows}, {width}] of float32 on the device is needed",
        v.shape(),
        v.dtype()
    )))
}

/// Attention of a step's rows: q `[tokens, heads, head size]` over the cache into `out` of the same shape and type. Rows
/// of padding become zeros.
///
/// # Errors
/// Shapes, dtypes, devices, alignment; the driver's.
pub fn attend(
    cx: &CudaExec,
    kernels: &TritonKernels,
    shape: &Shape,
    batch: &Batch<'_>,
    numbers: &LayerNumbers<'_>,
    q: TensorRef<'_>,
    cache: &CacheLayout<'_>,
    out: TensorMut<'_>,
) -> Result<()> {
    let (tokens, reqs, group) = (batch.num_tokens, batch.num_reqs, shape.group());
    let at = cache.strides(cx)?;
    let (q_addr, [q_token, q_head]) = heads("queries", q.device_addr(), q, shape.heads, shape.head_size)?;
    let (out_addr, [out_token, out_head]) =
        heads("output", out.device_addr(), out.as_ref(), shape.heads, shape.head_size)?;
    if out.dtype() != q.dtype()
        || q.dtype() != cache.dtype
        || q.shape()[0] < tokens
        || out.shape()[0] < tokens
    {
        return Err(CudaError::Argument(format!(
            "attention of {tokens} tokens: queries {:?} of {}, output {:?} of {}, cache of {}",
            q.shape(),
            q.dtype(),
            out.shape(),
            out.dtype(),
            cache.dtype
        )));
    }
    let flags = match batch.mask {
        Mask::Flags(v) => Some(v),
        Mask::All(_) => None,
    };
    let views = [batch.block_table, batch.query_start_loc, batch.seq_lens];
    if views.iter().any(|v| v.device_mem().is_none()) || flags.is_some_and(|v| v.device_mem().is_none()) {
        return Err(CudaError::Argument("attention: the step's metadata is on the host".into()));
    }
    if batch.query_start_loc.len() <= reqs
        || batch.seq_lens.len() < reqs
        || !table_holds(batch.block_table.len(), reqs, batch.table_stride)
        || flags.is_some_and(|v| v.len() < reqs)
    {
        return Err(CudaError::Argument(format!("attention: metadata of fewer than {reqs} requests")));
    }
    let part_rows = batch.plan.part_rows(tokens * shape.heads);
    expect_parts("partial results", batch.part_out, part_rows, shape.head_size)?;
    expect_parts("sums of partial results", batch.part_sums, part_rows, 2)?;
    if let Some(sinks) = numbers.sinks.filter(|s| s.device_mem().is_none() || s.len() != shape.heads) {
        return Err(CudaError::Argument(format!(
            "attention: {} sinks for {} heads: one a head is needed, on the device",
            sinks.len(),
            shape.heads
        )));
    }
    kernels.expect(shape.head_size, cache.dtype, numbers.soft_cap.is_some())?;
    let (loaded, parts) = match batch.plan {
        Plan::Many => (&kernels.many, 1),
        Plan::Few(1) => (&kernels.few, 1),
        Plan::Few(parts) => (&kernels.few_parts, parts),
    };
    let element = cache.dtype.size() as i64;
    let stride = |n: i64| int("a stride", usize::try_from(n).unwrap_or(usize::MAX));
    // Capped scores are e^2x = 2^(2 x log2(e)) of x = score / cap; others powers of 2.
    let (scale, cap) = match numbers.soft_cap {
        Some(cap) => (2.0 * numbers.scale / cap * LOG2_E, cap * LOG2_E),
        None => (numbers.scale * LOG2_E, 0.0),
    };
    let causal = match batch.mask {
        Mask::All(yes) => u64::from(*yes),
        Mask::Flags(_) => 2,
    };
    block_fits(cache.block_size, usize::try_from(at.token / element).unwrap_or(usize::MAX))?;
    let sinks = numbers.sinks.map_or(0, View::addr);
    let words = [
        out_addr,
        q_addr,
        at.addr,
        // `compile.py` says that the step's three tables lie at multiples of 16, and slices of a step keep 4. Nothing follows
        // from it: they are read element by element, at places that no contiguity is known of, and Triton 3.6 makes the same
        // code without that word.
        batch.block_table.addr(),
        batch.query_start_loc.addr(),
        batch.seq_lens.addr(),
        flags.map_or(0, View::addr),
        sinks,
        addr(batch.part_out),
        addr(batch.part_sums),
        stride(out_token)?,
        stride(out_head)?,
        stride(q_token)?,
        stride(q_head)?,
        (at.block / element).cast_unsigned(),
        stride(at.token / element)?,
        (at.head / element).cast_unsigned(),
        stride(i64::from(at.value) / element)?,
        int("a block", cache.block_size)?,
        reciprocal(cache.block_size, batch.table_stride * cache.block_size)?,
        int("a row of the block table", batch.table_stride)?,
        int("requests", reqs)?,
        // Rows are counted in 32 bits too.
        int("rows", tokens * shape.heads).and(int("tokens", tokens))?,
        int("heads", group)?,
        numbers.window.map_or(0, |w| u64::from(i32::try_from(w).unwrap_or(i32::MAX).cast_unsigned())),
        causal,
        float(scale),
        float(cap),
        0,
        0,
    ];
    let tiles = tokens * group / loaded.rows + reqs + 1;
    let grid = [tiles as u32, shape.kv_heads as u32, parts as u32];
    // SAFETY: shapes, strides and devices were checked, the words are the parameters that the file's entry lists, and
    // partial results have room; blocks of the table are the cache manager's, within the cache.
    unsafe { loaded.launch(cx, grid, &words)? };
    if parts == 1 {
        return Ok(());
    }
    let words = [
        out_addr,
        sinks,
        addr(batch.part_out),
        addr(batch.part_sums),
        stride(out_token)?,
        stride(out_head)?,
        parts as u64,
        tokens as u64,
        0,
        0,
    ];
    let (grid, merge) = ([tokens as u32, shape.heads as u32, 1], &kernels.merge);
    // SAFETY: as above; the launch before wrote every partial result that this one reads.
    unsafe { merge.launch(cx, grid, &words) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodes_are_divided_while_the_device_has_room() {
        let shape = Shape::new(32, 8, 128).unwrap();
        let plan = |tokens, reqs| Plan::of(&shape, 264, tokens, reqs);
        assert_eq!(plan(1, 1), Plan::Few(MOST_PARTS));
        assert_eq!([plan(8, 8), plan(32, 32), plan(256, 256)], [4, 1, 1].map(Plan::Few));
        // Drafts; padding; a prompt.
        assert_eq!([plan(24, 8), plan(64, 8), plan(65, 8)], [Plan::Few(4), Plan::Few(2), Plan::Many]);
        for heads in [1, 3, 8, 40, 128] {
            for kv in (1..=heads).filter(|k| heads % k == 0) {
                let shape = Shape::new(heads, kv, 64).unwrap();
                for (tokens, reqs) in [(1, 1), (3, 3), (40, 20), (7, 16), (2, 1)] {
                    let rows = Plan::of(&shape, 264, tokens, reqs).part_rows(tokens * heads);
                    assert!(rows <= most_part_rows(264), "{heads}/{kv}: {rows}");
                }
            }
        }
    }
}
