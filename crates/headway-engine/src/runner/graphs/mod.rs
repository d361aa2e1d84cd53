//! Steps as recorded graphs. [`mode`] decides which shapes; `capture` records them at start-up, largest first; every
//! step [`CapturedGraphs::dispatch`] finds the one that serves it. Inputs and metadata are written where they always are, so
//! a replay is those writes and one launch. No rule about graphs is here: they are `headway_attention::group::graph`'s.

mod capture;
pub(crate) mod mode;

use super::extent::Extent;
use crate::scheduler::{RequestId, ScheduledRequest, StepPlan};
use headway_attention::{
    AttentionError, GraphMode, StepMetadata,
    group::graph::{Batch, GraphPlan, GraphShape},
};
use headway_tensor::Graph;
use std::ops::Range;

/// The graphs of a model; none where the mode is NONE.
#[derive(Default)]
pub(super) struct CapturedGraphs {
    plan: Option<GraphPlan>,
    graphs: Vec<Captured>,
    /// Some group's mask of a prompt is the step's, not the graph's.
    non_causal: bool,
}

/// A recorded step.
struct Captured {
    shape: GraphShape,
    extent: Extent,
    /// Each attention group's fingerprint.
    frozen: Vec<u64>,
    graph: Box<dyn Graph>,
}

impl CapturedGraphs {
    /// The graph that serves this step, with its rows; `None`: the step runs without.
    pub fn dispatch(&self, plan: &StepPlan) -> Option<(usize, Extent)> {
        let shape = self.plan.as_ref()?.dispatch(&batch(plan, self.non_causal)?);
        let index = self.graphs.iter().position(|g| g.shape == shape)?;
        Some((index, self.graphs[index].extent))
    }

    /// Queues a recorded step, after its inputs and metadata were written.
    ///
    /// # Errors
    /// Metadata that the recording doesn't fit; the device's own.
    pub fn replay(&self, index: usize, step: &StepMetadata) -> Result<(), AttentionError> {
        let Some(captured) = self.graphs.get(index) else {
            return Err(AttentionError::Graph(format!("there is no graph {index}")));
        };
        let found = step.entries().iter().map(|e| e.frozen());
        if !found.eq(captured.frozen.iter().copied()) {
            let group = step.entries().iter().zip(&captured.frozen).position(|(e, f)| e.frozen() != *f);
            return Err(AttentionError::Graph(format!(
                "the step's metadata of attention group {} has other addresses or launch arguments than the graph of {} \
                 tokens was captured with, so a replay would read what is not there; run with --graph-mode NONE and \
                 report this",
                group.map_or("?".into(), |g| g.to_string()),
                captured.shape.num_tokens
            )));
        }
        Ok(captured.graph.launch()?)
    }
}

/// The step as dispatch sees it; `None` where it has what no graph was captured with.
fn batch(plan: &StepPlan, non_causal: bool) -> Option<Batch> {
    let in_prompt = |r: &ScheduledRequest| r.num_computed_tokens < r.num_prompt_tokens;
    let masked = |r: &ScheduledRequest| r.bidirectional_ranges.is_some() || (non_causal && in_prompt(r));
    if !plan.encoder_ids.is_empty() || plan.requests.iter().any(masked) {
        return None;
    }
    let first = plan.requests.first()?.num_new_tokens;
    let decodes = plan.requests.iter().all(|r| !r.is_prefilling);
    let alike = plan.requests.iter().all(|r| r.num_new_tokens == first);
    Some(Batch {
        num_reqs: plan.requests.len(),
        num_tokens: plan.num_tokens(),
        uniform_token_count: (decodes && alike).then_some(first),
        num_active_loras: 0,
        max_query_len: plan.requests.iter().map(|r| r.num_new_tokens).max().filter(|_| decodes),
        num_micro_batches: 1,
    })
}

