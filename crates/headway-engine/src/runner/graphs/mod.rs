//! Steps as recorded graphs. [`mode`] decides which shapes; `capture` records them at start-up, largest first; every
//! step [`CapturedGraphs::dispatch`] finds the one that serves it. Inputs and metadata are written where they always are, so
//! a replay is those writes and one launch; of a step in pieces, one a piece, with the mixers' kernels between them. No rule
//! about graphs is here: they are `headway_attention::group::graph`'s.

mod capture;
pub(crate) mod mode;
mod pieces;
mod silent;

use super::extent::Extent;
use crate::{
    models::{Decoder, ModelError, decoder::DecoderInput},
    scheduler::{RequestId, ScheduledRequest, StepPlan},
};
use headway_attention::{
    AttentionError, KvPool, StepMetadata,
    group::graph::{Batch, GraphPlan, GraphShape},
};
use headway_tensor::{Graph, Ops, TensorMut};
use pieces::{PieceGraphs, Player};
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
    graph: Recorded,
}

enum Recorded {
    /// One graph, with each attention group's fingerprint.
    Whole { graph: Box<dyn Graph>, frozen: Vec<u64> },
    /// What lies between the mixers' kernels.
    Pieces(PieceGraphs),
}

impl Captured {
    fn nodes(&self) -> headway_tensor::Result<usize> {
        match &self.graph {
            Recorded::Whole { graph, .. } => graph.nodes(),
            Recorded::Pieces(p) => p.nodes(),
        }
    }
}

/// A step's inputs, and what its kernels run on.
pub(super) struct StepRun<'a> {
    pub ops: &'a dyn Ops,
    pub input: DecoderInput<'a>,
    pub step: &'a StepMetadata,
    pub kv: &'a mut KvPool,
}

impl CapturedGraphs {
    /// The graph that serves this step, with its rows; `None`: the step runs without.
    pub fn dispatch(&self, plan: &StepPlan) -> Option<(usize, Extent)> {
        let shapes = self.plan.as_ref()?;
        let batch = batch(plan)?;
        let shape = match has_own_mask(plan, self.non_causal) {
            true => shapes.dispatch_piecewise(&batch),
            false => shapes.dispatch(&batch),
        };
        let index = self.graphs.iter().position(|g| g.shape == shape)?;
        let captured = &self.graphs[index];
        let extent = match captured.graph {
            Recorded::Whole { .. } => captured.extent,
            Recorded::Pieces(_) => {
                Extent { tokens: shape.num_tokens, whole_tables: true, ..Extent::of(plan) }
            }
        };
        Some((index, extent))
    }

    /// Whether some steps are graphs: then all have block tables of one width, of which little changes from step to step.
    pub fn any(&self) -> bool {
        !self.graphs.is_empty()
    }

    /// Queues a recorded step, after its inputs and metadata were written: the logits of `rows` wanted ones.
    ///
    /// # Errors
    /// Metadata or inputs that the recording doesn't fit; the device's own.
    pub fn replay<'d>(
        &self,
        index: usize,
        decoder: &'d mut Decoder,
        run: StepRun<'_>,
        rows: usize,
    ) -> Result<TensorMut<'d>, ModelError> {
        let Some(captured) = self.graphs.get(index) else {
            return Err(AttentionError::Graph(format!("there is no graph {index}")).into());
        };
        match &captured.graph {
            Recorded::Whole { graph, frozen } => {
                check_frozen(&captured.shape, frozen, run.step)?;
                graph.launch()?;
                let extent = captured.extent;
                Ok(decoder.replayed(extent.tokens, extent.logits)?.rows(0..rows)?)
            }
            Recorded::Pieces(pieces) => {
                let player = Player::new(run.ops, pieces, &run.input)?;
                decoder.layers_in_pieces(&player, &run.input, run.step, run.kv)?;
                player.finish()?;
                decoder.logits_of_pieces(run.ops, &run.input)
            }
        }
    }
}

/// Refuses a step whose metadata lies elsewhere than the recording's.
fn check_frozen(shape: &GraphShape, frozen: &[u64], step: &StepMetadata) -> Result<(), AttentionError> {
    let found = step.entries().iter().map(|e| e.frozen());
    if found.eq(frozen.iter().copied()) {
        return Ok(());
    }
    let group = step.entries().iter().zip(frozen).position(|(e, f)| e.frozen() != *f);
    Err(AttentionError::Graph(format!(
        "the step's metadata of attention group {} has other addresses or launch arguments than the graph of {} \
         tokens was captured with, so a replay would read what is not there; run with --graph-mode NONE and \
         report this",
        group.map_or("?".into(), |g| g.to_string()),
        shape.num_tokens
    )))
}

/// Whether the step has a mask that is no full graph's: kernels that run by themselves take any.
fn has_own_mask(plan: &StepPlan, non_causal: bool) -> bool {
    let in_prompt = |r: &ScheduledRequest| r.num_computed_tokens < r.num_prompt_tokens;
    plan.requests.iter().any(|r| r.bidirectional_ranges.is_some() || (non_causal && in_prompt(r)))
}

/// The step as dispatch sees it; `None`: no graph is of such steps.
fn batch(plan: &StepPlan) -> Option<Batch> {
    if !plan.encoder_ids.is_empty() {
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
fn extent(shape: &GraphShape, max_num_reqs: usize, decode_query_len: usize) -> Extent {
    let reqs = shape.num_reqs.unwrap_or(shape.num_tokens).min(max_num_reqs);
    let decodes = shape.uniform_token_count.is_some() || shape.max_query_len.is_some();
    let logits = match decodes {
        true => shape.num_tokens,
        false => shape.num_tokens.min(reqs * decode_query_len),
    };
    let tokens = shape.num_tokens;
    Extent { tokens, attended: tokens, reqs, logits, whole_tables: true, writes: true }
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
    use headway_attention::{GraphMode, group::graph::CaptureOptions};

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
        let shape = match has_own_mask(plan, true) {
            true => shapes.dispatch_piecewise(&batch(plan)?),
            false => shapes.dispatch(&batch(plan)?),
        };
        Some((shape.mode, shape.num_tokens)).filter(|s| s.0 != GraphMode::None)
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
        let uniform = |plan: &StepPlan| batch(plan).and_then(|b| b.uniform_token_count);
        assert_eq!((uniform(&decodes), uniform(&last_of_prompt)), (Some(1), None));
        assert_eq!(shape_of(GraphMode::Full, &decodes), Some((GraphMode::Full, 4)));
        // Kernels between pieces see the step's own flags.
        assert_eq!(shape_of(GraphMode::Full, &mixed), None);
        let both = |plan| shape_of(GraphMode::FullAndPiecewise, plan);
        assert_eq!(
            (both(&decodes), both(&mixed)),
            (Some((GraphMode::Full, 4)), Some((GraphMode::Piecewise, 8)))
        );
        assert_eq!(shape_of(GraphMode::Piecewise, &decodes), Some((GraphMode::Piecewise, 4)));
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
        assert_eq!(extent(&shape(12, 4, Some(3)), 8, 3).logits, 12);
        assert_eq!(extent(&shape(512, 8, None), 8, 3).logits, 24);
        assert_eq!(extent(&shape(8, 8, None), 8, 3).logits, 8);
        // Pieces are of any number of requests.
        let pieces = GraphShape { mode: GraphMode::Piecewise, num_reqs: None, ..shape(512, 0, None) };
        let rows = extent(&pieces, 32, 1);
        assert_eq!((rows.reqs, rows.logits), (32, 32));
    }
}
