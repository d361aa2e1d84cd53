//! Launches of the operations' kernels: which of a file's kernels, loaded once, on how many blocks.

use super::super::{Kernel, elements::number};
use crate::{CudaExec, KernelSpec, device::Result};
use headway_tensor::DType;
use std::{cell::RefCell, collections::HashMap, sync::Arc};

/// Threads of a block, as `csrc/ops/rows.cuh` says.
pub(super) const THREADS: usize = 256;
/// Most blocks of a launch whose threads go on to further elements.
const MOST_BLOCKS: usize = 1 << 16;

/// A kernel's two forms: for 16-byte accesses, and for single elements.
pub(super) type Entries = [&'static str; 2];

macro_rules! entries {
    ($name:literal) => {
        [concat!($name, "_wide"), concat!($name, "_single")]
    };
}
pub(super) use entries;

/// What was asked for before.
type Key = (&'static str, DType, Option<DType>);

/// The operations' kernels that are loaded, found without making a description first.
#[derive(Default)]
pub(crate) struct OpKernels(RefCell<HashMap<Key, Arc<Kernel>>>);

/// Elements of a 16-byte access.
pub(super) fn lanes(dtype: DType) -> usize {
    16 / dtype.size()
}

/// Blocks for so many threads.
pub(super) fn blocks(threads: usize) -> [u32; 3] {
    [threads.div_ceil(THREADS).min(MOST_BLOCKS) as u32, 1, 1]
}

/// A file's kernel: its names, and the types it is compiled for.
#[derive(Clone, Copy)]
pub(super) struct Op {
    pub file: &'static str,
    pub entries: Entries,
    pub dtype: DType,
    pub table: Option<DType>,
}

impl Op {
    /// The kernel, loaded.
    pub fn kernel(&self, cx: &CudaExec, wide: bool) -> Result<Arc<Kernel>> {
        let entry = self.entries[usize::from(!wide)];
        let key = (entry, self.dtype, self.table);
        if let Some(kernel) = cx.op_kernels.0.borrow().get(&key) {
            return Ok(Arc::clone(kernel));
        }
        let mut defines = vec![("DTYPE", number(self.dtype)?)];
        if let Some(table) = self.table {
            defines.push(("TABLE", number(table)?));
        }
        let kernel = cx.kernel(&KernelSpec { file: self.file, entry, defines })?;
        cx.op_kernels.0.borrow_mut().insert(key, Arc::clone(&kernel));
        Ok(kernel)
    }

    /// Queues a launch.
    ///
    /// # Safety
    /// As [`Kernel::launch`]; `wide` only where every row of every tensor is aligned for it.
    pub unsafe fn launch<P: bytemuck::Pod>(
        &self,
        cx: &CudaExec,
        wide: bool,
        grid: [u32; 3],
        params: &P,
    ) -> Result<()> {
        let kernel = self.kernel(cx, wide)?;
        // SAFETY: the caller's promise.
        unsafe { kernel.launch(cx, grid, THREADS as u32, 0, params) }
    }
}
