//! Records every shape once, at start-up: a step of requests that write nothing runs as it is, so that kernels are compiled
//! and algorithms chosen, and is then recorded.

use super::{Captured, CapturedGraphs, decode, extent, is_full};
use crate::{
    models::ModelError,
    runner::{
        ModelRunner, StartupError, extent::Extent, report::CaptureReport, startup::Decided, step_times::Laps,
    },
    scheduler::{RequestId, StepPlan},
};
use headway_attention::{KvCacheSpec, group::graph::GraphShape};
use headway_tensor::{Graph, TensorError};
use std::time::Instant;

impl ModelRunner {
    /// Records the shapes of the mode in force, the largest first.
    ///
    /// # Errors
    /// [`StartupError::Capture`], by the size.
    pub(in crate::runner) fn capture_graphs(
        &mut self,
        decided: &Decided,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<(), StartupError> {
        let Some(plan) = decided.shapes.clone() else { return Ok(()) };
        let query_len = 1 + decided.limits.num_speculative_tokens;
        let shapes: Vec<GraphShape> = plan.shapes().iter().copied().filter(is_full).collect();
        let (start, before) = (Instant::now(), self.free_bytes()?);
        let mut graphs: Vec<Captured> = vec![];
        for (i, shape) in shapes.iter().enumerate() {
            let captured = self.capture(shape, extent(shape, query_len));
            graphs.push(captured.map_err(|e| failed(shape, e))?);
            progress(i + 1, shapes.len());
        }
        self.drop_step();
        let mut sizes: Vec<usize> = graphs.iter().map(|g| g.shape.num_tokens).collect();
        sizes.sort_unstable();
        self.report.graph_mode.captured = Some(CaptureReport {
            sizes,
            nodes: graphs.first().map_or(Ok(0), |g| g.graph.nodes())?,
            seconds: start.elapsed().as_secs_f64(),
            bytes: before.saturating_sub(self.free_bytes()?),
        });
        let non_causal = |s: &KvCacheSpec| s.attention().is_some_and(|a| a.non_causal);
        self.graphs =
            CapturedGraphs { plan: Some(plan), graphs, non_causal: decided.specs().any(non_causal) };
        Ok(())
    }

    fn free_bytes(&self) -> Result<u64, TensorError> {
        self.ops.graphs().map_or(Ok(0), |g| g.free_bytes())
    }

    fn capture(&mut self, shape: &GraphShape, extent: Extent) -> Result<Captured, ModelError> {
        let plan = idle(shape.num_tokens, extent.reqs);
        let null = vec![0; extent.tokens];
        let table = |_: RequestId, _: usize| Some(&null[..]);
        let rows = Extent { writes: false, ..extent };
        let (tokens, _) = self.prepare(&plan, table, rows, true, &mut Laps::start())?;
        let frozen = self.step.entries().iter().map(|e| e.frozen()).collect();
        let (cx, input) = (&*self.ops, tokens.decoder());
        self.decoder.forward(cx, &input, &self.step, &mut self.kv)?;
        let Some(graphs) = cx.graphs() else {
            return Err(TensorError::Unsupported(format!("{} records no graphs", cx.device())).into());
        };
        let graph: Box<dyn Graph> = headway_tensor::graph::capture(graphs, || {
            self.decoder.forward(cx, &input, &self.step, &mut self.kv).map(drop)
        })?;
        Ok(Captured { shape: *shape, extent, frozen, graph })
    }
}

fn failed(shape: &GraphShape, source: ModelError) -> StartupError {
    StartupError::Capture { tokens: shape.num_tokens, source }
}

/// So many tokens dealt out to so many requests that decode, with no tokens before.
fn idle(tokens: usize, reqs: usize) -> StepPlan {
    let mut plan = StepPlan { token_ids: vec![0; tokens], ..StepPlan::default() };
    let mut start = 0;
    for i in 0..reqs {
        let n = tokens / reqs + usize::from(i < tokens % reqs);
        plan.requests.push(decode(i, start..start + n));
        start += n;
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_dealt_out_evenly() {
        let lens =
            |tokens, reqs| idle(tokens, reqs).requests.iter().map(|r| r.num_new_tokens).collect::<Vec<_>>();
        assert_eq!(lens(4, 4), [1; 4]);
        assert_eq!(lens(7, 3), [3, 2, 2]);
        assert_eq!(idle(7, 3).requests[2].token_range, 5..7);
    }
}
