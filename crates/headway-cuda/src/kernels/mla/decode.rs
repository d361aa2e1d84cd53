//! Decode over pages of latents, and the merge of its parts.

use super::{Dims, LatentCache, room, tile_row, types};
use crate::{
    CudaExec, DeviceInfo, Kernel, KernelSpec,
    device::{CudaError, Result},
    kernels::{
        attention::Tile,
        elements::{heads, number},
        kernel_params,
    },
};
use headway_tensor::{DType, DeviceMem, TensorRef, View};
use std::sync::Arc;

/// Bytes of a block's shared memory that are not asked for: the kernel's own, and what the alignment takes.
const OWN: usize = 1024;
/// Threads of a block of the merge.
const MERGE_THREADS: u32 = 256;

/// How a block divides its work (`csrc/mla/decode.cu`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DecodeForm {
    /// Packed query rows of a tile: 16, 32 or 64.
    pub rows: usize,
    /// Warps that share rows and divide keys and columns: 2 or 4.
    pub cols: usize,
}

impl DecodeForm {
    /// For requests of so many packed rows, in blocks of so much shared memory: as many rows as there are, if they fit.
    ///
    /// # Errors
    /// None fits.
    pub fn choose(d: &Dims, cache: DType, packed: usize, shared_per_block: usize) -> Result<Self, String> {
        let most = match packed {
            ..=16 => 16,
            17..=32 => 32,
            _ => 64,
        };
        let all = [64, 32, 16].into_iter().flat_map(|rows| [4, 2].map(|cols| Self { rows, cols }));
        all.filter(|f| f.rows <= most)
            .find(|f| f.shared_bytes(d, cache) + OWN <= shared_per_block)
            .ok_or_else(|| {
                format!("rows of {} in {shared_per_block} bytes of shared memory a block", d.latent())
            })
    }

    fn threads(&self) -> usize {
        let row_tiles = if *self == (Self { rows: 64, cols: 4 }) { 2 } else { 1 };
        self.rows / 16 / row_tiles * self.cols * 32
    }

    /// Bytes of shared memory of a block, as `csrc/mla/decode.cu` lays it out.
    fn shared_bytes(&self, d: &Dims, cache: DType) -> usize {
        let (row, keys, eight_bits) = (tile_row(d.latent()), self.cols * 16, cache.size() == 1);
        let stage = keys * if eight_bits { d.latent() } else { row };
        let wide = if eight_bits { keys * row } else { 0 };
        self.rows * row + 2 * stage + wide + self.rows * tile_row(keys) + self.cols * self.rows * 4
    }

    /// Blocks that run at once on a device: what a launch has.
    pub fn slots(&self, d: &Dims, cache: DType, device: &DeviceInfo) -> usize {
        // Registers for eight warps that use all they may.
        let by_registers = (256 / self.threads()).max(1);
        let by_memory = device.shared_per_multiprocessor as usize / (self.shared_bytes(d, cache) + OWN);
        device.multiprocessors as usize * by_memory.clamp(1, by_registers)
    }
}

kernel_params! {
    struct Params {
        q_latent: u64, q_rope: u64, out: u64, cache: u64, block_table: u64, query_start_loc: u64, seq_lens: u64,
        tiles: u64, merges: u64, part_out: u64, part_sum: u64, next: u64,
        q_token: i64, q_head: i64, block_stride: i64, token_stride: i64,
        block_size: i32, table_stride: i32, heads: i32, part_rows: i32,
        scale: f32, v_scale: f32,
    }
}

pub(super) fn spec(
    d: &Dims,
    form: DecodeForm,
    dtype: DType,
    cache: DType,
    chunked: bool,
) -> Result<KernelSpec> {
    let mut defines = vec![("RANK", d.rank.to_string()), ("ROPE", d.rope.to_string())];
    defines.extend(types(dtype, cache)?);
    defines.extend([
        ("ROWS", form.rows.to_string()),
        ("COLS", form.cols.to_string()),
        ("CHUNKED", u8::from(chunked).to_string()),
    ]);
    Ok(KernelSpec { file: "mla/decode.cu", entry: "mla_decode", defines })
}

