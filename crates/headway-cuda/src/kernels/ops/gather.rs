//! Rows by number (`csrc/ops/gather.cu`). The numbers are on the device: one that is out of range gives zeros there, and
//! an error from the next call of [`CudaExec`] that sees it.

use super::{
    super::kernel_params,
    launch::{Op, blocks, entries, lanes},
    rows::{Rows, RowsArg, indices},
};
use crate::{
    CudaExec,
    device::{Indexed, Result},
    ops::CudaLinear,
};
use headway_tensor::{Linear, TensorError, TensorMut, TensorRef, View};

pub(super) const FILE: &str = "ops/gather.cu";

kernel_params! {
    struct Params {
        from: RowsArg, out: RowsArg,
        rows: u64, fault: u64,
        count: i64,
        width: i32, end: i32,
        scale: f32,
        what: i32,
    }
}

/// `out[i] = x[rows[i]]`.
///
/// # Errors
/// Shapes, types, devices; the driver's.
pub(crate) fn gather_rows(
    cx: &CudaExec,
    x: TensorRef<'_>,
    rows: &View<i32>,
    out: TensorMut<'_>,
) -> Result<()> {
    let x = Rows::of(cx, "gather_rows", x)?.float("gather_rows")?;
    gather(cx, Indexed::Row, &x, rows, 1.0, out)
}

/// `out[i] = table[ids[i]] · scale`.
///
/// # Errors
/// As [`gather_rows`].
pub(crate) fn embed(
    cx: &CudaExec,
    table: &CudaLinear,
    ids: &View<i32>,
    scale: f32,
    out: TensorMut<'_>,
) -> Result<()> {
    let shape = [table.out_features(), table.in_features()];
    let table = Rows::matrix(cx, "embed: table", table.weight(), table.dtype(), shape)?;
    gather(cx, Indexed::TokenId, &table, ids, scale, out)
}

fn gather(
    cx: &CudaExec,
    of: Indexed,
    from: &Rows,
    rows: &View<i32>,
    scale: f32,
    out: TensorMut<'_>,
) -> Result<()> {
    let (out_what, ids_what) = match of {
        Indexed::TokenId => ("embed output", "embed: token ids"),
        _ => ("gather_rows output", "gather_rows: row numbers"),
    };
    let out = Rows::of_mut(cx, out_what, &out)?.float(out_what)?;
    let ids = indices(cx, ids_what, rows)?;
    if [from.heads, out.heads, out.tokens, out.width] != [1, 1, rows.len(), from.width] {
        return Err(TensorError::WrongShape {
            what: out_what.into(),
            found: vec![out.count(), out.width],
            expected: format!("[{}, {}]", rows.len(), from.width),
        }
        .into());
    }
    let lanes = lanes(out.dtype);
    let wide = from.aligned(16) && out.aligned(16) && out.width.is_multiple_of(lanes);
    let count = out.tokens * out.width / if wide { lanes } else { 1 };
    let params = Params {
        from: from.arg,
        out: out.arg,
        rows: ids,
        fault: cx.fault_addr(),
        count: count as i64,
        width: out.width as i32,
        end: from.tokens as i32,
        scale,
        what: of as i32,
    };
    let op = Op { file: FILE, entries: entries!("gather"), dtype: out.dtype, table: Some(from.dtype) };
    // SAFETY: all lie in tensors of this device; a number is read for each row of `out`, and rows of `from` only where
    // they are; alignment as `wide` says.
    unsafe { op.launch(cx, wide, blocks(count), &params) }
}
