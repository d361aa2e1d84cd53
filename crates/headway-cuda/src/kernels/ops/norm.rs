//! Norms over rows (`csrc/ops/norm.cu`).

use super::{
    super::kernel_params,
    launch::{Entries, Op, THREADS, entries, lanes},
    rows::{Rows, RowsArg, floats},
};
use crate::{
    CudaExec,
    device::{CudaError, Result},
};
use headway_tensor::{Tensor, TensorMut, TensorRef};

pub(super) const FILE: &str = "ops/norm.cu";
/// Rows that are longer are a block's, shorter ones a warp's.
const WARP_WIDTH: usize = 512;

kernel_params! {
    struct Params {
        x: RowsArg, y: RowsArg, out: RowsArg,
        weight: u64, bias: u64,
        count: i32, heads: i32, width: i32, block: i32, weight_head: i32,
        eps: f32,
    }
}

/// What a norm is made of beside its rows.
struct Weights {
    weight: u64,
    bias: u64,
    weight_head: usize,
    eps: f32,
}

/// Launches over rows that were found to have one shape and type.
fn run(cx: &CudaExec, entries: Entries, [x, y, out]: [&Rows; 3], w: &Weights) -> Result<()> {
    let (count, width) = (x.count(), x.width);
    let wide = [x, y, out].iter().all(|r| r.aligned(16))
        && width.is_multiple_of(lanes(x.dtype))
        && w.weight.is_multiple_of(16);
    let block = width > WARP_WIDTH;
    let rows_per_block = if block { 1 } else { THREADS / 32 };
    let params = Params {
        x: x.arg,
        y: y.arg,
        out: out.arg,
        weight: w.weight,
        bias: w.bias,
        count: count as i32,
        heads: x.heads as i32,
        width: width as i32,
        block: i32::from(block),
        weight_head: w.weight_head as i32,
        eps: w.eps,
    };
    let op = Op { file: FILE, entries, dtype: x.dtype, table: None };
    // SAFETY: all rows lie in tensors of this device and have this shape; the weights are as long as a row, or as all
    // of a token's where each head has its own; alignment as `wide` says.
    unsafe { op.launch(cx, wide, [count.div_ceil(rows_per_block) as u32, 1, 1], &params) }
}

fn plain(weight: u64, eps: f32) -> Weights {
    Weights { weight, bias: 0, weight_head: 0, eps }
}

/// `out = rms_norm(x)`.
///
/// # Errors
/// Shapes, types, devices; the driver's.
pub(crate) fn rms_norm(
    cx: &CudaExec,
    x: TensorRef<'_>,
    weight: &Tensor,
    eps: f32,
    out: TensorMut<'_>,
) -> Result<()> {
    let x = Rows::of(cx, "rms_norm", x)?.float("rms_norm")?;
    let out = Rows::of_mut(cx, "rms_norm output", &out)?;
    x.same_shape("rms_norm output", &out)?;
    x.same_type("rms_norm output", &out)?;
    let weight = floats(cx, "rms_norm weight", weight, &[x.width])?;
    run(cx, entries!("rms_norm"), [&x, &x, &out], &plain(weight, eps))
}

/// `x = rms_norm(x)`.
///
/// # Errors
/// As [`rms_norm`].
pub(crate) fn rms_norm_in_place(cx: &CudaExec, x: TensorMut<'_>, weight: &Tensor, eps: f32) -> Result<()> {
    let x = Rows::of_mut(cx, "rms_norm", &x)?.float("rms_norm")?;
    let weight = floats(cx, "rms_norm weight", weight, &[x.width])?;
    run(cx, entries!("rms_norm"), [&x, &x, &x], &plain(weight, eps))
}

/// `residual += x`, `out = rms_norm(residual)`.
///
/// # Errors
/// As [`rms_norm`].
pub(crate) fn add_rms_norm(
    cx: &CudaExec,
    residual: TensorMut<'_>,
    x: TensorRef<'_>,
    weight: &Tensor,
    eps: f32,
    out: TensorMut<'_>,
) -> Result<()> {
    let residual = Rows::of_mut(cx, "add_rms_norm residual", &residual)?.float("add_rms_norm residual")?;
    let x = Rows::of(cx, "add_rms_norm", x)?;
    let out = Rows::of_mut(cx, "add_rms_norm output", &out)?;
    for (what, rows) in [("add_rms_norm", &x), ("add_rms_norm output", &out)] {
        residual.same_shape(what, rows)?;
        residual.same_type(what, rows)?;
    }
    let weight = floats(cx, "add_rms_norm weight", weight, &[residual.width])?;
    run(cx, entries!("add_rms_norm"), [&residual, &x, &out], &plain(weight, eps))
}

/// `x = layer_norm(x)`.
///
/// # Errors
/// As [`rms_norm`].
pub(crate) fn layer_norm_in_place(
    cx: &CudaExec,
    x: TensorMut<'_>,
    weight: &Tensor,
    bias: &Tensor,
    eps: f32,
) -> Result<()> {
    let x = Rows::of_mut(cx, "layer_norm", &x)?.float("layer_norm")?;
    let weight = floats(cx, "layer_norm weight", weight, &[x.width])?;
    let bias = floats(cx, "layer_norm bias", bias, &[x.width])?;
    run(cx, entries!("layer_norm"), [&x, &x, &x], &Weights { weight, bias, weight_head: 0, eps })
}

/// `x = norm(x · silu(gate))` over each of `groups` parts of a row, or the norm first.
///
/// # Errors
/// As [`rms_norm`]; parts that are not equal.
pub(crate) fn gated_norm(
    cx: &CudaExec,
    x: TensorMut<'_>,
    gate: TensorRef<'_>,
    weight: &Tensor,
    groups: usize,
    eps: f32,
    before_gate: bool,
) -> Result<()> {
    let x = Rows::of_mut(cx, "gated norm", &x)?.float("gated norm")?;
    let gate = Rows::of(cx, "gated norm, gate", gate)?;
    x.same_shape("gated norm, gate", &gate)?;
    x.same_type("gated norm, gate", &gate)?;
    let weight = floats(cx, "gated norm weight", weight, &[x.width])?;
    let (Some(parts), Some(gates)) = (x.split(groups), gate.split(groups)) else {
        return Err(CudaError::Argument(format!(
            "a norm over {groups} parts of {} elements: the parts must be equal",
            x.width
        )));
    };
    let weights = Weights { weight, bias: 0, weight_head: parts.width, eps };
    let entries = if before_gate { entries!("norm_then_gate") } else { entries!("gate_then_norm") };
    run(cx, entries, [&parts, &gates, &parts], &weights)
}
