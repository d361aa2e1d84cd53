//! Rotary positions (`csrc/ops/rope.cu`). Positions are on the device: one past the table leaves its row as it is, and is
//! an error from the next call of [`CudaExec`] that sees it.

use super::{
    super::kernel_params,
    launch::{Op, blocks, entries, lanes},
    rows::{Rows, RowsArg, floats, indices},
};
use crate::{
    CudaExec,
    device::{Indexed, Result},
};
use headway_tensor::{RopeStyle, Tensor, TensorError, TensorMut, View};

pub(super) const FILE: &str = "ops/rope.cu";

kernel_params! {
    struct Params {
        x: RowsArg,
        positions: u64, table: u64, fault: u64,
        count: i64,
        heads: i32, half: i32, end: i32, what: i32,
    }
}

/// Rotates the first elements of each head.
///
/// # Errors
/// Shapes, types, devices; the driver's.
pub(crate) fn rope(
    cx: &CudaExec,
    x: TensorMut<'_>,
    positions: &View<i32>,
    table: &Tensor,
    style: RopeStyle,
) -> Result<()> {
    let x = Rows::of_mut(cx, "rope", &x)?.float("rope")?;
    let &[end, half, 2] = table.shape() else { return Err(wrong(table, x.width)) };
    if 2 * half > x.width {
        return Err(wrong(table, x.width));
    }
    let table = floats(cx, "rope table", table, &[end, half, 2])?;
    let ids = indices(cx, "rope: positions", positions)?;
    if positions.len() != x.tokens {
        return Err(TensorError::WrongShape {
            what: "rope: positions".into(),
            found: vec![positions.len()],
            expected: format!("[{}]", x.tokens),
        }
        .into());
    }
    let lanes = lanes(x.dtype);
    let (entries, pairs_at_once) = match style {
        RopeStyle::Halves => (entries!("halves"), lanes),
        RopeStyle::Interleaved => (entries!("pairs"), lanes / 2),
    };
    // The table's rows are aligned as the halves are: an access takes two float32 for each pair.
    let wide = x.aligned(16) && half.is_multiple_of(pairs_at_once);
    let count = x.count() * half / if wide { pairs_at_once } else { 1 };
    let params = Params {
        x: x.arg,
        positions: ids,
        table,
        fault: cx.fault_addr(),
        count: count as i64,
        heads: x.heads as i32,
        half: half as i32,
        end: end.min(i32::MAX as usize) as i32,
        what: Indexed::Position as i32,
    };
    let op = Op { file: FILE, entries, dtype: x.dtype, table: None };
    // SAFETY: all lie in tensors of this device; a position for each token, rows of the table only where they are;
    // alignment as `wide` says.
    unsafe { op.launch(cx, wide, blocks(count), &params) }
}

fn wrong(table: &Tensor, head: usize) -> crate::CudaError {
    TensorError::WrongShape {
        what: "rope table".into(),
        found: table.shape().to_vec(),
        expected: format!("[positions, rotary / 2, 2], rotary at most the head size {head}"),
    }
    .into()
}
