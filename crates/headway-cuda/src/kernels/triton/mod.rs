//! Launches of the Triton kernels of `csrc/triton/`: what is loaded, and the numbers that both families take.
//!
//! The grid follows from how many tokens and requests a step has; lengths are read on the device.

mod latent;
mod paged;

pub use latent::{LatentBatch, LatentKernels, LatentPlan, decode, most_latent_part_rows};
pub use paged::{Batch, Mask, Plan, TritonKernels, attend, most_part_rows, slots};

use super::Kernel;
use crate::{
    CudaExec, KernelSpec,
    device::{CudaError, Result},
    modules::triton::{Form, TritonError, TritonFolder},
};
use std::sync::Arc;

/// A compiled kernel with what its launch needs.
#[derive(Debug)]
struct Loaded {
    kernel: Arc<Kernel>,
    threads: u32,
    shared: u32,
    rows: usize,
}

/// Why a layer's kernels were not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// No such file in the folder.
    #[error("{0}.cubin is not built")]
    NotBuilt(String),
    /// It is not what it should be.
    #[error(transparent)]
    File(#[from] TritonError),
    /// The driver's.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

impl Loaded {
    /// The kernel of a form, after its file was checked; the layers of a model share it.
    fn of(cx: &CudaExec, folder: &TritonFolder, form: &Form<'_>) -> Result<Self, LoadError> {
        let arch = cx.info().arch().to_string();
        let entry = folder.find(form, Some(&arch)).ok_or_else(|| LoadError::NotBuilt(form.name(&arch)))?;
        // The sum stands for the code and the launch, so it has to be theirs before anything is found by it.
        if !entry.is_sealed() {
            return Err(folder.changed(entry).into());
        }
        let file = if form.kind.is_latent() { "triton/latent.py" } else { "triton/attention.py" };
        let defines = vec![("HEAD", entry.head_size.to_string()), ("M", entry.rows.to_string())];
        let spec = KernelSpec { file, entry: form.kind.function(), defines };
        Ok(Self {
            kernel: cx.compiled::<LoadError>(&entry.sum, spec, || Ok(folder.code(entry, Some(&arch))?))?,
            threads: entry.num_warps * 32,
            shared: entry.shared,
            rows: entry.rows,
        })
    }

    /// # Errors
    /// As [`Kernel::launch`].
    ///
    /// # Safety
    /// The words are the parameters that the file's entry lists; else as [`Kernel::launch`].
    unsafe fn launch(&self, cx: &CudaExec, grid: [u32; 3], words: &[u64]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.kernel.launch_words(cx, grid, self.threads, self.shared, words) }
    }
}

/// A number of the launch, checked to fit.
fn int(what: &str, n: usize) -> Result<u64> {
    i32::try_from(n)
        .map(|n| u64::from(n.cast_unsigned()))
        .map_err(|_| CudaError::Argument(format!("Triton attention: {what} of {n}: 2147483647 is the most")))
}

fn float(x: f32) -> u64 {
    u64::from(x.to_bits())
}

/// Tokens of a block lie within 32 bits of its start, in elements: the kernels count so.
fn block_fits(block_size: usize, token_stride: usize) -> Result<()> {
    match block_size.checked_mul(token_stride).is_some_and(|n| i32::try_from(n).is_ok()) {
        true => Ok(()),
        false => Err(CudaError::Argument(format!(
            "Triton attention: blocks of {block_size} tokens, {token_stride} elements apart, are longer than 2147483647 \
             elements: use smaller blocks"
        ))),
    }
}

/// Whether a table holds a row of so many entries for each request.
fn table_holds(len: usize, reqs: usize, stride: usize) -> bool {
    reqs.checked_mul(stride).is_some_and(|n| len >= n)
}

/// `block_size` divides keys by a product's high word: `key * reciprocal >> 32`. Exact for keys below
/// `2^32 / block_size`, which is what lengths are held against.
fn reciprocal(block_size: usize, most_keys: usize) -> Result<u64> {
    let exact = block_size.is_power_of_two() || (most_keys as u64) < (1 << 32) / block_size.max(1) as u64;
    if block_size < 2 || !exact || i32::try_from(most_keys).is_err() {
        return Err(CudaError::Argument(format!(
            "Triton attention: blocks of {block_size} tokens for requests of {most_keys}: use blocks of a power of 2"
        )));
    }
    Ok((1u64 << 32).div_ceil(block_size as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_and_tables_beyond_32_bits_are_refused() {
        assert!(block_fits(16, 128).is_ok() && block_fits(1 << 15, (1 << 16) - 1).is_ok());
        for (block, token) in [(1 << 15, 1 << 16), (usize::MAX, 2)] {
            let e = block_fits(block, token).unwrap_err().to_string();
            assert!(e.contains("use smaller blocks"), "{e}");
        }
        assert!(table_holds(6, 2, 3) && table_holds(0, 0, 3));
        // A last row cut short; more than there can be.
        assert!(!table_holds(5, 2, 3) && !table_holds(3, 2, 3) && !table_holds(6, usize::MAX, 2));
    }

    #[test]
    fn a_products_high_word_is_a_quotient() {
        for block in [16usize, 32, 48, 80, 112, 256, 1008] {
            let most = (1usize << 32) / block - 1;
            let by = reciprocal(block, most.min(i32::MAX as usize)).unwrap();
            for key in (0..100_000).chain(most - 5000..most).filter(|&k| i32::try_from(k).is_ok()) {
                assert_eq!((key as u64 * by) >> 32, (key / block) as u64, "{key} / {block}");
            }
        }
        assert!(reciprocal(48, 1 << 27).is_err() && reciprocal(0, 1).is_err());
    }
}