pub(super) fn merge_spec(d: &Dims, form: DecodeForm, dtype: DType) -> Result<KernelSpec> {
    let defines =
        vec![("RANK", d.rank.to_string()), ("ACT", number(dtype)?), ("ROWS", form.rows.to_string())];
    Ok(KernelSpec { file: "mla/merge.cu", entry: "mla_merge", defines })
}

/// Both kernels of a form; `chunked`: sums are joined in chunks, whatever else is in the batch.
#[derive(Clone, Debug)]
pub struct DecodeKernels {
    /// What they are for.
    pub form: DecodeForm,
    /// Whether sums are joined in chunks.
    pub chunked: bool,
    decode: Arc<Kernel>,
    merge: Arc<Kernel>,
}

impl DecodeKernels {
    /// The kernels for these sizes and types.
    ///
    /// # Errors
    /// The compiler's.
    pub fn new(
        cx: &CudaExec,
        d: &Dims,
        form: DecodeForm,
        (dtype, cache): (DType, DType),
        chunked: bool,
    ) -> Result<Self> {
        let [decode, merge] = Self::specs(d, form, (dtype, cache), chunked)?;
        Ok(Self { form, chunked, decode: cx.kernel(&decode)?, merge: cx.kernel(&merge)? })
    }

    /// What they are compiled of.
    ///
    /// # Errors
    /// Types that no kernel reads.
    pub fn specs(
        d: &Dims,
        form: DecodeForm,
        (dtype, cache): (DType, DType),
        chunked: bool,
    ) -> Result<[KernelSpec; 2]> {
        Ok([spec(d, form, dtype, cache, chunked)?, merge_spec(d, form, dtype)?])
    }
}

/// A step's decodes, as every layer of a group sees them: all on the device.
#[derive(Clone, Copy, Debug)]
pub struct DecodeBatch<'a> {
    /// The planner's list of tiles, its head first.
    pub tiles: &'a View<Tile>,
    /// The first parts of tiles of several; a head that counts them first.
    pub merges: &'a View<Tile>,
    /// `[requests, table_stride]`.
    pub block_table: &'a View<i32>,
    /// Entries from one row to the next.
    pub table_stride: usize,
    /// `[requests + 1]`.
    pub query_start_loc: &'a View<i32>,
    /// `[requests]`.
    pub seq_lens: &'a View<i32>,
    /// New tokens, padding included.
    pub tokens: usize,
    /// `[part_rows + grid x rows of a tile, rank]`, float32.
    pub part_out: &'a Arc<dyn DeviceMem>,
    /// `[part_rows, 2]`, float32.
    pub part_sum: &'a Arc<dyn DeviceMem>,
    /// `[2]`, int32, zeros.
    pub next: &'a Arc<dyn DeviceMem>,
    /// Rows of partial results.
    pub part_rows: usize,
    /// Blocks of the launch.
    pub grid: usize,
}

/// One layer's numbers.
#[derive(Clone, Copy, Debug)]
pub struct DecodeNumbers {
    /// Factor on q·k, the stored latents' own scale in it.
    pub scale: f32,
    /// Factor that turns stored latents into latents.
    pub v_scale: f32,
}

