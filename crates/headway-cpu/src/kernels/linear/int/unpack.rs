//! Eight weight rows out of their file's blocks, 256 elements at a time, compiled once for each format
//! and instruction set and called through a pointer. Not for arithmetic.

use super::{Chunk, ROWS};
use crate::{
    Isa,
    kernels::linear::{AHEAD, prefetch},
};
use headway_tensor::quant::{BlockFormat, MAX_SUB_BLOCKS};

#[cfg(target_arch = "x86_64")]
mod x86;

/// Unpacks elements `from..from + len` (whole blocks, at most 256 elements) of the rows of `bytes`, each
/// `row_bytes` long, into the chunk. Lanes of rows that are not there keep what they held.
type Unpack = unsafe fn(chunk: &mut Chunk, bytes: &[u8], row_bytes: usize, from: usize, len: usize);

/// Weight rows, and the function that unpacks them.
#[derive(Clone, Copy)]
pub(in super::super) struct Rows8<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
    unpack: Unpacker,
}

/// An [`Unpack`] function that this machine can run.
#[derive(Clone, Copy)]
pub(in super::super) struct Unpacker(Unpack);

impl<'a> Rows8<'a> {
    /// All rows of a weight.
    pub(in super::super) fn new(bytes: &'a [u8], row_bytes: usize, unpack: Unpacker) -> Self {
        Self { bytes, row_bytes, unpack }
    }

    /// The `count` rows from row `n` on.
    #[inline(always)]
    pub(super) fn from(&self, n: usize, count: usize) -> Self {
        Self { bytes: &self.bytes[n * self.row_bytes..(n + count) * self.row_bytes], ..*self }
    }

    /// How many rows there are.
    #[inline(always)]
    pub(super) fn count(&self) -> usize {
        self.bytes.len() / self.row_bytes
    }

    /// Asks memory for what follows these rows: the share that `len` of `k` elements from `from` have.
    #[inline(always)]
    pub(super) fn prefetch_next(&self, from: usize, len: usize, k: usize) {
        let bytes_of = |elements: usize| elements * self.bytes.len() / k;
        let next = self.bytes.as_ptr().wrapping_add(self.bytes.len().max(AHEAD));
        for offset in (bytes_of(from)..bytes_of(from + len)).step_by(64) {
            prefetch(next.wrapping_add(offset));
        }
    }

    /// Elements `from..from + len` of the rows (at most eight), whole blocks, at most 256.
    #[inline(always)]
    pub(super) fn unpack(&self, chunk: &mut Chunk, from: usize, len: usize) {
        // SAFETY: `unpacker` chose a function that this machine can run.
        unsafe { (self.unpack.0)(chunk, self.bytes, self.row_bytes, from, len) }
    }
}

/// The function for a format at an instruction set.
pub(in super::super) fn unpacker<F: BlockFormat>(isa: Isa) -> Unpacker {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2<F: BlockFormat>(chunk: &mut Chunk, bytes: &[u8], row_bytes: usize, from: usize, len: usize) {
            if F::BLOCK_ELEMS == 32 {
                x86::small::<F>(chunk, bytes, row_bytes, from, len);
            } else {
                generic::<F>(chunk, bytes, row_bytes, from, len);
            }
        }
        if matches!(isa, Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16) {
            return Unpacker(avx2::<F>);
        }
    }
    let _ = isa;
    Unpacker(generic::<F>)
}

#[inline(always)]
fn generic<F: BlockFormat>(chunk: &mut Chunk, bytes: &[u8], row_bytes: usize, from: usize, len: usize) {
    let start = from / F::BLOCK_ELEMS * F::BLOCK_BYTES;
    let len = len / F::BLOCK_ELEMS * F::BLOCK_BYTES;
    for (r, row) in bytes.chunks_exact(row_bytes).take(ROWS).enumerate() {
        let blocks = row[start..start + len].chunks_exact(F::BLOCK_BYTES);
        for (b, (block, q)) in blocks.zip(chunk.q[r].chunks_exact_mut(F::BLOCK_ELEMS)).enumerate() {
            let (mut d, mut m) = ([0f32; MAX_SUB_BLOCKS], [0f32; MAX_SUB_BLOCKS]);
            F::unpack(block, q, &mut d, &mut m);
            for s in 0..F::SUB_BLOCKS {
                chunk.d[b * F::SUB_BLOCKS + s][r] = d[s];
                chunk.m[b * F::SUB_BLOCKS + s][r] = m[s];
            }
        }
    }
}
