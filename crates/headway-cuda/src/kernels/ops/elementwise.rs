//! Element by element over rows (`csrc/ops/elementwise.cu`).

use super::{
    super::kernel_params,
    activation::ActivationArg,
    launch::{Entries, Op, blocks, entries, lanes},
    rows::{Rows, RowsArg},
};
use crate::{
    CudaExec,
    device::{CudaError, Result},
};
use headway_tensor::{Activation, TensorMut, TensorRef};

pub(super) const FILE: &str = "ops/elementwise.cu";

kernel_params! {
    struct Params {
        x: RowsArg, y: RowsArg,
        count: i64,
        heads: i32, width: i32,
        activation: ActivationArg,
        factor: f32, cap: f32,
        gap: i32,
    }
}

/// What is done beside a second operand.
#[derive(Clone, Copy)]
struct How {
    activation: ActivationArg,
    factor: f32,
    cap: f32,
}

const PLAIN: How = How { activation: ActivationArg::NONE, factor: 1.0, cap: 0.0 };

fn run(cx: &CudaExec, entries: Entries, x: &Rows, y: &Rows, how: How) -> Result<()> {
    let lanes = lanes(x.dtype);
    let wide = x.aligned(16) && y.aligned(16) && x.width.is_multiple_of(lanes);
    let count = x.count() * x.width / if wide { lanes } else { 1 };
    let params = Params {
        x: x.arg,
        y: y.arg,
        count: count as i64,
        heads: x.heads as i32,
        width: x.width as i32,
        activation: how.activation,
        factor: how.factor,
        cap: how.cap,
        gap: 0,
    };
    let op = Op { file: FILE, entries, dtype: x.dtype, table: None };
    // SAFETY: both lie in tensors of this device and have one shape and type; alignment as `wide` says.
    unsafe { op.launch(cx, wide, blocks(count), &params) }
}

fn two(
    cx: &CudaExec,
    what: &'static str,
    entries: Entries,
    x: TensorMut<'_>,
    y: TensorRef<'_>,
) -> Result<()> {
    let x = Rows::of_mut(cx, what, &x)?.float(what)?;
    let y = Rows::of(cx, what, y)?;
    x.same_shape(what, &y)?;
    x.same_type(what, &y)?;
    run(cx, entries, &x, &y, PLAIN)
}

/// `acc += x`.
///
/// # Errors
/// Shapes, types, devices; the driver's.
pub(crate) fn add(cx: &CudaExec, acc: TensorMut<'_>, x: TensorRef<'_>) -> Result<()> {
    two(cx, "add", entries!("add"), acc, x)
}

/// `x *= y`.
///
/// # Errors
/// As [`add`].
pub(crate) fn multiply(cx: &CudaExec, x: TensorMut<'_>, y: TensorRef<'_>) -> Result<()> {
    two(cx, "multiply", entries!("multiply"), x, y)
}

/// `x = y`, of rows that lie apart.
///
/// # Errors
/// As [`add`].
pub(crate) fn assign(cx: &CudaExec, x: &Rows, y: &Rows) -> Result<()> {
    let what = "assign";
    let x = x.float(what)?;
    x.same_shape(what, y)?;
    x.same_type(what, y)?;
    run(cx, entries!("assign"), &x, y, PLAIN)
}

/// `x *= silu(gate)`.
///
/// # Errors
/// As [`add`].
pub(crate) fn times_silu(cx: &CudaExec, x: TensorMut<'_>, gate: TensorRef<'_>) -> Result<()> {
    two(cx, "gated norm", entries!("times_silu"), x, gate)
}

/// `x = activation(x)`.
///
/// # Errors
/// As [`add`]; an activation of two operands.
pub(crate) fn activate(cx: &CudaExec, activation: Activation, x: TensorMut<'_>) -> Result<()> {
    if let Activation::ClampedSwiglu { .. } = activation {
        return Err(CudaError::Argument(format!("{activation:?} without an up projection")));
    }
    let x = Rows::of_mut(cx, "activate", &x)?.float("activate")?;
    run(cx, entries!("apply"), &x, &x, How { activation: ActivationArg::of(activation), ..PLAIN })
}

/// `x = cap · tanh(x · factor / cap)`, or `x · factor`.
///
/// # Errors
/// As [`add`]; a cap that is not above 0.
pub(crate) fn scale_and_cap(cx: &CudaExec, x: TensorMut<'_>, factor: f32, cap: Option<f32>) -> Result<()> {
    let x = Rows::of_mut(cx, "scale_and_cap", &x)?.float("scale_and_cap")?;
    match cap {
        None if factor == 1.0 => Ok(()),
        Some(cap) if cap.is_nan() || cap <= 0.0 => {
            Err(CudaError::Argument(format!("scale_and_cap: a cap of {cap}; it must be above 0")))
        }
        cap => run(cx, entries!("scale_and_cap"), &x, &x, How { factor, cap: cap.unwrap_or(0.0), ..PLAIN }),
    }
}
