//! Choices in the order of their experts (`csrc/ops/experts/sort.cu`).

use super::{
    super::{super::kernel_params, launch::Op},
    Pass,
};
use crate::device::Result;
use headway_tensor::DType;

pub(super) const FILE: &str = "ops/experts/sort.cu";
/// Its numbers are integers; the type stands for none.
pub(super) const OP: Op = Op { file: FILE, entries: ["sort"; 2], dtype: DType::F32, table: None };
/// Threads of a block.
const BLOCK: u32 = 512;

kernel_params! {
    struct Params {
        choices: u64, offsets: u64, tokens: u64, slots: u64,
        count: i32, experts: i32, top_k: i32, gap: i32,
    }
}

/// Fills `offsets`, `rows` and `slots` from `choices`.
pub(super) fn run(pass: &Pass<'_>) -> Result<()> {
    let (l, b) = (pass.experts.limits, pass.buffers);
    let params = Params {
        choices: b.choices.addr(),
        offsets: b.offsets.addr(),
        tokens: b.rows.addr(),
        slots: b.slots.addr(),
        count: pass.slots() as i32,
        experts: l.experts as i32,
        top_k: l.top_k as i32,
        gap: 0,
    };
    let kernel = OP.kernel(pass.cx, true)?;
    // SAFETY: every choice is an expert's number, as `route` wrote them; the buffers have room for all of a pass.
    unsafe { kernel.launch(pass.cx, [l.experts as u32, 1, 1], BLOCK, 0, &params) }
}
