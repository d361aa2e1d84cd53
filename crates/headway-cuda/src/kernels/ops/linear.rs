//! Linear layers: what cuBLASLt multiplies, checked.

use super::{
    gemm::{Gemm, Product},
    rows::Rows,
};
use crate::{
    CudaExec,
    device::{CudaError, Result},
    ops::CudaLinear,
};
use headway_tensor::{DType, Exec, Linear, TensorError, TensorMut, TensorRef};

/// `out[t] = x[t] · wᵀ + bias`.
///
/// # Errors
/// Shapes, types, devices; no cuBLASLt; the library's.
pub(crate) fn linear(cx: &CudaExec, w: &CudaLinear, x: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
    let x = Rows::of(cx, "linear input", x)?;
    let out = Rows::of_mut(cx, "linear output", &out)?;
    if x.dtype != w.dtype() {
        return Err(CudaError::Argument(format!(
            "linear: {} rows and a weight of {}; load the weight with compute {}, or convert the rows",
            x.dtype,
            w.dtype(),
            x.dtype
        )));
    }
    if out.dtype != x.dtype && out.dtype != DType::F32 {
        return Err(CudaError::Argument(format!(
            "linear: an output of {} for an input of {}; {} and float32 are supported",
            out.dtype, x.dtype, x.dtype
        )));
    }
    let expect = |what: &str, rows: &Rows, width| match [rows.heads, rows.tokens, rows.width]
        == [1, x.tokens, width]
    {
        true => Ok(()),
        false => Err(TensorError::WrongShape {
            what: what.into(),
            found: vec![rows.count(), rows.width],
            expected: format!("[{}, {width}]", x.tokens),
        }),
    };
    expect("linear input", &x, w.in_features())?;
    expect("linear output", &out, w.out_features())?;
    if w.weight().device() != cx.device() {
        let (found, expected) = (w.weight().device(), cx.device());
        return Err(TensorError::WrongDevice { what: "linear weight", found, expected }.into());
    }
    let product = Product {
        weight: w.weight().addr(),
        dtype: w.dtype(),
        shape: [w.out_features(), w.in_features()],
        bias: w.bias(out.dtype).map(|b| b.addr()),
        head_step: 0,
        by_input: false,
    };
    Gemm::of(cx)?.run(cx, &product, &x, &out)
}
