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
use headway_tensor::{DType, DeviceMem, RowQuant, TensorError, TensorMut, TensorRef};
use std::sync::Arc;

pub(super) const FILE: &str = "ops/codes.cu";

kernel_params! {
    struct Params { x: RowsArg, out: RowsArg, count: i64, width: i32, heads: i32, scale: f32, pad: i32 }
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
    let out = Rows::of_mut(cx, "quantise, codes", &codes)?;
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
    launch(cx, scale, x, &out)
}

/// e4m3 codes of queries `[tokens, heads, size]` over a scale, into memory that has room for them without gaps.
///
/// # Errors
/// Shapes, types, devices; the driver's.
pub(crate) fn quantise_queries(
    cx: &CudaExec,
    scale: f32,
    x: TensorRef<'_>,
    codes: &Arc<dyn DeviceMem>,
) -> Result<()> {
    let &[tokens, heads, size] = x.shape() else {
        return Err(CudaError::Argument(format!(
            "queries of shape {:?}, not [tokens, heads, size]",
            x.shape()
        )));
    };
    let out = Rows::matrix(cx, "codes of queries", codes, DType::F8E4M3, [tokens, heads * size])?;
    let out = out.split(heads).ok_or_else(|| CudaError::Argument("queries without heads".into()))?;
    launch(cx, scale, x, &out)
}

fn launch(cx: &CudaExec, scale: f32, x: TensorRef<'_>, out: &Rows) -> Result<()> {
    let x = Rows::of(cx, "quantise", x)?.float("quantise")?;
    x.same_shape("quantise, codes", out)?;
    if !scale.is_finite() || scale <= 0.0 {
        return Err(CudaError::Argument(format!("codes over a scale of {scale}: it must be above 0")));
    }
    let lanes = lanes(x.dtype);
    let wide = x.aligned(16) && out.aligned(lanes as i64) && x.width.is_multiple_of(lanes);
    let count = x.count() * x.width / if wide { lanes } else { 1 };
    let (width, heads) = (x.width as i32, x.heads as i32);
    let params = Params { x: x.arg, out: out.arg, count: count as i64, width, heads, scale, pad: 0 };
    let op = Op { file: FILE, entries: entries!("quantise"), dtype: x.dtype, table: None };
    // SAFETY: both lie in tensors of this device and have one shape; alignment as `wide` says.
    unsafe { op.launch(cx, wide, blocks(count), &params) }
}
