//! Lifetime: the model. Runs steps: writes the inputs, builds each group's metadata once (once a micro-batch where the
//! step is cut), and calls the decoder. Nothing here grows with the number of layers.

use super::{
    StartupReport,
    extent::Extent,
    fast_prefill::FastRows,
    graphs::{CapturedGraphs, StepRun},
    inputs::{InputBuffers, TokenInputs},
    logits::{self, StepLogits},
    micro_batches::MicroBatches,
    step_times::{Laps, StepTimes},
};
use crate::{
    models::{Decoder, ModelError, ModelPlan, decoder::LayerRows},
    scheduler::{RequestId, StepPlan},
};
use headway_attention::{AttentionGroup, CommonAttentionMetadata, KvPool, StepMetadata, build_step};
use headway_tensor::{Device, Ops, RowSampler, TensorMut};

/// A loaded model with its cache and builders.
pub struct ModelRunner {
    // Dropped before what they run on.
    pub(super) graphs: CapturedGraphs,
    pub(super) ops: Box<dyn Ops>,
    pub(super) decoder: Decoder,
    pub(super) groups: Vec<AttentionGroup>,
    pub(super) kv: KvPool,
    pub(super) step: StepMetadata,
    pub(super) inputs: InputBuffers,
    /// What a step gives, where it was computed on a device.
    pub(super) host_rows: Vec<f32>,
    /// What chooses tokens on the device, where it does.
    pub(super) sampler: Option<Box<dyn RowSampler>>,
    pub(super) commons: Vec<CommonAttentionMetadata>,
    pub(super) micro: MicroBatches,
    /// Where the last layers compute wanted rows alone: of steps that run whole.
    pub(super) fast: Option<FastRows>,
    pub(super) report: StartupReport,
    pub(crate) times: StepTimes,
}

