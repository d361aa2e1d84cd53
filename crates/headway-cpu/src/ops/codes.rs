//! Rows of 8-bit codes: made of float32, and multiplied.

use super::check::{expect, f32_mut, f32_ref};
use crate::{
    CpuExec,
    kernels::{elementwise::rows::Rows, linear::CpuLinear},
};
use headway_tensor::{DType, Linear, Result, RowQuant, TensorError, TensorMut, TensorRef, fp8::e4m3_to_f32};

/// The codes of contiguous rows.
fn contiguous(what: &str, shape: &[usize], strides: &[usize]) -> Result<(usize, usize)> {
    match (shape, strides) {
        (&[n, width], &[s, 1]) if s == width || n <= 1 => Ok((n, width)),
        _ => Err(TensorError::WrongShape {
            what: what.into(),
            found: shape.to_vec(),
            expected: "[tokens, width], rows one after another".into(),
        }),
    }
}

/// `codes = quant(x)`.
pub(super) fn quantise(quant: &RowQuant, x: TensorRef<'_>, codes: TensorMut<'_>) -> Result<()> {
    let (xs, x) = f32_ref("quantise", x)?;
    let (n, width) = contiguous("quantise", codes.shape(), codes.strides())?;
    expect("quantise", &[xs.count(), xs.width()], &[n, width])?;
    if codes.dtype() != quant.dtype() {
        let (found, supported) = (codes.dtype(), quant.dtype().name());
        return Err(TensorError::WrongDType { what: "codes", found, supported });
    }
    if !quant.fits(width) || quant.scales_of(width) > 0 {
        return Err(TensorError::Unsupported(format!(
            "rows of {width} as {quant:?}; one given scale is supported"
        )));
    }
    let rows = codes.into_host_bytes()?.chunks_exact_mut(width.max(1)).take(n);
    rows.enumerate().for_each(|(i, codes)| quant.quantise(xs.of(x, i), 1.0, codes, &mut []));
    Ok(())
}

/// `out[t] = values of the codes x[t] · wᵀ`: each code's value is exact in float32, and so is its product with another
/// e4m3 value (or any bfloat16 of few digits); sums are those of the float32 product, in its order.
pub(super) fn linear(cx: &CpuExec, w: &CpuLinear, x: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
    let (n, width) = contiguous("linear input", x.shape(), x.strides())?;
    let (rows, out) = f32_mut("linear output", out)?;
    expect("linear input", &[width], &[w.in_features()])?;
    expect("linear output", &[rows.count(), rows.width()], &[n, w.out_features()])?;
    debug_assert_eq!(x.dtype(), DType::F8E4M3);
    let codes = x.into_host_bytes()?;
    let broken = |_| TensorError::Unsupported("a product of codes after an earlier one panicked".into());
    let mut widened = cx.widened.lock().map_err(broken)?;
    if widened.len() < n * width {
        widened.resize(n * width, 0.0);
    }
    let xs = Rows::new("linear input", &[n, width], &[width, 1])?;
    let x = &mut widened[..n * width];
    xs.for_each(cx.pool(), x, &|i, row| {
        row.iter_mut().zip(&codes[i * width..(i + 1) * width]).for_each(|(x, c)| *x = e4m3_to_f32(*c));
    });
    w.forward(cx, x, &xs, out, &rows);
    Ok(())
}
