//! Gates of feed-forwards (`csrc/ops/gated.cu`).

use super::{
    super::kernel_params,
    activation::ActivationArg,
    launch::{Op, blocks, entries, lanes},
    rows::{Rows, RowsArg},
};
use crate::{CudaExec, device::Result};
use headway_tensor::{Activation, TensorError, TensorMut, TensorRef};

pub(super) const FILE: &str = "ops/gated.cu";

kernel_params! {
    struct Params { x: RowsArg, out: RowsArg, count: i64, width: i32, activation: ActivationArg }
}

/// `out = activation(gate) · up`.
///
/// # Errors
/// Shapes, types, devices; the driver's.
pub(crate) fn gated(
    cx: &CudaExec,
    activation: Activation,
    gate_up: TensorRef<'_>,
    out: TensorMut<'_>,
) -> Result<()> {
    let x = Rows::of(cx, "gated", gate_up)?.float("gated")?;
    let out = Rows::of_mut(cx, "gated output", &out)?;
    x.same_type("gated output", &out)?;
    if [x.heads, out.heads, out.tokens, 2 * out.width] != [1, 1, x.tokens, x.width] {
        return Err(TensorError::WrongShape {
            what: "gated output".into(),
            found: vec![out.count(), out.width],
            expected: format!("[{}, half of {}]", x.count(), x.width),
        }
        .into());
    }
    let lanes = lanes(x.dtype);
    let wide = x.aligned(16) && out.aligned(16) && out.width.is_multiple_of(lanes);
    let count = out.count() * out.width / if wide { lanes } else { 1 };
    let params = Params {
        x: x.arg,
        out: out.arg,
        count: count as i64,
        width: out.width as i32,
        activation: ActivationArg::of(activation),
    };
    let op = Op { file: FILE, entries: entries!("gate"), dtype: x.dtype, table: None };
    // SAFETY: both lie in tensors of this device, a row of `x` twice as long as one of `out`; alignment as `wide` says.
    unsafe { op.launch(cx, wide, blocks(count), &params) }
}
