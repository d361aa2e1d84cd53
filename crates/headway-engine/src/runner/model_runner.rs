//! Lifetime: the model. Runs steps: writes the inputs, builds each group's metadata once, and calls
//! the decoder. Nothing here grows with the number of layers.

use super::{
    StartupReport,
    inputs::InputBuffers,
    step_times::{Laps, StepTimes},
};
use crate::{
    models::{Decoder, ModelError, decoder::DecoderInput},
    scheduler::{RequestId, StepPlan},
};
use headway_attention::{AttentionGroup, CommonAttentionMetadata, KvPool, StepMetadata, build_step};
use headway_tensor::{Ops, TensorMut};

/// A loaded model with its cache and builders.
pub struct ModelRunner {
    pub(super) ops: Box<dyn Ops>,
    pub(super) decoder: Decoder,
    pub(super) groups: Vec<AttentionGroup>,
    pub(super) kv: KvPool,
    pub(super) step: StepMetadata,
    pub(super) inputs: InputBuffers,
    pub(super) commons: Vec<CommonAttentionMetadata>,
    pub(super) report: StartupReport,
    pub(crate) times: StepTimes,
}

impl ModelRunner {
    /// Runs one step. `table` gives a request's blocks in a KV cache group. Returns the logits of the
    /// requests that need them, in plan order: `[num_sampled, vocab_size]`, float32.
    ///
    /// # Errors
    /// What the builders, the layers or the operations refuse; nothing of the step counts then.
    pub fn execute<'t>(
        &mut self,
        plan: &StepPlan,
        table: impl Fn(RequestId, usize) -> Option<&'t [u32]>,
    ) -> Result<TensorMut<'_>, ModelError> {
        // Metadata holds views of the input buffers: dropped first, so that these can be recycled.
        let mut laps = Laps::start();
        self.step.clear();
        self.commons.clear();
        let tokens = self.inputs.write(&*self.ops, plan, table, &mut self.commons)?;
        laps.lap(&mut self.times.inputs);
        build_step(&mut self.groups, &*self.ops, &self.commons, 0, false, &mut self.step)?;
        laps.lap(&mut self.times.metadata);
        let input = DecoderInput {
            token_ids: &tokens.token_ids,
            positions: &tokens.positions,
            logits_rows: &tokens.logits_rows,
        };
        let logits = self.decoder.forward(&*self.ops, &input, &self.step, &mut self.kv)?;
        laps.lap(&mut self.times.forward);
        self.times.steps += 1;
        Ok(logits)
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

    /// Rows of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.decoder.plan().vocab_size
    }

    /// How often an input buffer had to be allocated anew because an earlier step's view was alive; 0 in
    /// a sound step loop.
    pub fn input_reallocs(&self) -> usize {
        self.inputs.reallocs()
    }
}
