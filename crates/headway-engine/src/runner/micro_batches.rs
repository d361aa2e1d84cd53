//! Steps in micro-batches (`--micro-batches`): each part has its own inputs, metadata and builders. On the CPU the parts
//! run one after the other; what one writes into the cache, the next reads.

use super::{
    StartupError,
    fast_prefill::{FastRows, SharingLayers},
    inputs::TokenInputs,
};
use crate::{models::ModelPlan, options::EngineOptions};
use headway_attention::{
    AttentionGroup, BuilderPlan, CommonAttentionMetadata, Result, StepMetadata, build_step,
    group::graph::MicroBatching,
    step::micro_batch::{MicroBatchSlice, SliceBuffers, sees_past, slice_common, slice_inputs},
};
use headway_tensor::{Exec, Persistent};
use std::sync::Arc;

/// Decodes are cut from this many tokens on, where not asked.
pub const DEFAULT_DECODE_TOKENS: usize = 32;
/// Other steps are cut from this many tokens on, where not asked.
pub const DEFAULT_PREFILL_TOKENS: usize = 512;

/// What `--micro-batches` asks for.
///
/// # Errors
/// None at all; more than a step has tokens; thresholds without micro-batches.
pub fn resolve(o: &EngineOptions, max_num_tokens: usize) -> std::result::Result<MicroBatching, StartupError> {
    let refuse = |option, value: usize, why: String| {
        Err(StartupError::Option { option, value: value.to_string(), why })
    };
    let n = o.micro_batches.unwrap_or(1);
    if n == 0 {
        return refuse("--micro-batches", n, "it must be at least 1".into());
    }
    if n > max_num_tokens {
        let why = format!(
            "a step has at most {max_num_tokens} tokens (--max-num-batched-tokens); give that or less"
        );
        return refuse("--micro-batches", n, why);
    }
    let thresholds = [
        ("--micro-batch-decode-tokens", o.micro_batch_decode_tokens),
        ("--micro-batch-prefill-tokens", o.micro_batch_prefill_tokens),
    ];
    if let Some((option, value)) = thresholds.iter().find_map(|(o, v)| v.filter(|_| n == 1).map(|v| (*o, v)))
    {
        return refuse(option, value, "no step is cut without --micro-batches 2 or more; add that".into());
    }
    Ok(MicroBatching {
        num_micro_batches: n,
        decode_token_threshold: o.micro_batch_decode_tokens.unwrap_or(DEFAULT_DECODE_TOKENS),
        prefill_token_threshold: o.micro_batch_prefill_tokens.unwrap_or(DEFAULT_PREFILL_TOKENS),
    })
}

/// Models with an encoder run their steps whole: its tokens see each other both ways, and are there for all parts.
///
/// # Errors
/// Micro-batches for one of them.
pub(super) fn refuse_encoders(
    micro: &MicroBatching,
    plan: &ModelPlan,
) -> std::result::Result<(), StartupError> {
    if micro.num_micro_batches > 1 && (plan.pooling.is_some() || plan.encoder.is_some()) {
        return Err(StartupError::Option {
            option: "--micro-batches",
            value: micro.num_micro_batches.to_string(),
            why: format!("{} has an encoder, and such steps run whole; leave it out", plan.architecture),
        });
    }
    Ok(())
}

/// Bytes that the builders of a group take over all micro-batches: buffers, and the workspace of that.
pub(crate) fn builder_bytes(plan: &BuilderPlan, num_micro_batches: usize) -> (u64, u64) {
    let n = num_micro_batches as u64;
    let workspace = plan.workspace_bytes.saturating_mul(n);
    (plan.persistent_bytes.saturating_mul(n).saturating_add(workspace), workspace)
}

/// Holds the builders of additional micro-batches against the memory that is free.
///
/// # Errors
/// They don't fit.
pub(super) fn fit<'a>(
    micro: &MicroBatching,
    builders: impl Iterator<Item = &'a BuilderPlan>,
    available: Option<u64>,
) -> std::result::Result<(), StartupError> {
    let n = micro.num_micro_batches;
    let needed = builders.map(|p| builder_bytes(p, n).0).fold(0, u64::saturating_add);
    match available.filter(|a| n > 1 && needed > *a) {
        None => Ok(()),
        Some(available) => Err(StartupError::NoMemory {
            option: "--micro-batches",
            value: n,
            what: "a builder for each group and micro-batch",
            needed,
            available,
        }),
    }
}

/// A micro-batch of the step under way.
pub(super) struct Part {
    /// What the forward pass reads; `None`: the part isn't in use.
    pub tokens: Option<TokenInputs>,
    /// Every group's metadata.
    pub step: StepMetadata,
    commons: Vec<CommonAttentionMetadata>,
    slices: SliceBuffers,
    logits_rows: Persistent<i32>,
    fast: Option<FastRows>,
}

/// The parts of steps, in buffers that live as long as the model.
pub(super) struct MicroBatches {
    micro: MicroBatching,
    parts: Vec<Part>,
    /// Steps that ran in parts.
    pub cut_steps: u64,
}

impl MicroBatches {
    /// Without buffers where steps run whole.
    ///
    /// # Errors
    /// No memory.
    pub fn new(
        cx: &dyn Exec,
        micro: MicroBatching,
        max_num_reqs: usize,
        max_num_logits: usize,
        step: &StepMetadata,
        sharing: Option<&SharingLayers>,
    ) -> Result<Self> {
        let n = if micro.num_micro_batches > 1 { micro.num_micro_batches } else { 0 };
        let part = |_| {
            Ok(Part {
                tokens: None,
                step: step.clone(),
                commons: vec![],
                slices: SliceBuffers::new(cx, max_num_reqs)?,
                logits_rows: Persistent::new(cx, max_num_logits)?,
                fast: sharing.map(|s| FastRows::new(cx, s, max_num_reqs, max_num_logits)).transpose()?,
            })
        };
        let parts = (0..n).map(part).collect::<Result<_>>()?;
        Ok(Self { micro, parts, cut_steps: 0 })
    }

