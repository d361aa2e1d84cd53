//! Activations as 8-bit codes (`csrc/ops/codes.cu`).

use super::{
    super::kernel_params,
    launch::{Op, blocks, entries, lanes},
    rows::{Rows, RowsArg},
};
use crate::{
    CudaExec,
    device::{CudaError, Result},
};
use headway_tensor::{RowQuant, TensorError, TensorMut, TensorRef};

pub(super) const FILE: &str = "ops/codes.cu";

kernel_params! {
    struct Params { x: RowsArg, out: RowsArg, count: i64, width: i32, scale: f32 }
}

/// `codes = quant(x)`.
///
/// # Errors
/// Another rule than e4m3 with one scale; shapes, types, devices; the driver's.
pub(crate) fn quantise(
    cx: &CudaExec,
    quant: &RowQuant,
    x: TensorRef<'_>,
    codes: TensorMut<'_>,
) -> Result<()> {
    let x = Rows::of(cx, "quantise", x)?.float("quantise")?;
    let out = Rows::of_mut(cx, "quantise, codes", &codes)?;
    x.same_shape("quantise, codes", &out)?;
    let &RowQuant::E4m3 { scale } = quant else {
        return Err(CudaError::Argument(format!(
            "rows as {} on CUDA are not supported; fp8 with one scale is",
            quant.kind()
        )));
    };
    if out.dtype != quant.dtype() {
        let (found, supported) = (out.dtype, quant.dtype().name());
        return Err(TensorError::WrongDType { what: "codes", found, supported }.into());
    }
    if !quant.fits(x.width) || x.heads != 1 {
        return Err(CudaError::Argument(format!(
            "rows of {} as {quant:?}: the scale must be above 0",
            x.width
        )));
    }
    let lanes = lanes(x.dtype);
    let wide = x.aligned(16) && out.aligned(lanes as i64) && x.width.is_multiple_of(lanes);
    let count = x.count() * x.width / if wide { lanes } else { 1 };
    let params = Params { x: x.arg, out: out.arg, count: count as i64, width: x.width as i32, scale };
    let op = Op { file: FILE, entries: entries!("quantise"), dtype: x.dtype, table: None };
    // SAFETY: both lie in tensors of this device and have one shape; alignment as `wide` says.
    unsafe { op.launch(cx, wide, blocks(count), &params) }
}
