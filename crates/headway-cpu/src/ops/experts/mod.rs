//! A mixture of experts on the CPU. A pass takes as many tokens as the buffers hold: scores, choices, the choices
//! sorted by expert, the rows in that order, each expert's rows through its layers as one batch, and every token's
//! results added up in the order of its choices. So a token's result is the same whatever it is batched with.
//!
//! Not for shared experts, which are dense layers.

mod load;
mod route;
mod sort;

pub(super) use load::{CpuExpertBuffers, CpuExperts};

use super::{
    activate,
    check::{expect, f32_mut, f32_ref},
};
use crate::{
    CpuExec,
    kernels::elementwise::{self as kernel, rows::Rows},
};
use headway_tensor::{ExpertBuffers, Experts, Result, TensorError, TensorMut, TensorRef};
use std::any::Any;

/// Tokens that one task chooses experts for, at least.
const ROUTE_TOKENS: usize = 16;

/// See [`headway_tensor::Ops::mixture_of_experts`].
pub(super) fn run(
    cx: &CpuExec,
    experts: &dyn Experts,
    x: TensorRef<'_>,
    logits: TensorRef<'_>,
    buffers: &mut dyn ExpertBuffers,
    accumulate: bool,
    out: TensorMut<'_>,
) -> Result<()> {
    let experts: &CpuExperts = (experts as &dyn Any).downcast_ref().ok_or_else(|| foreign("experts"))?;
    let buffers: &mut CpuExpertBuffers =
        (buffers as &mut dyn Any).downcast_mut().ok_or_else(|| foreign("buffers"))?;
    let limits = experts.limits;
    if !buffers.limits.covers(limits) {
        return Err(TensorError::Unsupported(format!(
            "a mixture of experts: buffers for {:?} are too small for {limits:?}; make them of the largest of all layers",
            buffers.limits
        )));
    }
    let (xs, x) = f32_ref("a mixture of experts", x)?;
    let (logit_rows, logits) = f32_ref("router logits", logits)?;
    let (outs, out) = f32_mut("a mixture of experts' output", out)?;
    let n = xs.count();
    expect("a mixture of experts' input", &[xs.heads(), xs.width()], &[1, limits.hidden])?;
    expect("router logits", &[logit_rows.count(), logit_rows.width()], &[n, limits.experts])?;
    expect(
        "a mixture of experts' output",
        &[outs.count(), outs.heads(), outs.width()],
        &[n, 1, limits.hidden],
    )?;
    let pass = buffers.tokens;
    for first in (0..n).step_by(pass) {
        let tokens = pass.min(n - first);
        route(cx, experts, buffers, tokens, &|i| logit_rows.of(logits, first + i))?;
        feed_forward(cx, experts, buffers, tokens, &|i| xs.of(x, first + i))?;
        let (slots, k) = (&buffers.sorted.slots, limits.top_k);
        let (results, width) = (&buffers.rows, limits.hidden);
        let isa = cx.isa();
        outs.slice(first..first + tokens).for_each(
            cx.pool(),
            &mut out[outs.range(first).start..],
            &|i, out| {
                if !accumulate {
                    out.fill(0.0);
                }
                for (slot, choice) in slots[i * k..(i + 1) * k].iter().zip(&buffers.choices[i * k..]) {
                    let result = &results[*slot as usize * width..][..width];
                    kernel::add_scaled(isa, out, result, choice.weight);
                }
            },
        );
    }
    Ok(())
}

fn foreign(what: &str) -> TensorError {
    TensorError::Unsupported(format!("a mixture of experts: {what} of another device than the CPU"))
}

/// Chooses and sorts the experts of `tokens` tokens, whose logits `row` gives.
fn route<'a>(
    cx: &CpuExec,
    experts: &CpuExperts,
    b: &mut CpuExpertBuffers,
    tokens: usize,
    row: &(dyn Fn(usize) -> &'a [f32] + Sync),
) -> Result<()> {
    let (rule, isa, pool) = (&experts.routing, cx.isa(), cx.pool());
    let (n, k) = (rule.experts, rule.top_k);
    let scores = &mut b.scores[..tokens * n];
    Rows::new("router scores", &[tokens, n], &[n, 1])?.for_each(pool, scores, &|i, scores| {
        scores.copy_from_slice(row(i));
        route::scores(isa, rule, scores);
    });
    let scores = &*scores;
    let step = tokens.div_ceil(pool.threads() * 4).max(ROUTE_TOKENS);
    pool.run_chunks(&mut b.choices[..tokens * k], step * k, &|chunk, choices, _| {
        for (i, choices) in choices.chunks_exact_mut(k).enumerate() {
            let token = chunk * step + i;
            route::choose(rule, &scores[token * n..][..n], experts.correction.as_deref(), choices);
        }
    });
    b.sorted.fill(&b.choices[..tokens * k], n, k);
    Ok(())
}

/// Leaves the experts' results in `rows`, by slot; `row` gives a token's input.
fn feed_forward<'a>(
    cx: &CpuExec,
    experts: &CpuExperts,
    b: &mut CpuExpertBuffers,
    tokens: usize,
    row: &(dyn Fn(usize) -> &'a [f32] + Sync),
) -> Result<()> {
    let (hidden, inner) = (experts.limits.hidden, experts.limits.intermediate);
    let slots = tokens * experts.limits.top_k;
    let rows_of = |width: usize| Rows::new("expert rows", &[slots, width], &[width, 1]);
    let (narrow, wide, half) = (rows_of(hidden)?, rows_of(2 * inner)?, rows_of(inner)?);
    let rows = &mut b.rows[..slots * hidden];
    let (gate_up, gated) = (&mut b.gate_up[..slots * 2 * inner], &mut b.gated[..slots * inner]);
    let (pool, isa, offsets) = (cx.pool(), cx.isa(), &b.sorted.offsets);
    narrow.for_each(pool, rows, &|slot, out| out.copy_from_slice(row(b.sorted.tokens[slot] as usize)));
    b.runs.forward(cx, &experts.gate_up, offsets, rows, &narrow, gate_up, &wide);
    let gate_up = &*gate_up;
    half.for_each(pool, gated, &|i, out| activate(isa, experts.activation, out, wide.of(gate_up, i)));
    b.runs.forward(cx, &experts.down, offsets, gated, &half, rows, &narrow);
    Ok(())
}
