//! Experts and weights of each token (`csrc/ops/experts/route.cu`).

use super::{
    super::{super::kernel_params, launch::Op},
    Pass, addr,
};
use crate::device::Result;
use headway_tensor::{DType, GroupScore, RouterScores};

pub(super) const FILE: &str = "ops/experts/route.cu";
/// Logits are float32 whatever the rows are.
pub(super) const OP: Op = Op { file: FILE, entries: ["route"; 2], dtype: DType::F32, table: None };
/// Tokens of a block, a warp each.
const WARPS: usize = 4;

kernel_params! {
    struct Params {
        logits: u64, row: i64,
        correction: u64, choices: u64, weights: u64,
        tokens: i32, experts: i32, top_k: i32, scores: i32,
        groups: i32, chosen_groups: i32, two_best: i32,
        renormalize: i32,
        factor: f32,
        gap: i32,
    }
}

/// Leaves the experts in `choices` and what they count in `weights`.
pub(super) fn run(pass: &Pass<'_>) -> Result<()> {
    let (rule, b) = (&pass.experts.routing, pass.buffers);
    let (groups, chosen_groups, two_best) =
        rule.groups.map_or((0, 0, false), |g| (g.count, g.chosen, g.score == GroupScore::SumOfTwoBest));
    let params = Params {
        logits: pass.logits.arg.at,
        row: pass.logits.arg.row,
        correction: addr(pass.experts.correction.as_ref()),
        choices: b.choices.addr(),
        weights: b.weights.addr(),
        tokens: pass.tokens as i32,
        experts: rule.experts as i32,
        top_k: rule.top_k as i32,
        scores: match rule.scores {
            RouterScores::Softmax => 0,
            RouterScores::Sigmoid => 1,
            RouterScores::SoftmaxOfChosen => 2,
        },
        groups: groups as i32,
        chosen_groups: chosen_groups as i32,
        two_best: i32::from(two_best),
        renormalize: i32::from(rule.renormalize),
        factor: rule.scale,
        gap: 0,
    };
    let grid = [pass.tokens.div_ceil(WARPS) as u32, 1, 1];
    let shared = WARPS * (2 * rule.experts + rule.top_k) * 4;
    let kernel = OP.kernel(pass.cx, true)?;
    // SAFETY: a row of logits has a number for each expert; choices and weights have room for those of all tokens of a
    // pass; each warp has its part of the shared memory.
    unsafe { kernel.launch(pass.cx, grid, WARPS as u32 * 32, shared as u32, &params) }
}
