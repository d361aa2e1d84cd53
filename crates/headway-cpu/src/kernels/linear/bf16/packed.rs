//! A bfloat16 weight as tiles want it: panels of 16 rows, in each 32 elements of K after 32, in those
//! `[16 pairs of K][16 rows][2]`. A line of 64 bytes is thus a pair of elements of 16 rows, which is what a
//! vector of dot products takes too, and a panel is read from its beginning to its end.
//!
//! Lives as long as the layer; while it is made, the file's pages are given back as they are read. Rows
//! and K are padded with zeros to 16 and 32.

use super::{
    super::lines::{self, Line},
    COLUMNS, DEPTH, TILE,
};
use crate::{CpuExec, pool::SharedMut};
use headway_tensor::Weight;

/// Bytes of the file that a task packs, at least.
const TASK_BYTES: usize = 256 << 10;

/// Packed rows.
pub(in super::super) struct Packed {
    lines: Vec<Line>,
    /// Tiles along K.
    depth: usize,
}

impl Packed {
    /// The weight, which is bfloat16.
    pub(in super::super) fn new(cx: &CpuExec, weight: &Weight) -> Self {
        let (rows, row_bytes) = (weight.rows(), weight.row_bytes());
        let depth = weight.cols().div_ceil(DEPTH);
        let panel = depth * TILE;
        let mut lines = lines::zeroed(rows.div_ceil(COLUMNS) * panel);
        let out = SharedMut::new(bytemuck::cast_slice_mut(&mut lines));
        let step = (TASK_BYTES / row_bytes.max(1)).next_multiple_of(COLUMNS).max(COLUMNS);
        cx.pool().run(rows.div_ceil(step), &|task, _| {
            let first = task * step;
            let range = first * row_bytes..rows.min(first + step) * row_bytes;
            let panels = weight.bytes().as_slice()[range.clone()].chunks(COLUMNS * row_bytes);
            for (i, rows) in panels.enumerate() {
                let at = (first / COLUMNS + i) * panel;
                // SAFETY: each panel is made by one task.
                let out = unsafe { out.slice_mut(at..at + panel) };
                pack(rows, row_bytes, out);
            }
            weight.bytes().not_needed_now(range);
        });
        Self { lines, depth }
    }

    /// Rows `16 * index` and the fifteen after it: [`Packed::depth`] tiles.
    #[inline(always)]
    pub(super) fn panel(&self, index: usize) -> &[u8] {
        let panel = self.depth * TILE;
        &self.as_bytes()[index * panel..(index + 1) * panel]
    }

    /// Tiles along K.
    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    /// All of it, in the order in which it is read.
    pub(in super::super) fn as_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.lines)
    }
}

/// Up to 16 rows into a panel of zeros.
fn pack(rows: &[u8], row_bytes: usize, out: &mut [u8]) {
    for (t, tile) in out.chunks_exact_mut(TILE).enumerate() {
        for (n, row) in rows.chunks_exact(row_bytes).enumerate() {
            let row = &row[t * DEPTH * 2..row_bytes.min((t + 1) * DEPTH * 2)];
            let (pairs, last) = row.as_chunks::<4>();
            for (line, pair) in tile.chunks_exact_mut(64).zip(pairs) {
                line[4 * n..4 * n + 4].copy_from_slice(pair);
            }
            if !last.is_empty() {
                tile[pairs.len() * 64 + 4 * n..][..last.len()].copy_from_slice(last);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_has_its_place_and_the_rest_is_zero() {
        for (n, k) in [(16, 32), (3, 5), (16, 70), (1, 1), (9, 64)] {
            let element = |n: usize, k: usize| (1 + n * 100 + k) as u16;
            let rows: Vec<u8> =
                (0..n).flat_map(|n| (0..k).map(move |k| element(n, k))).flat_map(u16::to_le_bytes).collect();
            let mut out = vec![0u8; k.div_ceil(DEPTH) * TILE];
            pack(&rows, 2 * k, &mut out);
            let found: Vec<u16> = out.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
            for (i, found) in found.into_iter().enumerate() {
                let (pair, row, which) = (i / 32, i / 2 % 16, i % 2);
                let at = 2 * pair + which;
                assert_eq!(found, if row < n && at < k { element(row, at) } else { 0 }, "{n} {k}: {i}");
            }
        }
    }
}
