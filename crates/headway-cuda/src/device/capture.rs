//! Graphs: work that is recorded from the stream once and replayed with one call.

use super::{
    CudaExec,
    error::{CudaError, Doing, Result},
    memory::Heap,
};
use crate::kernels::Loaded;
use cudarc::driver::{
    CudaGraph,
    sys::{CUgraphInstantiate_flags, CUstreamCaptureMode, cuGraphGetNodes},
};
use headway_tensor::Graphs;
use std::{rc::Rc, sync::Arc};

/// A recorded graph. It names device memory by address: memory that was allocated before its recording ended stays
/// mapped as long as it lives, whoever drops it. One thread uses it.
pub struct Graph {
    // Before `life`: memory is given back when the graph can't run any more.
    graph: CudaGraph,
    life: Life,
    /// The code that it runs.
    _kernels: Rc<Loaded>,
}

/// A graph's entry in the ledger.
struct Life {
    heap: Arc<Heap>,
    graph: u64,
}

impl Drop for Life {
    fn drop(&mut self) {
        let free = self.heap.ledger().forgotten(self.graph);
        self.heap.free(&free);
    }
}

impl CudaExec {
    /// Begins to record what is queued, instead of running it. Kernels must be loaded and memory allocated before:
    /// until the end, uploads, allocations and reads are refused.
    ///
    /// # Errors
    /// A recording under way; the driver's; a failure kept from an earlier upload.
    pub fn begin_capture(&self) -> Result<()> {
        self.check()?;
        if self.recording().is_some() {
            return Err(CudaError::Argument("a graph is being captured already".into()));
        }
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        self.stream().begin_capture(mode).doing("beginning a capture")?;
        self.set_recording(Some(self.heap().ledger().recording()));
        Ok(())
    }

    /// Ends the recording; the graph is ready to be launched.
    ///
    /// # Errors
    /// No recording under way, or one that held nothing; something that can't be recorded; the driver's.
    pub fn end_capture(&self) -> Result<Graph> {
        let Some(graph) = self.recording() else {
            return Err(CudaError::Argument("no graph is being captured".into()));
        };
        self.set_recording(None);
        let life = Life { heap: Arc::clone(self.heap()), graph };
        let ended = self.stream().end_capture(CUgraphInstantiate_flags(0));
        self.check()?;
        let graph = ended.doing("ending a capture")?;
        let graph =
            graph.ok_or_else(|| CudaError::Argument("a capture in which nothing was queued".into()))?;
        graph.upload().doing("uploading a graph")?;
        self.heap().ledger().recorded(life.graph);
        Ok(Graph { graph, life, _kernels: Rc::clone(&self.kernels) })
    }

    /// Records what `body` queues. A failure in it ends the recording.
    ///
    /// # Errors
    /// `body`'s own; as [`CudaExec::begin_capture`] and [`CudaExec::end_capture`].
    pub fn capture<T, E: From<CudaError>>(
        &self,
        body: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<(T, Graph), E> {
        self.begin_capture()?;
        let value = body();
        let graph = self.end_capture();
        Ok((value?, graph?))
    }
}

impl Graph {
    /// Queues the recorded work on the stream that it was recorded from.
    ///
    /// # Errors
    /// The driver's.
    pub fn launch(&self) -> Result<()> {
        self.graph.launch().doing("launching a graph")
    }

    /// Nodes: kernels, copies and fills.
    ///
    /// # Errors
    /// The driver's.
    pub fn nodes(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: the graph is alive; without an array the driver only counts.
        unsafe { cuGraphGetNodes(self.graph.cu_graph(), std::ptr::null_mut(), &mut count) }
            .result()
            .doing("counting a graph's nodes")?;
        Ok(count)
    }
}

impl headway_tensor::Graph for Graph {
    fn launch(&self) -> headway_tensor::Result<()> {
        Ok(Self::launch(self)?)
    }

    fn nodes(&self) -> headway_tensor::Result<usize> {
        Ok(Self::nodes(self)?)
    }
}

impl Graphs for CudaExec {
    fn begin_capture(&self) -> headway_tensor::Result<()> {
        Ok(Self::begin_capture(self)?)
    }

    fn end_capture(&self) -> headway_tensor::Result<Box<dyn headway_tensor::Graph>> {
        Ok(Box::new(Self::end_capture(self)?))
    }

    fn free_bytes(&self) -> headway_tensor::Result<u64> {
        Ok(self.free_and_total_memory()?.0)
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Graph({} of {})", self.life.graph, self.life.heap.device)
    }
}