    /// Drops every view of the last step, so that buffers can be recycled.
    pub fn clear(&mut self) {
        for p in &mut self.parts {
            p.tokens = None;
            p.step.clear();
            p.commons.clear();
        }
    }

    /// How often a buffer could not be recycled.
    pub fn reallocs(&self) -> usize {
        let fast = |p: &Part| p.fast.as_ref().map_or(0, FastRows::reallocs);
        self.parts.iter().map(|p| p.slices.reallocs() + p.logits_rows.reallocs() + fast(p)).sum()
    }

    /// The parts of the step, in order.
    pub fn parts(&self) -> impl Iterator<Item = (&TokenInputs, &StepMetadata)> {
        self.parts.iter().filter_map(|p| Some((p.tokens.as_ref()?, &p.step)))
    }

    /// Cuts the step and builds each part's metadata with the part's own builders. `false`: the step runs whole, because
    /// it is too small, or because a cut would part tokens that see those after them.
    pub fn cut(
        &mut self,
        cx: &dyn Exec,
        groups: &mut [AttentionGroup],
        tokens: &TokenInputs,
        commons: &[CommonAttentionMetadata],
    ) -> Result<bool> {
        let Some(inputs) = commons.first().map(|c| &c.inputs) else { return Ok(false) };
        let Some(slices) = self.micro.cut(inputs) else { return Ok(false) };
        if slices.iter().any(|s| commons.iter().any(|c| sees_past(c, s))) {
            return Ok(false);
        }
        for (index, (part, slice)) in self.parts.iter_mut().zip(&slices).enumerate() {
            let mut own = part_of(cx, tokens, slice, &mut part.logits_rows)?;
            let mut inputs = slice_inputs(inputs, slice, &mut part.slices, cx)?;
            inputs.logits_indices = Some(own.logits_rows.clone());
            let inputs = Arc::new(inputs);
            for common in commons {
                part.commons.push(slice_common(common, slice, inputs.clone())?);
            }
            if let Some(fast) = &mut part.fast {
                fast.attach(cx, &mut part.commons, &mut own)?;
            }
            build_step(groups, cx, &part.commons, index, false, &mut part.step)?;
            part.tokens = Some(own);
        }
        self.cut_steps += 1;
        Ok(true)
    }
}

/// The part's tokens, and those of the wanted rows that lie in it, counted from its first token.
fn part_of(
    cx: &dyn Exec,
    whole: &TokenInputs,
    slice: &MicroBatchSlice,
    logits_rows: &mut Persistent<i32>,
) -> Result<TokenInputs> {
    let t = slice.tokens.clone();
    let rows = whole.logits_rows.host().ok_or_else(|| {
        headway_attention::AttentionError::Inputs("the rows of wanted logits are not on the host".into())
    })?;
    let (first, last) = (t.start as i32, t.end as i32);
    let own = rows.partition_point(|&r| r < first)..rows.partition_point(|&r| r < last);
    let logits_rows = logits_rows.write(cx, own.len(), |o| {
        o.iter_mut().zip(&rows[own.clone()]).for_each(|(o, r)| *o = r - first);
    });
    Ok(TokenInputs {
        token_ids: whole.token_ids.slice(t.clone()),
        positions: whole.positions.slice(t),
        logits_rows,
        encoder: None,
        fast: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_held_against_each_other() {
        let of = |n, decode, prefill| {
            let o = EngineOptions {
                micro_batches: n,
                micro_batch_decode_tokens: decode,
                micro_batch_prefill_tokens: prefill,
                ..EngineOptions::default()
            };
            resolve(&o, 16).map_err(|e| e.to_string())
        };
        let one = of(None, None, None);
        assert!(one.is_ok_and(|m| m.num_micro_batches == 1 && m.prefill_token_threshold == 512));
        assert!(of(Some(2), Some(4), None).is_ok_and(|m| m.decode_token_threshold == 4));
        for (asked, words) in [
            ((Some(0), None, None), "at least 1"),
            ((Some(17), None, None), "at most 16 tokens"),
            ((None, Some(4), None), "--micro-batch-decode-tokens 4: no step is cut without"),
            ((Some(1), None, Some(4)), "--micro-batch-prefill-tokens 4: no step"),
        ] {
            let (n, decode, prefill) = asked;
            assert!(of(n, decode, prefill).is_err_and(|e| e.contains(words)), "{words}");
        }
    }

    #[test]
    fn builders_that_never_fit_are_refused_by_the_option() {
        let plan = BuilderPlan {
            graph_support: headway_attention::GraphSupport::Never,
            reorder_batch_threshold: None,
            persistent_bytes: 10,
            workspace_bytes: 90,
        };
        let micro =
            |n| MicroBatching { num_micro_batches: n, decode_token_threshold: 1, prefill_token_threshold: 1 };
        assert!(fit(&micro(3), [&plan, &plan].into_iter(), Some(600)).is_ok());
        assert!(
            fit(&micro(1), [&plan, &plan].into_iter(), Some(1)).is_ok(),
            "one builder a group is no choice"
        );
        let e = fit(&micro(4), [&plan, &plan].into_iter(), Some(600)).unwrap_err().to_string();
        assert!(e.contains("--micro-batches 4 needs 800 bytes"), "{e}");
    }
}