/// The rows of a shape. A decode wants the logits of all its tokens, another request those of the last ones.
fn extent(shape: &GraphShape, decode_query_len: usize) -> Extent {
    let reqs = shape.num_reqs.unwrap_or(shape.num_tokens);
    let decodes = shape.uniform_token_count.is_some() || shape.max_query_len.is_some();
    let logits = match decodes {
        true => shape.num_tokens,
        false => shape.num_tokens.min(reqs * decode_query_len),
    };
    Extent { tokens: shape.num_tokens, reqs, logits, whole_tables: true, writes: true }
}

/// Whether this engine runs such a shape as one graph.
fn is_full(shape: &GraphShape) -> bool {
    shape.mode == GraphMode::Full
}

/// A request that decodes these tokens.
pub(super) fn decode(index: usize, token_range: Range<usize>) -> ScheduledRequest {
    ScheduledRequest {
        id: RequestId(index as u64),
        num_computed_tokens: 0,
        num_new_tokens: token_range.len(),
        draft_range: 0..0,
        token_range,
        is_prefilling: false,
        needs_logits: true,
        remaining_tokens: 1,
        num_cached_tokens: 0,
        encoder_len: 0,
        encoder_range: 0..0,
        num_prompt_tokens: 0,
        bidirectional_ranges: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_attention::group::graph::CaptureOptions;

    fn step(requests: &[(usize, usize, bool)]) -> StepPlan {
        let mut plan = StepPlan::default();
        for &(computed, new, is_prefilling) in requests {
            let start = plan.token_ids.len();
            plan.token_ids.resize(start + new, 0);
            plan.requests.push(ScheduledRequest {
                num_computed_tokens: computed,
                num_prompt_tokens: if is_prefilling { computed + new } else { 1 },
                is_prefilling,
                ..decode(plan.requests.len(), start..start + new)
            });
        }
        plan
    }

    fn shape_of(mode: GraphMode, plan: &StepPlan) -> Option<(GraphMode, usize)> {
        let shapes = GraphPlan::new(&CaptureOptions {
            mode,
            capture_sizes: vec![1, 2, 4, 8],
            max_capture_size: 8,
            max_num_reqs: 8,
            decode_query_len: 1,
            lora_cases: vec![0],
            varlen_decode: false,
            decode_query_lens: vec![],
            micro_batching: None,
            limit_mixed_to_decode_tokens: false,
        });
        batch(plan, true).map(|b| shapes.dispatch(&b)).map(|s| (s.mode, s.num_tokens))
    }

    #[test]
    fn decodes_are_padded_and_other_steps_are_not_unless_asked() {
        let decodes = step(&[(7, 1, false), (9, 1, false), (3, 1, false)]);
        let mixed = step(&[(7, 1, false), (5, 4, true)]);
        let last_of_prompt = step(&[(7, 1, false), (5, 1, true)]);
        let only = |plan| shape_of(GraphMode::FullDecodeOnly, plan);
        assert_eq!(only(&decodes), Some((GraphMode::Full, 4)));
        // A group whose prompts see both ways: what the flags say is no part of a graph.
        assert_eq!((only(&mixed), only(&last_of_prompt)), (None, None));
        let causal = |plan: &StepPlan| batch(plan, false).and_then(|b| b.uniform_token_count);
        assert_eq!((causal(&decodes), causal(&last_of_prompt)), (Some(1), None));
        assert_eq!(shape_of(GraphMode::Full, &decodes), Some((GraphMode::Full, 4)));
    }

    #[test]
    fn a_shape_has_room_for_the_logits_of_its_batches() {
        let shape = |num_tokens, num_reqs, uniform_token_count| GraphShape {
            mode: GraphMode::Full,
            num_tokens,
            num_reqs: Some(num_reqs),
            uniform_token_count,
            max_query_len: None,
            num_active_loras: 0,
            num_micro_batches: 1,
        };
        assert_eq!(extent(&shape(12, 4, Some(3)), 3).logits, 12);
        assert_eq!(extent(&shape(512, 8, None), 3).logits, 24);
        assert_eq!(extent(&shape(8, 8, None), 3).logits, 8);
    }
}
