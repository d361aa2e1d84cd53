//! Records every shape once, at start-up: a step of requests that write nothing runs as it is, so that kernels are compiled
//! and algorithms chosen, and is then recorded.

use super::{Captured, CapturedGraphs, Recorded, decode, extent, pieces::Recorder};
use crate::{
    models::ModelError,
    runner::{
        ModelRunner, StartupError, extent::Extent, report::CaptureReport, startup::Decided, step_times::Laps,
    },
    scheduler::{RequestId, StepPlan},
};
use headway_attention::{GraphMode, KvCacheSpec, StepMetadata};
use headway_tensor::{Graphs, Ops, TensorError};
use std::{sync::Arc, time::Instant};

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
        let shapes = plan.shapes().to_vec();
        let (start, before) = (Instant::now(), self.free_bytes()?);
        let mut graphs: Vec<Captured> = vec![];
        for (i, shape) in shapes.iter().enumerate() {
            let extent = extent(shape, decided.limits.max_num_reqs, query_len);
            let idle = Extent { writes: false, ..extent };
            let graph = match shape.mode {
                GraphMode::Piecewise => self.capture_pieces(idle, &decided.cache.group_of_layer),
                _ => self.capture_whole(idle),
            };
            let graph = graph.map_err(|source| StartupError::Capture { tokens: shape.num_tokens, source })?;
            graphs.push(Captured { shape: *shape, extent, graph });
            progress(i + 1, shapes.len());
        }
        self.drop_step();
        let of = |mode| graphs.iter().filter(move |g| g.shape.mode == mode);
        let sizes = |mode| {
            let mut sizes: Vec<usize> = of(mode).map(|g| g.shape.num_tokens).collect();
            sizes.sort_unstable();
            sizes
        };
        let nodes = |mode| of(mode).next().map_or(Ok(0), Captured::nodes);
        self.report.graph_mode.captured = Some(CaptureReport {
            sizes: sizes(GraphMode::Full),
            nodes: nodes(GraphMode::Full)?,
            piecewise_sizes: sizes(GraphMode::Piecewise),
            piecewise_nodes: nodes(GraphMode::Piecewise)?,
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

    /// Records a step that is one graph: of requests that write nothing, with the metadata that graphs freeze.
    fn capture_whole(&mut self, extent: Extent) -> Result<Recorded, ModelError> {
        let plan = idle(extent.tokens, extent.reqs);
        let null = vec![0; extent.tokens];
        let table = |_: RequestId, _: usize| Some(&null[..]);
        let (tokens, _) = self.prepare(&plan, table, extent, true, &mut Laps::start())?;
        let frozen = self.step.entries().iter().map(|e| e.frozen()).collect();
        let (cx, input) = (&*self.ops, tokens.decoder());
        self.decoder.forward(cx, &input, &self.step, &mut self.kv)?;
        let graph = headway_tensor::graph::capture(graphs(cx)?, || {
            self.decoder.forward(cx, &input, &self.step, &mut self.kv).map(drop)
        })?;
        Ok(Recorded::Whole { graph, frozen })
    }

    /// Records a step in pieces. The kernels between them have metadata of their own in each step, and none now: as in
    /// a profile run they write zeros, and the recorder leaves them out.
    fn capture_pieces(&mut self, extent: Extent, groups: &Arc<[u16]>) -> Result<Recorded, ModelError> {
        let plan = idle(extent.tokens, extent.reqs);
        let null = vec![0; extent.tokens];
        let table = |_: RequestId, _: usize| Some(&null[..]);
        self.drop_step();
        let cx = &*self.ops;
        let tokens = self.inputs.write(cx, &plan, extent, table, &mut self.commons)?;
        let step = StepMetadata::profile_run(groups.clone(), self.groups.len(), extent.tokens);
        let (input, kv) = (tokens.decoder(), &mut self.kv);
        self.decoder.forward(cx, &input, &step, kv)?;
        Ok(Recorded::Pieces(Recorder::record(cx, graphs(cx)?, &input, |recorder| {
            self.decoder.layers_in_pieces(recorder, &input, &step, kv)
        })?))
    }
}

/// What records graphs on the device.
fn graphs(cx: &dyn Ops) -> Result<&dyn Graphs, TensorError> {
    cx.graphs().ok_or_else(|| TensorError::Unsupported(format!("{} records no graphs", cx.device())))
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
