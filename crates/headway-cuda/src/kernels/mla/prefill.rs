//! A prefill's attention over expanded keys and values, one pass of tokens at a time.

use super::{Dims, room, tile_row};
use crate::{
    CudaExec, Kernel, KernelSpec,
    device::{CudaError, Result},
    kernels::{
        elements::{heads, number},
        kernel_params,
    },
};
use bytemuck::{Pod, Zeroable};
use headway_tensor::{DType, DeviceMem, TensorMut, TensorRef, View};
use std::sync::Arc;

/// How a block divides its work (`csrc/mla/prefill.cu`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PrefillForm {
    /// Warps of a block.
    pub warps: usize,
    /// Runs of 16 rows that a warp has.
    pub row_tiles: usize,
    /// Keys in shared memory at a time.
    pub keys: usize,
}

impl PrefillForm {
    /// The forms for these sizes, the fastest first; later ones take less shared memory.
    pub fn all(d: &Dims) -> impl Iterator<Item = Self> + use<> {
        // Two runs of rows of wider values don't fit into the registers.
        let row_tiles = if d.v <= 128 { 2 } else { 1 };
        [(8, row_tiles, 64), (4, row_tiles, 64), (4, 1, 32)]
            .into_iter()
            .map(|(warps, row_tiles, keys)| Self { warps, row_tiles, keys })
    }

    /// The first of [`PrefillForm::all`] for blocks of so much shared memory.
    ///
    /// # Errors
    /// None fits.
    pub fn choose(d: &Dims, shared_per_block: usize) -> Result<Self, String> {
        Self::all(d).find(|f| f.shared_bytes(d) <= shared_per_block).ok_or_else(|| {
            format!(
                "prefill heads of {} and {} in {shared_per_block} bytes of shared memory a block",
                d.qk(),
                d.v
            )
        })
    }

    /// Rows of a tile.
    pub fn rows(&self) -> usize {
        self.warps * self.row_tiles * 16
    }

    fn shared_bytes(&self, d: &Dims) -> usize {
        let (key, value) = (tile_row(d.qk()), tile_row(d.v));
        self.rows() * key + 2 * self.keys * (key + value)
    }
}

/// Rows of a request and the keys of a pass that they see, as the kernel reads them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PrefillTile {
    /// First row of the prefills.
    pub row0: i32,
    /// Rows.
    pub rows: i32,
    /// First key in the workspace.
    pub slot: i32,
    /// Keys that the last row may see.
    pub keys: i32,
    /// Keys that the first row sees; each further row sees one more, up to `keys`.
    pub sees: i32,
    /// 1: nothing was left by an earlier pass.
    pub first: i32,
}

kernel_params! {
    struct Params {
        q: u64, out: u64, expanded: u64, latents: u64, lse: u64, tiles: u64,
        q_token: i64, q_head: i64, out_token: i64, out_head: i64,
        heads: i32, scale: f32,
    }
}

/// The kernel for these sizes and this type.
///
/// # Errors
/// The compiler's.
pub fn prefill_kernel(cx: &CudaExec, dims: &Dims, form: PrefillForm, dtype: DType) -> Result<Arc<Kernel>> {
    cx.kernel(&prefill_spec(dims, form, dtype)?)
}

/// What [`prefill_kernel`] is compiled of.
///
/// # Errors
/// Types that no kernel reads.
pub fn prefill_spec(d: &Dims, form: PrefillForm, dtype: DType) -> Result<KernelSpec> {
    let defines = vec![
        ("NOPE", d.nope.to_string()),
        ("ROPE", d.rope.to_string()),
        ("VALUE", d.v.to_string()),
        ("RANK", d.rank.to_string()),
        ("ACT", number(dtype)?),
        ("WARPS", form.warps.to_string()),
        ("ROW_TILES", form.row_tiles.to_string()),
        ("KEYS", form.keys.to_string()),
    ];
    Ok(KernelSpec { file: "mla/prefill.cu", entry: "mla_prefill", defines })
}

/// A pass's tiles with the workspace that they read.
#[derive(Clone, Copy, Debug)]
pub struct PrefillPass<'a> {
    /// What is done.
    pub tiles: &'a View<PrefillTile>,
    /// Slots of the workspace in use.
    pub slots: usize,
    /// `[slots, rank + rope]` in the activations' type.
    pub latents: &'a Arc<dyn DeviceMem>,
    /// `[slots, heads, nope + v]` in the activations' type.
    pub expanded: &'a Arc<dyn DeviceMem>,
    /// `[rows, heads]`, float32: kept from pass to pass.
    pub lse: &'a Arc<dyn DeviceMem>,
}

/// Attention of a pass: q `[rows, heads, nope + rope]` over the workspace, merged into `out` `[rows, heads, v]`.
///
/// # Errors
/// Shapes, dtypes, devices, alignment; the driver's.
pub fn prefill(
    cx: &CudaExec,
    kernel: &Kernel,
    (d, form): (&Dims, PrefillForm),
    pass: &PrefillPass<'_>,
    scale: f32,
    q: TensorRef<'_>,
    out: TensorMut<'_>,
) -> Result<()> {
    let (q_addr, [q_token, q_head]) = heads("queries", q.device_addr(), q, d.heads, d.qk())?;
    let (out_addr, [out_token, out_head]) = heads("output", out.device_addr(), out.as_ref(), d.heads, d.v)?;
    let (rows, size) = (q.shape()[0], q.dtype().size());
    if out.dtype() != q.dtype() || out.shape()[0] < rows || pass.tiles.device_mem().is_none() {
        return Err(CudaError::Argument(format!(
            "prefill of {rows} rows of {}: output {:?} of {}, tiles{} on the device",
            q.dtype(),
            out.shape(),
            out.dtype(),
            if pass.tiles.device_mem().is_none() { " not" } else { "" }
        )));
    }
    let params = Params {
        q: q_addr,
        out: out_addr,
        expanded: room(cx, "expanded keys", pass.expanded, pass.slots * d.heads * d.expanded() * size)?,
        latents: room(cx, "gathered latents", pass.latents, pass.slots * d.latent() * size)?,
        lse: room(cx, "log-sum-exps", pass.lse, rows * d.heads * 4)?,
        tiles: pass.tiles.addr(),
        q_token,
        q_head,
        out_token,
        out_head,
        heads: d.heads as i32,
        scale,
    };
    let grid = [(pass.tiles.len() * d.heads) as u32, 1, 1];
    // SAFETY: shapes, strides and devices were checked; tiles are the builder's, within the step's rows and the slots.
    unsafe { kernel.launch(cx, grid, form.warps as u32 * 32, form.shared_bytes(d) as u32, &params) }
}