impl ModelRunner {
    /// Runs one step; on a device, queues it. `table` gives a request's blocks in a KV cache group. Returns the logits of
    /// the requests that need them, in plan order: `[plan.num_logits(), vocab_size]`, float32, where they lie.
    ///
    /// # Errors
    /// What the builders, the layers or the operations refuse; nothing of the step counts then.
    pub fn execute<'t>(
        &mut self,
        plan: &StepPlan,
        table: impl Fn(RequestId, usize) -> Option<&'t [u32]>,
    ) -> Result<StepLogits<'_>, ModelError> {
        let mut laps = Laps::start();
        let graph = self.graphs.dispatch(plan);
        let alone = || Extent { whole_tables: self.graphs.any(), ..Extent::of(plan) };
        let extent = graph.map_or_else(alone, |(_, extent)| extent);
        let (tokens, cut) = self.prepare(plan, table, extent, false, &mut laps)?;
        let cx = &*self.ops;
        let rows = if let Some((index, _)) = graph {
            self.times.replayed += 1;
            let (input, step, kv) = (tokens.decoder(), &self.step, &mut self.kv);
            let run = StepRun { ops: cx, input, step, kv };
            self.graphs.replay(index, &mut self.decoder, run, plan.num_logits())?
        } else if cut {
            let mut rows = 0;
            for (part, step) in self.micro.parts() {
                rows += self.decoder.forward_part(cx, &part.decoder(), step, &mut self.kv, rows)?;
            }
            self.decoder.logits(cx, rows)?
        } else {
            self.decoder.forward(cx, &tokens.decoder(), &self.step, &mut self.kv)?
        };
        laps.lap(&mut self.times.forward);
        self.times.steps += 1;
        let (copy, wait) = (&mut self.host_rows, &mut self.times.wait);
        let sampler = self.sampler.as_deref_mut();
        Ok(StepLogits { ops: cx, rows, copy, sampler, wait })
    }

    /// Runs one step of a model that gives hidden states and keeps no cache: those of every token,
    /// `[num_tokens, hidden_size]`, float32.
    ///
    /// # Errors
    /// As [`ModelRunner::execute`].
    pub fn encode(&mut self, plan: &StepPlan) -> Result<&mut [f32], ModelError> {
        let mut laps = Laps::start();
        // Start-up refuses micro-batches for such models: all their steps run whole.
        let (tokens, _) = self.prepare(plan, |_, _| None, Extent::of(plan), false, &mut laps)?;
        let states = self.decoder.encode(&*self.ops, &tokens.decoder(), &self.step, &mut self.kv)?;
        laps.lap(&mut self.times.forward);
        let states = on_host(&*self.ops, states, &mut self.host_rows)?;
        laps.lap(&mut self.times.wait);
        self.times.steps += 1;
        Ok(states)
    }

    /// Writes a step's inputs and builds every group's metadata, in parts where the step is cut: whether it is. `capture`:
    /// metadata that a graph is recorded with.
    pub(super) fn prepare<'t>(
        &mut self,
        plan: &StepPlan,
        table: impl Fn(RequestId, usize) -> Option<&'t [u32]>,
        extent: Extent,
        capture: bool,
        laps: &mut Laps,
    ) -> Result<(TokenInputs, bool), ModelError> {
        self.drop_step();
        let mut tokens = self.inputs.write(&*self.ops, plan, extent, table, &mut self.commons)?;
        laps.lap(&mut self.times.inputs);
        let (cx, groups) = (&*self.ops, &mut self.groups);
        let cut = self.micro.cut(cx, groups, &tokens, &self.commons)?;
        if !cut {
            if let Some(fast) = &mut self.fast {
                fast.attach(cx, &mut self.commons, &mut tokens)?;
            }
            build_step(groups, cx, &self.commons, 0, capture, &mut self.step)?;
        }
        laps.lap(&mut self.times.metadata);
        Ok((tokens, cut))
    }

    /// Metadata holds views of the input buffers: dropped before these are written, so that they can be recycled.
    pub(super) fn drop_step(&mut self) {
        self.step.clear();
        self.micro.clear();
        self.commons.clear();
    }

    /// Steps that ran in micro-batches since start-up.
    pub fn cut_steps(&self) -> u64 {
        self.micro.cut_steps
    }

    /// Rows that went through the model's first layer since start-up, and through its last: fewer where
    /// `--kv-sharing-fast-prefill` is in force.
    pub fn layer_rows(&self) -> LayerRows {
        self.decoder.layer_rows()
    }

    /// Where the time of all steps went.
    pub fn times(&self) -> StepTimes {
        self.times
    }

    /// What was decided at start-up.
    pub fn report(&self) -> &StartupReport {
        &self.report
    }

    /// Completes the report with what the scheduler knows.
    pub(crate) fn note_max_request_tokens(&mut self, tokens: usize) {
        self.report.memory.max_request_tokens = tokens;
    }

    /// The attention groups, with their counters.
    pub fn groups(&self) -> &[AttentionGroup] {
        &self.groups
    }

    /// The most tokens that the model's encoder takes; `None`: it has none for a decoder to attend to.
    pub fn max_encoder_tokens(&self) -> Option<usize> {
        self.decoder.plan().encoder.as_ref().map(|e| e.max_tokens)
    }

    /// The model as data.
    pub fn model(&self) -> &ModelPlan {
        self.decoder.plan()
    }

    /// Rows of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.decoder.plan().vocab_size
    }

    /// How often an input buffer had to be allocated anew because an earlier step's view was alive; 0 in
    /// a sound step loop.
    pub fn input_reallocs(&self) -> usize {
        let fast = self.fast.as_ref().map_or(0, FastRows::reallocs);
        self.inputs.reallocs() + self.micro.reallocs() + fast
    }
}

/// Float32 rows where the host reads them: in place, or in `copy`.
fn on_host<'a>(
    ops: &dyn Ops,
    mut rows: TensorMut<'a>,
    copy: &'a mut Vec<f32>,
) -> Result<&'a mut [f32], ModelError> {
    if rows.device() == Device::CPU {
        return Ok(rows.into_host()?);
    }
    let all = 0..rows.shape().first().copied().unwrap_or(0);
    logits::read(ops, &mut rows, all, copy)?;
    Ok(copy)
}
