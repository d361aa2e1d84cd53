//! The products of latent attention by cuBLASLt, out of `kv_b_proj` as it lies: `[heads x (nope + v), rank]`, a head's
//! W_UK `[nope, rank]` before its W_UV `[v, rank]`. No matrix is copied or turned.

use super::{
    elementwise::assign,
    gemm::{Gemm, Product},
    rows::Rows,
};
use crate::{
    CudaExec,
    device::{CudaError, Result},
    kernels::mla::Dims,
    ops::CudaLinear,
};
use headway_tensor::{DType, DeviceMem, Linear, TensorError, TensorMut, TensorRef};
use std::sync::Arc;

/// That `kv_b_proj` is what these products take.
///
/// # Errors
/// Another shape or type, a bias, another device.
pub(crate) fn check(w: &CudaLinear, d: &Dims, dtype: DType) -> Result<()> {
    if [w.out_features(), w.in_features()] != [d.heads * d.expanded(), d.rank] {
        return Err(TensorError::WrongShape {
            what: "kv_b_proj".into(),
            found: vec![w.out_features(), w.in_features()],
            expected: format!("[{} x ({} + {}), {}]", d.heads, d.nope, d.v, d.rank),
        }
        .into());
    }
    if w.dtype() != dtype || w.bias(dtype).is_some() {
        return Err(CudaError::Argument(format!(
            "kv_b_proj in {}{}: latent attention multiplies it in the activations' type, {dtype}, without a bias",
            w.dtype(),
            if w.bias(dtype).is_some() { " with a bias" } else { "" }
        )));
    }
    Ok(())
}

fn head_product(w: &CudaLinear, d: &Dims, first_row: usize, shape: [usize; 2], by_input: bool) -> Product {
    Product {
        weight: w.weight().addr() + (first_row * d.rank * w.dtype().size()) as u64,
        dtype: w.dtype(),
        shape,
        bias: None,
        head_step: d.expanded() * d.rank,
        by_input,
    }
}

/// Queries `[tokens, heads, nope + rope]` into the latent space, but for their rotated parts:
/// `out` is `[tokens, heads, rank]`. q·(W_UK c) = (W_UKᵀ q)·c.
///
/// # Errors
/// Shapes, types, devices; the library's.
pub(crate) fn into_latents(
    cx: &CudaExec,
    w: &CudaLinear,
    d: &Dims,
    q: TensorRef<'_>,
    out: &Arc<dyn DeviceMem>,
) -> Result<()> {
    let mut x = Rows::of(cx, "latent query", q)?;
    expect("latent query", q.shape(), x.tokens, d.heads, d.qk())?;
    x.width = d.nope;
    let out = matrix(cx, "queries in the latent space", out, w.dtype(), [x.tokens, d.heads, d.rank])?;
    Gemm::of(cx)?.run(cx, &head_product(w, d, 0, [d.rank, d.nope], true), &x, &out)
}

/// [`into_latents`] with the rotated parts behind: `out` is `[tokens, heads, rank + rope]`.
///
/// # Errors
/// As [`into_latents`].
pub(crate) fn into_rows(
    cx: &CudaExec,
    w: &CudaLinear,
    d: &Dims,
    q: TensorRef<'_>,
    out: &Arc<dyn DeviceMem>,
) -> Result<()> {
    let x = Rows::of(cx, "latent query", q)?;
    expect("latent query", q.shape(), x.tokens, d.heads, d.qk())?;
    let rows = matrix(cx, "rows of queries", out, w.dtype(), [x.tokens, d.heads, d.latent()])?;
    let size = w.dtype().size() as u64;
    let part = |rows: &Rows, from: usize, width: usize| {
        let mut part = Rows { width, ..*rows };
        part.arg.at += from as u64 * size;
        part
    };
    let product = head_product(w, d, 0, [d.rank, d.nope], true);
    Gemm::of(cx)?.run(cx, &product, &part(&x, 0, d.nope), &part(&rows, 0, d.rank))?;
    assign(cx, &part(&rows, d.rank, d.rope), &part(&x, d.nope, d.rope))
}

/// Weighted latents `[tokens, heads, rank]` out of the latent space: `out` is `[tokens, heads x v]`.
/// Σ p W_UV c = W_UV Σ p c.
///
/// # Errors
/// Shapes, types, devices; the library's.
pub(crate) fn out_of_latents(
    cx: &CudaExec,
    w: &CudaLinear,
    d: &Dims,
    x: &Arc<dyn DeviceMem>,
    out: TensorMut<'_>,
) -> Result<()> {
    let tokens = out.shape()[0];
    let x = matrix(cx, "weighted latents", x, w.dtype(), [tokens, d.heads, d.rank])?;
    let out = out.heads(d.heads)?;
    expect("latent attention output", out.shape(), tokens, d.heads, d.v)?;
    let out = Rows::of_mut(cx, "latent attention output", &out)?;
    Gemm::of(cx)?.run(cx, &head_product(w, d, d.nope, [d.v, d.rank], false), &x, &out)
}

/// Latents `[slots, rank + rope]`, but for their rotated parts, as keys and values of every head: `out` is
/// `[slots, heads, nope + v]`.
///
/// # Errors
/// Too little room, devices; the library's.
pub(crate) fn expand(
    cx: &CudaExec,
    w: &CudaLinear,
    d: &Dims,
    latents: &Arc<dyn DeviceMem>,
    slots: usize,
    out: &Arc<dyn DeviceMem>,
) -> Result<()> {
    let mut x = Rows::matrix(cx, "latents", latents, w.dtype(), [slots, d.latent()])?;
    x.width = d.rank;
    let n_out = d.heads * d.expanded();
    let out = Rows::matrix(cx, "expanded keys and values", out, w.dtype(), [slots, n_out])?;
    let product = Product {
        weight: w.weight().addr(),
        dtype: w.dtype(),
        shape: [n_out, d.rank],
        bias: None,
        head_step: 0,
        by_input: false,
    };
    Gemm::of(cx)?.run(cx, &product, &x, &out)
}

fn expect(what: &'static str, found: &[usize], tokens: usize, heads: usize, width: usize) -> Result<()> {
    match found == [tokens, heads, width] {
        true => Ok(()),
        false => Err(TensorError::WrongShape {
            what: what.into(),
            found: found.to_vec(),
            expected: format!("[{tokens}, {heads}, {width}]"),
        }
        .into()),
    }
}

/// A contiguous `[tokens, heads, width]`.
fn matrix(
    cx: &CudaExec,
    what: &'static str,
    mem: &Arc<dyn DeviceMem>,
    dtype: DType,
    [tokens, heads, width]: [usize; 3],
) -> Result<Rows> {
    let rows = Rows::matrix(cx, what, mem, dtype, [tokens, heads * width])?;
    rows.split(heads).ok_or_else(|| CudaError::Argument(format!("{what}: {heads} heads of {width}")))
}
