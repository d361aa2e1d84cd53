//! The kernels of latent attention (MLA; DeepSeek-V2, arXiv 2405.04434): the cache write, decode over pages of latents,
//! and a prefill's gather and attention. What stands between them, products with `kv_b_proj`, is cuBLASLt's
//! (`kernels::ops::latent`).

mod decode;
mod gather;
mod prefill;
mod write;

pub use decode::{DecodeBatch, DecodeForm, DecodeKernels, DecodeNumbers, decode};
pub use gather::{Run, gather, gather_kernel, gather_spec};
pub use prefill::{PrefillForm, PrefillPass, PrefillTile, prefill, prefill_kernel, prefill_spec};
pub use write::{write_latent, write_latent_kernel, write_latent_spec};

use super::{cache::Pages, elements::number};
use crate::{
    CudaExec, KernelSpec,
    device::{CudaError, Result},
};
use headway_tensor::{DType, DeviceMem, Exec};
use std::sync::Arc;

/// The widest latent that a decode's accumulators hold.
pub const MAX_RANK: usize = 512;
/// The widest row of the cache.
pub const MAX_LATENT: usize = 576;
/// DeepSeek's latent and its rotated part, in elements: all that other projects' kernels are compiled for.
pub const DEEPSEEK: (usize, usize) = (512, 64);
/// The largest query, key and value head of a prefill.
pub const MAX_HEAD: usize = 256;

/// The sizes of a latent-attention layer, in elements, all multiples of 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dims {
    /// Query heads.
    pub heads: usize,
    /// Elements of a query and key head without rotary position.
    pub nope: usize,
    /// Elements of a query and key head with rotary position.
    pub rope: usize,
    /// Width of the latent.
    pub rank: usize,
    /// Elements of a value head.
    pub v: usize,
}

impl Dims {
    /// Elements of a query and key head.
    pub fn qk(&self) -> usize {
        self.nope + self.rope
    }

    /// Elements of a row of the cache.
    pub fn latent(&self) -> usize {
        self.rank + self.rope
    }

    /// Elements of `kv_b_proj`'s output for a head.
    pub fn expanded(&self) -> usize {
        self.nope + self.v
    }

    /// What the kernels don't take of them; `None` if they take them.
    pub fn refusal(&self) -> Option<String> {
        if [self.nope, self.rope, self.rank, self.v].iter().any(|n| !n.is_multiple_of(8)) {
            return Some("latent dimensions that are not multiples of 8".into());
        }
        if self.rank == 0 || self.rank > MAX_RANK || self.latent() > MAX_LATENT {
            return Some(format!(
                "latents of 0 or more than {MAX_RANK} elements, or of more than {MAX_LATENT} with the rotated ones"
            ));
        }
        if self.nope == 0 || self.v == 0 || self.qk().max(self.v) > MAX_HEAD {
            return Some(format!("heads of 0 or of more than {MAX_HEAD} elements"));
        }
        (self.heads == 0).then(|| "no heads".into())
    }
}

/// Bytes that a row of so many 16-bit elements takes in shared memory (`csrc/common/tiles.cuh`).
fn tile_row(width: usize) -> usize {
    (width.div_ceil(16) * 2).div_ceil(8) * 128
}

/// A layer's cache of latents on a device: a row after another.
#[derive(Clone, Copy, Debug)]
pub struct LatentCache<'a> {
    /// The buffer that it lies in.
    pub memory: &'a Arc<dyn DeviceMem>,
    /// Bytes before block 0.
    pub offset: usize,
    /// Bytes from one block to the next.
    pub block_stride: usize,
    /// Blocks.
    pub num_blocks: usize,
    /// Tokens in a block, a multiple of 16.
    pub block_size: usize,
    /// Elements of a row.
    pub width: usize,
    /// Element type.
    pub dtype: DType,
}

impl LatentCache<'_> {
    /// Address of block 0, checked against the buffer.
    pub(super) fn addr(&self, cx: &CudaExec) -> Result<u64> {
        if self.block_size == 0 || !self.block_size.is_multiple_of(16) {
            return Err(CudaError::Argument(format!(
                "blocks of {} tokens, not of a multiple of 16",
                self.block_size
            )));
        }
        let pages = Pages {
            memory: self.memory,
            offset: self.offset,
            block_stride: self.block_stride,
            num_blocks: self.num_blocks,
        };
        pages.addr(cx, self.block_size * self.width * self.dtype.size())
    }
}

/// Address of memory of this device with room for so many bytes.
pub(super) fn room(cx: &CudaExec, what: &str, mem: &Arc<dyn DeviceMem>, bytes: usize) -> Result<u64> {
    if mem.device() != cx.device() || mem.bytes() < bytes {
        return Err(CudaError::Argument(format!(
            "{what}: {} bytes on {}, {bytes} on {} are needed",
            mem.bytes(),
            mem.device(),
            cx.device()
        )));
    }
    Ok(mem.addr())
}

fn types(act: DType, cache: DType) -> Result<[(&'static str, String); 2]> {
    Ok([("ACT", number(act)?), ("CACHE", number(cache)?)])
}

/// What stands for all forms of these files.
///
/// # Errors
/// A type that no kernel reads.
pub fn specs() -> Result<Vec<KernelSpec>> {
    use DType::{BF16, F8E4M3, F8E5M2, F16};
    let real = Dims { heads: 128, nope: 128, rope: 64, rank: 512, v: 128 };
    let odd = Dims { heads: 3, nope: 8, rope: 8, rank: 24, v: 40 };
    let wide = Dims { heads: 2, nope: 192, rope: 64, rank: 256, v: 256 };
    let mut all = vec![];
    for (rows, cols) in [(64, 4), (64, 2), (32, 4), (16, 4), (16, 2)] {
        let form = DecodeForm { rows, cols };
        all.push(decode::spec(&real, form, BF16, BF16, rows == 32)?);
        all.push(decode::merge_spec(&real, form, F16)?);
    }
    let form = DecodeForm { rows: 64, cols: 4 };
    all.push(decode::spec(&real, form, F16, F8E5M2, false)?);
    all.push(decode::spec(&real, form, BF16, F8E4M3, true)?);
    all.push(decode::spec(&odd, DecodeForm { rows: 16, cols: 4 }, F16, F16, true)?);
    for (act, cache) in [(BF16, BF16), (F16, F8E5M2), (BF16, F8E4M3)] {
        all.push(gather_spec(&real, act, cache)?);
        all.push(write_latent_spec(real.latent(), act, cache)?);
    }
    for (dims, act) in [(&real, BF16), (&odd, F16), (&wide, BF16)] {
        for form in PrefillForm::all(dims) {
            all.push(prefill_spec(dims, form, act)?);
        }
    }
    Ok(all)
}
