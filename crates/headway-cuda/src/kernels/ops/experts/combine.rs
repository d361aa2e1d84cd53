//! Results of a token's experts added up (`csrc/ops/experts/combine.cu`).

use super::{
    super::{
        super::kernel_params,
        launch::{Op, blocks, entries, lanes},
        rows::RowsArg,
    },
    Pass,
};
use crate::device::Result;
use headway_tensor::DType;

pub(super) const FILE: &str = "ops/experts/combine.cu";

/// The kernel for outputs of this type.
pub(super) fn op(dtype: DType) -> Op {
    Op { file: FILE, entries: entries!("combine"), dtype, table: None }
}

kernel_params! {
    struct Params {
        results: u64, slots: u64, weights: u64,
        out: RowsArg,
        count: i64,
        width: i32, top_k: i32, accumulate: i32, gap: i32,
    }
}

/// `out = Σ weight · result`, on top of what is there where `accumulate` says so.
pub(super) fn run(pass: &Pass<'_>, accumulate: bool) -> Result<()> {
    let (l, b, out) = (pass.experts.limits, pass.buffers, &pass.out);
    let lanes = lanes(out.dtype);
    let wide = out.aligned(16) && l.hidden.is_multiple_of(lanes);
    let count = pass.tokens * l.hidden / if wide { lanes } else { 1 };
    let params = Params {
        results: b.results.addr(),
        slots: b.slots.addr(),
        weights: b.weights.addr(),
        out: out.arg,
        count: count as i64,
        width: l.hidden as i32,
        top_k: l.top_k as i32,
        accumulate: i32::from(accumulate),
        gap: 0,
    };
    // SAFETY: every choice's slot has a row of results, as `gemm::down` wrote it; alignment as `wide` says, and results
    // begin at multiples of 256 bytes.
    unsafe { op(out.dtype).launch(pass.cx, wide, blocks(count), &params) }
}
