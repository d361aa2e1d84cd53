//! Every expert's rows times its matrix (`csrc/ops/experts/gemm.cu`). How many rows an expert has the host does not know:
//! the grid has as many tiles as there can be at most.

use super::{
    super::{
        super::kernel_params,
        activation::ActivationArg,
        launch::{Entries, Op, entries},
    },
    Pass, addr,
};
use crate::{
    device::{CudaError, Result},
    ops::Matrices,
};
use headway_tensor::DType;

pub(super) const FILE: &str = "ops/experts/gemm.cu";
const BLOCK: u32 = 128;
/// Rows of the matrix that a tile has.
const COLS: usize = 64;
/// Bytes of shared memory that a tile's row takes, in all stages.
const ROW_BYTES: usize = 64 * 2 * 4;
/// Elements of a 16-byte access.
const LANES: usize = 8;

const GATE_UP: [Entries; 2] = [entries!("gate_up_few"), entries!("gate_up_many")];
const DOWN: [Entries; 2] = [entries!("down_few"), entries!("down_many")];

/// The kernels for rows of this type.
pub(super) fn ops(dtype: DType) -> impl Iterator<Item = Op> {
    [GATE_UP, DOWN].into_iter().flatten().map(move |entries| Op { file: FILE, entries, dtype, table: None })
}

kernel_params! {
    struct Params {
        x: u64, row: i64, rows: u64, offsets: u64,
        matrices: u64, bias: u64, out: u64,
        experts: i32, inner: i32, cols: i32, col_blocks: i32,
        activation: ActivationArg,
        gap: i32,
    }
}

/// Rows of a tile: few where experts have few on average. Both give the same bits.
fn tile_rows(slots: usize, experts: usize) -> usize {
    if slots <= 16 * experts { 16 } else { 64 }
}

/// Tiles that `slots` rows in runs of `experts` experts can be at most: of each run the last one may be part full.
fn most_tiles(slots: usize, experts: usize, rows: usize) -> usize {
    let runs = experts.min(slots);
    // A run of n rows has (n + rows - 1) / rows tiles.
    (slots + runs * (rows - 1)) / rows
}

/// `inner = activation(gate) · up`, by slot.
pub(super) fn gate_up(pass: &Pass<'_>) -> Result<()> {
    let (l, b) = (pass.experts.limits, pass.buffers);
    let wide = pass.x.aligned(16) && l.hidden.is_multiple_of(LANES);
    let params = Params {
        x: pass.x.arg.at,
        row: pass.x.arg.row,
        rows: b.rows.addr(),
        out: b.inner.addr(),
        inner: l.hidden as i32,
        cols: l.intermediate as i32,
        activation: ActivationArg::of(pass.experts.activation),
        ..of(pass, &pass.experts.gate_up)
    };
    // SAFETY: `rows` are tokens of the pass, as `sort` wrote them; a slot has `intermediate` elements in `inner`;
    // alignment as `wide` says, and memory begins at multiples of 256 bytes.
    unsafe { launch(pass, GATE_UP, wide, COLS / 2, params) }
}

/// `results = down(inner)`, by slot.
pub(super) fn down(pass: &Pass<'_>) -> Result<()> {
    let (l, b) = (pass.experts.limits, pass.buffers);
    let wide = l.intermediate.is_multiple_of(LANES);
    let params = Params {
        x: b.inner.addr(),
        row: (l.intermediate * pass.experts.dtype.size()) as i64,
        out: b.results.addr(),
        inner: l.intermediate as i32,
        cols: l.hidden as i32,
        ..of(pass, &pass.experts.down)
    };
    // SAFETY: as above; a slot has `hidden` elements in `results`.
    unsafe { launch(pass, DOWN, wide, COLS, params) }
}

/// What both have.
fn of(pass: &Pass<'_>, m: &Matrices) -> Params {
    Params {
        offsets: pass.buffers.offsets.addr(),
        matrices: m.weights.addr(),
        bias: addr(m.bias.as_ref()),
        experts: pass.experts.limits.experts as i32,
        ..bytemuck::Zeroable::zeroed()
    }
}

/// # Safety
/// The addresses are of what [`Params`] says, for all slots of the pass.
unsafe fn launch(
    pass: &Pass<'_>,
    entries: [Entries; 2],
    wide: bool,
    block_cols: usize,
    params: Params,
) -> Result<()> {
    let (slots, experts) = (pass.slots(), pass.experts.limits.experts);
    let rows = tile_rows(slots, experts);
    let col_blocks = (params.cols as usize).div_ceil(block_cols);
    let blocks = most_tiles(slots, experts, rows) * col_blocks;
    let Ok(blocks) = i32::try_from(blocks) else {
        return Err(CudaError::Argument(format!("a mixture of experts: {blocks} tiles in one launch")));
    };
    let entries = entries[usize::from(rows == 64)];
    let op = Op { file: FILE, entries, dtype: pass.experts.dtype, table: None };
    let params = Params { col_blocks: col_blocks as i32, ..params };
    let shared = (rows + COLS) * ROW_BYTES;
    let kernel = op.kernel(pass.cx, wide)?;
    // SAFETY: the caller's promise.
    unsafe { kernel.launch(pass.cx, [blocks as u32, 1, 1], BLOCK, shared as u32, &params) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_division_of_the_rows_has_more_tiles() {
        for rows in [16, 64] {
            for slots in [1usize, 7, 64, 65, 200] {
                for experts in [1usize, 3, 8, 130] {
                    // One row for each expert but the last, which has the rest; and one for all.
                    let runs = experts.min(slots);
                    let skewed = runs - 1 + (slots - (runs - 1)).div_ceil(rows);
                    let even =
                        (0..runs).map(|e| (slots / runs + usize::from(e < slots % runs)).div_ceil(rows));
                    let most = most_tiles(slots, experts, rows);
                    assert!(most >= skewed.max(even.sum()).max(slots.div_ceil(rows)), "{slots} {experts}");
                    assert!(most <= slots.div_ceil(rows) + runs);
                }
            }
        }
    }
}
