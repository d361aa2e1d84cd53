//! A block-quantised weight packed at load: groups of eight rows, each one run of memory.
//!
//! Lives as long as the layer. While it is made, the file's pages are given back as they are read, so
//! that the weight is in memory once.

use super::{
    super::lines::{self, Line},
    ROWS, layout,
};
use crate::{CpuExec, Isa, pool::SharedMut};
use headway_tensor::Weight;
use layout::Layout;

/// Bytes of the file that a task packs, at least.
const TASK_BYTES: usize = 256 << 10;

/// Packed rows.
pub(in super::super) struct Packed {
    lines: Vec<Line>,
    /// Bytes of eight rows.
    group: usize,
}

impl Packed {
    /// The weight, of format `L`, with its number of rows rounded up to whole groups.
    pub(in super::super) fn new<L: Layout>(cx: &CpuExec, weight: &Weight) -> Self {
        let (rows, row_bytes) = (weight.rows(), weight.row_bytes());
        let group = weight.cols() / L::BLOCK_ELEMS * L::UNIT;
        let mut lines = lines::zeroed(rows.div_ceil(ROWS) * group);
        let out = SharedMut::new(bytemuck::cast_slice_mut(&mut lines));
        let step = (TASK_BYTES / row_bytes).next_multiple_of(ROWS).max(ROWS);
        cx.pool().run(rows.div_ceil(step), &|task, _| {
            let first = task * step;
            let range = first * row_bytes..rows.min(first + step) * row_bytes;
            let groups = weight.bytes().as_slice()[range.clone()].chunks(ROWS * row_bytes);
            for (i, rows) in groups.enumerate() {
                let at = (first / ROWS + i) * group;
                // SAFETY: each group is made by one task.
                let out = unsafe { out.slice_mut(at..at + group) };
                pack_rows::<L>(cx.isa(), rows, row_bytes, out);
            }
            weight.bytes().not_needed_now(range);
        });
        Self { lines, group }
    }

    /// Eight rows from row `8 * index` on: whole units.
    #[inline(always)]
    pub(super) fn group(&self, index: usize) -> &[u8] {
        &self.as_bytes()[index * self.group..(index + 1) * self.group]
    }

    /// All of it, in the order in which it is read.
    pub(in super::super) fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.lines)
    }
}

/// Compiled for the instruction set.
fn pack_rows<L: Layout>(isa: Isa, rows: &[u8], row_bytes: usize, out: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2<L: Layout>(rows: &[u8], row_bytes: usize, out: &mut [u8]) {
            layout::pack::<L>(rows, row_bytes, out);
        }
        if matches!(isa, Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx) {
            // SAFETY: an `Isa` of this level is only made where the processor has its features.
            return unsafe { avx2::<L>(rows, row_bytes, out) };
        }
    }
    let _ = isa;
    layout::pack::<L>(rows, row_bytes, out);
}
