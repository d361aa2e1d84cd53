//! A mixture of experts (`csrc/ops/experts`), nothing of which the host reads: choose, sort the choices by expert, gate
//! and up of every expert's rows, down, add up. A pass takes as many tokens as the buffers hold. Each row's arithmetic
//! has one order, so its result is the same in any batch.

mod combine;
mod gemm;
mod route;
mod sort;

use super::{super::elements::number, rows::Rows};
use crate::{
    CudaExec, KernelSpec,
    device::{CudaError, Result},
    ops::{CudaExpertBuffers, CudaExperts},
};
use headway_tensor::{DType, DeviceMem, Exec, TensorError, TensorMut, TensorRef};
use std::sync::Arc;

/// Some tokens of a call, with what they are computed by and in.
struct Pass<'a> {
    cx: &'a CudaExec,
    experts: &'a CudaExperts,
    buffers: &'a CudaExpertBuffers,
    /// Inputs, logits and outputs of these tokens.
    x: Rows,
    logits: Rows,
    out: Rows,
    tokens: usize,
}

impl Pass<'_> {
    /// Choices of all tokens.
    fn slots(&self) -> usize {
        self.tokens * self.experts.limits.top_k
    }
}

/// Forms in which the files are compiled.
pub(super) fn specs() -> Result<Vec<KernelSpec>> {
    let of = |file, entry, dtype| -> Result<KernelSpec> {
        Ok(KernelSpec { file, entry, defines: vec![("DTYPE", number(dtype)?)] })
    };
    Ok(vec![
        of(route::FILE, "route", DType::F32)?,
        of(sort::FILE, "sort", DType::F32)?,
        of(gemm::FILE, "gate_up_few_wide", DType::BF16)?,
        of(combine::FILE, "combine_wide", DType::BF16)?,
    ])
}

/// Loads every kernel that rows of this type need: a step that is being captured can't.
pub(crate) fn load(cx: &CudaExec, dtype: DType) -> Result<()> {
    for op in [route::OP, sort::OP, combine::op(dtype)].into_iter().chain(gemm::ops(dtype)) {
        op.kernel(cx, true)?;
        op.kernel(cx, false)?;
    }
    Ok(())
}

/// See [`headway_tensor::Ops::mixture_of_experts`].
///
/// # Errors
/// Shapes, types, devices; buffers of smaller sizes; the driver's.
pub(crate) fn run(
    cx: &CudaExec,
    experts: &CudaExperts,
    x: TensorRef<'_>,
    logits: TensorRef<'_>,
    buffers: &mut CudaExpertBuffers,
    accumulate: bool,
    out: TensorMut<'_>,
) -> Result<()> {
    let limits = experts.limits;
    if !buffers.limits.covers(limits) {
        return Err(CudaError::Argument(format!(
            "a mixture of experts: buffers for {:?} are too small for {limits:?}; make them of the largest of all layers",
            buffers.limits
        )));
    }
    let x = Rows::of(cx, "a mixture of experts' input", x)?;
    let logits = Rows::of(cx, "router logits", logits)?;
    let out = Rows::of_mut(cx, "a mixture of experts' output", &out)?;
    expect("a mixture of experts' input", &x, [x.tokens, limits.hidden], experts.dtype)?;
    expect("router logits", &logits, [x.tokens, limits.experts], DType::F32)?;
    expect("a mixture of experts' output", &out, [x.tokens, limits.hidden], experts.dtype)?;
    let held = [&experts.gate_up.weights, &buffers.choices];
    if let Some(other) = held.into_iter().find(|m| m.device() != cx.device()) {
        let (found, expected) = (other.device(), cx.device());
        return Err(TensorError::WrongDevice { what: "a mixture of experts", found, expected }.into());
    }
    for first in (0..x.tokens).step_by(buffers.tokens) {
        let tokens = buffers.tokens.min(x.tokens - first);
        let part = |rows: &Rows| {
            let mut part = *rows;
            part.arg.at += first as u64 * rows.arg.row as u64;
            part.tokens = tokens;
            part
        };
        let pass = Pass { cx, experts, buffers, x: part(&x), logits: part(&logits), out: part(&out), tokens };
        route::run(&pass)?;
        sort::run(&pass)?;
        gemm::gate_up(&pass)?;
        gemm::down(&pass)?;
        combine::run(&pass, accumulate)?;
    }
    Ok(())
}

fn expect(what: &'static str, rows: &Rows, [tokens, width]: [usize; 2], dtype: DType) -> Result<()> {
    if [rows.tokens, rows.heads, rows.width] != [tokens, 1, width] {
        return Err(TensorError::WrongShape {
            what: what.into(),
            found: vec![rows.count(), rows.width],
            expected: format!("[{tokens}, {width}]"),
        }
        .into());
    }
    match rows.dtype == dtype {
        true => Ok(()),
        false => Err(CudaError::Argument(format!(
            "{what}: {} where {dtype} is expected; experts take rows of their weights' type and logits of float32",
            rows.dtype
        ))),
    }
}

/// Address of memory that may not be there: 0.
fn addr(mem: Option<&Arc<dyn DeviceMem>>) -> u64 {
    mem.map_or(0, |m| m.addr())
}
