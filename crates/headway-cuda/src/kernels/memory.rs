//! What memory gives at most, for benchmarks: reads and copies of a whole buffer, and data to measure with.

use super::{Kernel, kernel_params};
use crate::{
    CudaExec, KernelSpec,
    device::{CudaError, Result},
};
use headway_tensor::{DeviceMem, Exec};
use std::sync::Arc;

const THREADS: u32 = 512;

kernel_params! {
    struct Params { from: u64, to: u64, words: u64 }
}

/// The kernels, compiled.
#[derive(Debug)]
pub struct MemoryKernels {
    read: Arc<Kernel>,
    copy: Arc<Kernel>,
    fill: Arc<Kernel>,
    fill_codes: Arc<Kernel>,
}

/// What they are compiled of: bfloat16 data.
pub fn specs() -> [KernelSpec; 4] {
    ["read_all", "copy_all", "fill_floats", "fill_codes"].map(|entry| KernelSpec {
        file: "bench/memory.cu",
        entry,
        defines: vec![("ACT", "1".into())],
    })
}

impl MemoryKernels {
    /// Compiles them.
    ///
    /// # Errors
    /// The compiler's.
    pub fn new(cx: &CudaExec) -> Result<Self> {
        let [read, copy, fill, fill_codes] = specs();
        Ok(Self {
            read: cx.kernel(&read)?,
            copy: cx.kernel(&copy)?,
            fill: cx.kernel(&fill)?,
            fill_codes: cx.kernel(&fill_codes)?,
        })
    }

    /// Reads all of `from`.
    ///
    /// # Errors
    /// Memory of another device; the driver's.
    pub fn read(&self, cx: &CudaExec, from: &Arc<dyn DeviceMem>) -> Result<()> {
        self.run(cx, &self.read, from, from, 16)
    }

    /// Copies `from` to `to`, as much as both hold.
    ///
    /// # Errors
    /// Memory of another device; the driver's.
    pub fn copy(&self, cx: &CudaExec, from: &Arc<dyn DeviceMem>, to: &Arc<dyn DeviceMem>) -> Result<()> {
        self.run(cx, &self.copy, from, to, 8)
    }

    /// Fills `to` with bfloat16 numbers between -2 and 2.
    ///
    /// # Errors
    /// Memory of another device; the driver's.
    pub fn fill(&self, cx: &CudaExec, to: &Arc<dyn DeviceMem>) -> Result<()> {
        self.run(cx, &self.fill, to, to, 8)
    }

    /// Fills `to` with e4m3 numbers between -2 and 2.
    ///
    /// # Errors
    /// Memory of another device; the driver's.
    pub fn fill_codes(&self, cx: &CudaExec, to: &Arc<dyn DeviceMem>) -> Result<()> {
        self.run(cx, &self.fill_codes, to, to, 8)
    }

    fn run(
        &self,
        cx: &CudaExec,
        kernel: &Kernel,
        from: &Arc<dyn DeviceMem>,
        to: &Arc<dyn DeviceMem>,
        blocks: u32,
    ) -> Result<()> {
        for m in [from, to] {
            if m.device() != cx.device() {
                return Err(CudaError::Argument(format!("memory of {} on {}", m.device(), cx.device())));
            }
        }
        let words = (from.bytes().min(to.bytes()) / 16) as u64;
        let params = Params { from: from.addr(), to: to.addr(), words };
        let grid = cx.info().multiprocessors * blocks;
        // SAFETY: both are allocations of this device of at least so many words.
        unsafe { kernel.launch(cx, [grid, 1, 1], THREADS, 0, &params) }
    }
}