/// Weighted latents of a step's decodes into `out`, `[tokens, heads, rank]`, of queries in the latent space `q_latent`
/// of the same shape and rotated parts that lie in `q`, `[tokens, heads, nope + rope]`.
///
/// # Errors
/// Shapes, devices, alignment; the driver's.
pub fn decode(
    cx: &CudaExec,
    kernels: &DecodeKernels,
    d: &Dims,
    batch: &DecodeBatch<'_>,
    numbers: DecodeNumbers,
    (q_latent, q): (&Arc<dyn DeviceMem>, TensorRef<'_>),
    cache: &LatentCache<'_>,
    out: &Arc<dyn DeviceMem>,
) -> Result<()> {
    let (q_addr, [q_token, q_head]) = heads("queries", q.device_addr(), q, d.heads, d.qk())?;
    if q.shape()[0] < batch.tokens {
        return Err(CudaError::Argument(format!(
            "decode of {} tokens: queries {:?}",
            batch.tokens,
            q.shape()
        )));
    }
    let lists = [batch.tiles, batch.merges].map(|v| v.device_mem());
    let views = [batch.block_table, batch.query_start_loc, batch.seq_lens].map(|v| v.device_mem());
    if lists.iter().chain(&views).any(Option::is_none) {
        return Err(CudaError::Argument("latent attention: the step's metadata is on the host".into()));
    }
    let size = q.dtype().size();
    let latents = batch.tokens * d.heads * d.rank * size;
    let form = kernels.form;
    let params = Params {
        q_latent: room(cx, "queries in the latent space", q_latent, latents)?,
        q_rope: q_addr + (d.nope * size) as u64,
        out: room(cx, "weighted latents", out, latents)?,
        cache: cache.addr(cx)?,
        block_table: batch.block_table.addr(),
        query_start_loc: batch.query_start_loc.addr(),
        seq_lens: batch.seq_lens.addr(),
        tiles: batch.tiles.addr(),
        merges: batch.merges.addr(),
        part_out: room(
            cx,
            "partial results",
            batch.part_out,
            (batch.part_rows + batch.grid * form.rows) * d.rank * 4,
        )?,
        part_sum: room(cx, "sums of partial results", batch.part_sum, batch.part_rows * 8)?,
        next: room(cx, "the next tile", batch.next, 8)?,
        q_token,
        q_head,
        block_stride: cache.block_stride as i64,
        token_stride: (cache.width * cache.dtype.size()) as i64,
        block_size: cache.block_size as i32,
        table_stride: batch.table_stride as i32,
        heads: d.heads as i32,
        part_rows: batch.part_rows as i32,
        scale: numbers.scale,
        v_scale: numbers.v_scale,
    };
    let shared = form.shared_bytes(d, cache.dtype) as u32;
    let grid = [batch.grid as u32, 1, 1];
    // SAFETY: shapes, strides and devices were checked; tiles are the planner's, within the step and its scratch; blocks
    // of the table are the cache manager's, within the cache.
    unsafe { kernels.decode.launch(cx, grid, form.threads() as u32, shared, &params) }?;
    let grid = [cx.info().multiprocessors * 2, 1, 1];
    // SAFETY: as above.
    unsafe { kernels.merge.launch(cx, grid, MERGE_THREADS, 0, &params) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REAL: Dims = Dims { heads: 128, nope: 128, rope: 64, rank: 512, v: 128 };

    #[test]
    fn a_form_is_the_most_rows_that_fit() {
        let of = |packed, shared: usize| {
            DecodeForm::choose(&REAL, DType::BF16, packed, shared << 10).map(|f| (f.rows, f.cols))
        };
        // Hopper, Ampere, and consumer cards.
        assert_eq!([of(128, 227), of(128, 163), of(128, 99)], [Ok((64, 4)), Ok((64, 2)), Ok((16, 2))]);
        assert_eq!([of(16, 227), of(48, 227), of(32, 227)], [Ok((16, 4)), Ok((64, 4)), Ok((32, 4))]);
        assert!(of(16, 48).unwrap_err().contains("rows of 576"));
        let narrow = DecodeForm::choose(&REAL, DType::F8E4M3, 128, 227 << 10).unwrap();
        assert_eq!((narrow.rows, narrow.threads()), (64, 256));
    }

    #[test]
    fn parameters_are_as_the_kernel_has_them() {
        assert_eq!(size_of::<Params>(), 152);
    }
}
