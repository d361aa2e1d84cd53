//! The decoder that runs a plan: one forward pass for every model. Buffers are sized once, for the
//! largest step; a step allocates nothing.

mod attention;
mod buffers;
mod cross;
mod embedding;
mod fast_prefill;
mod feed_forward;
mod kernels;
mod mixer;
mod mla;
mod per_layer;
mod pieces;
mod state_space;
mod step;

pub use super::load::{Taken, WeightDType};
pub use fast_prefill::{FastPrefillInput, LayerRows};
pub use kernels::Kernels;
pub use pieces::Pieces;

use super::{
    ModelError, ModelPlan,
    load::Loader,
    plan::{LayerNormPlan, LayerPlan, LinearPlan, NormPlan},
    unused::unused,
};
use crate::loading::Checkpoint;
use buffers::Buffers;
use embedding::{LayerNorm, Positions};
use feed_forward::FeedForward;
use headway_attention::{AttnLayer, KvPool, StepMetadata};
use headway_tensor::{Linear, Ops, RowQuant, Tensor, TensorMut, View};
use mixer::Mixer;
use per_layer::{PerLayerBlock, PerLayerInputs};
use std::{
    cell::{Cell, RefCell},
    sync::Arc,
};
use step::Step;

/// The most that a step can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// New tokens.
    pub max_num_tokens: usize,
    /// Rows of logits.
    pub max_num_logits: usize,
    /// Positions of a request.
    pub max_model_len: usize,
}

/// One step's rows.
pub struct DecoderInput<'a> {
    /// `[num_tokens]`.
    pub token_ids: &'a View<i32>,
    /// `[num_tokens]`.
    pub positions: &'a View<i32>,
    /// Rows whose logits are wanted.
    pub logits_rows: &'a View<i32>,
    /// What an encoder reads in this step; `None`: nothing, or there is no encoder.
    pub encoder: Option<EncoderInput<'a>>,
    /// Where the last layers compute the rows of `logits_rows` alone; `None`: every layer computes every row.
    pub fast_prefill: Option<FastPrefillInput<'a>>,
}

/// The inputs of an encoder in one step, one after another.
#[derive(Clone, Copy)]
pub struct EncoderInput<'a> {
    /// `[tokens]`.
    pub token_ids: &'a View<i32>,
    /// `[tokens]`: of each in its input.
    pub positions: &'a View<i32>,
}

/// A loaded model on a device.
pub struct Decoder {
    plan: ModelPlan,
    embedding: Arc<dyn Linear>,
    positions: Option<Positions>,
    embedding_norm: Option<LayerNorm>,
    /// None where the model gives hidden states.
    lm_head: Option<Arc<dyn Linear>>,
    final_norm: Option<Tensor>,
    ropes: Vec<Tensor>,
    per_layer_inputs: Option<PerLayerInputs>,
    encoder: Option<Encoder>,
    layers: Vec<Layer>,
    buffers: Buffers,
    rows: LayerRows,
    unused: Vec<String>,
    taken: Taken,
}

struct Encoder {
    positions: Positions,
    embedding_norm: LayerNorm,
    layers: Vec<Layer>,
}

struct Layer {
    pre_mixer_norm: Option<Tensor>,
    post_mixer_norm: Option<Tensor>,
    pre_ffn_norm: Option<Tensor>,
    post_ffn_norm: Option<Tensor>,
    mixers: Vec<Mixer>,
    feed_forward: Option<FeedForward>,
    feed_forward_scale: f32,
    per_layer: Option<PerLayerBlock>,
    after_mixer_norm: Option<LayerNorm>,
    after_ffn_norm: Option<LayerNorm>,
    scalar: f32,
}

impl Decoder {
    /// Loads every weight that the plan names. `kernels` makes each mixer's impl; `progress` hears of
    /// each finished layer.
    ///
    /// # Errors
    /// A missing tensor or one of another shape, by name; formats without a kernel; no memory.
    pub fn load(
        plan: ModelPlan,
        checkpoint: &dyn Checkpoint,
        ops: &dyn Ops,
        dtype: WeightDType,
        limits: StepLimits,
        mut kernels: Kernels<'_>,
        mut progress: impl FnMut(usize),
    ) -> Result<Self, ModelError> {
        let activations = kernels.activations;
        let loader =
            Loader { checkpoint, ops, dtype, activations, used: RefCell::default(), taken: Cell::default() };
        let embedding = LinearPlan::single(plan.embedding.clone(), None, plan.hidden_size, plan.vocab_size);
        let (embedding, lm_head) = match &plan.lm_head {
            None if plan.pooling.is_some() => (loader.table(&embedding)?, None),
            None => {
                let both = loader.linear(&embedding)?;
                (both.clone(), Some(both))
            }
            Some(head) => (loader.table(&embedding)?, Some(loader.linear(head)?)),
        };
        let hidden = plan.hidden_size;
        let positions = plan.positions.as_ref().map(|p| Positions::load(&loader, p, hidden)).transpose()?;
        let embedding_norm = plan.embedding_norm.as_ref().map(|n| LayerNorm::load(&loader, n, hidden));
        let embedding_norm = embedding_norm.transpose()?;
        let final_norm = plan.final_norm.as_ref().map(|n| loader.norm(n, hidden)).transpose()?;
        let ropes = plan
            .ropes
            .iter()
            .map(|r| {
                let shape = [limits.max_model_len, r.rotary_dim / 2, 2];
                Tensor::from_slice(ops, &r.table(limits.max_model_len), &shape)
            })
            .collect::<Result<_, _>>()?;
        let per_layer_inputs = plan.per_layer_inputs.as_ref();
        let per_layer_inputs = per_layer_inputs.map(|p| PerLayerInputs::load(&loader, p, plan.vocab_size));
        let per_layer_inputs = per_layer_inputs.transpose()?;
        let mut next = 0;
        let encoder = match &plan.encoder {
            None => None,
            Some(e) => Some(Encoder {
                positions: Positions::load(&loader, &e.positions, hidden)?,
                embedding_norm: LayerNorm::load(&loader, &e.embedding_norm, hidden)?,
                layers: Layer::load_all(&loader, &plan, &e.layers, &mut next, &mut kernels, &mut |_| ())?,
            }),
        };
        let layers = Layer::load_all(&loader, &plan, &plan.layers, &mut next, &mut kernels, &mut progress)?;
        let taken = loader.taken.get();
        let unused = unused(&plan, checkpoint, &loader.used.into_inner())?;
        let coded = layers.iter().any(|l| l.mixers.iter().any(|m| m.coded_output().is_some()));
        let buffers = Buffers::new(ops, &plan, limits, coded, activations)?;
        Ok(Self {
            plan,
            embedding,
            positions,
            embedding_norm,
            lm_head,
            final_norm,
            ropes,
            per_layer_inputs,
            encoder,
            layers,
            buffers,
            rows: LayerRows::default(),
            unused,
            taken,
        })
    }

    /// The plan that this runs.
    pub fn plan(&self) -> &ModelPlan {
        &self.plan
    }

    /// Tensors of the files that the plan doesn't name.
    pub fn unused_tensors(&self) -> &[String] {
        &self.unused
    }

    /// What the device holds of the weights in a form of its own, and how long that took.
    pub fn taken(&self) -> Taken {
        self.taken
    }

    /// Each layer whose output projection takes codes: its index, the rule, and whether its kernel writes them itself.
    pub fn coded_outputs(&self) -> impl Iterator<Item = (usize, RowQuant, bool)> + '_ {
        let of = |(i, l): (usize, &'_ Layer)| {
            l.mixers.iter().filter_map(move |m| m.coded_output().map(|(q, f)| (i, q, f))).collect::<Vec<_>>()
        };
        self.layers.iter().enumerate().flat_map(of)
    }

    /// Rows that went through the first layer and the last since it was loaded, a profile run's among them.
    pub fn layer_rows(&self) -> LayerRows {
        self.rows
    }

    /// Bytes of the activation buffers.
    pub fn buffer_bytes(&self) -> usize {
        self.buffers.bytes()
    }

    /// Runs one step and returns the logits of the wanted rows, `[logits_rows, vocab_size]`.
    ///
    /// # Errors
    /// A token outside the vocabulary, a position past the table, metadata of another step.
    pub fn forward(
        &mut self,
        ops: &dyn Ops,
        input: &DecoderInput<'_>,
        step: &StepMetadata,
        kv: &mut KvPool,
    ) -> Result<TensorMut<'_>, ModelError> {
        let rows = self.forward_part(ops, input, step, kv, 0)?;
        self.logits(ops, rows)
    }

    /// Runs the layers over a part of a step, and keeps its wanted rows behind the `first_row` ones of the parts before
    /// it, for [`Decoder::logits`]. Returns how many these are.
    ///
    /// # Errors
    /// As [`Decoder::forward`].
    pub fn forward_part(
        &mut self,
        ops: &dyn Ops,
        input: &DecoderInput<'_>,
        step: &StepMetadata,
        kv: &mut KvPool,
        first_row: usize,
    ) -> Result<usize, ModelError> {
        let n = self.layers(ops, input, step, kv, None)?;
        self.gather(ops, input, n, first_row)
    }

    /// Keeps the wanted ones of the `n` rows that left the last layer, behind `first_row` others; how many they are.
    fn gather(
        &mut self,
        ops: &dyn Ops,
        input: &DecoderInput<'_>,
        n: usize,
        first_row: usize,
    ) -> Result<usize, ModelError> {
        let (b, hidden, rows) = (&mut self.buffers, self.plan.hidden_size, input.logits_rows);
        let end = first_row + rows.len();
        let last = b.last.view_mut_as(&[end, hidden])?.rows(first_row..end)?;
        let all = b.all_logits_rows.slice(0..rows.len());
        let rows = if input.fast_prefill.is_some() { &all } else { rows };
        ops.gather_rows(b.hidden.view_as(&[n, hidden])?, rows, last)?;
        Ok(rows.len())
    }

    /// The logits of a recorded step of `tokens` rows that was replayed: as [`Decoder::forward`] returns them.
    ///
    /// # Errors
    /// More rows than a step can want.
    pub fn replayed(&mut self, tokens: usize, logits: usize) -> Result<TensorMut<'_>, ModelError> {
        self.rows.first_layer += tokens as u64;
        self.rows.last_layer += tokens as u64;
        Ok(self.buffers.logits.view_mut_as(&[logits, self.plan.vocab_size])?)
    }

    /// Runs one step of a model that gives hidden states, and returns those of every token, normed where the
    /// model does so: `[num_tokens, hidden_size]`.
    ///
    /// # Errors
    /// As [`Decoder::forward`].
    pub fn encode(
        &mut self,
        ops: &dyn Ops,
        input: &DecoderInput<'_>,
        step: &StepMetadata,
        kv: &mut KvPool,
    ) -> Result<TensorMut<'_>, ModelError> {
        self.layers(ops, input, step, kv, None)?;
        let shape = [input.token_ids.len(), self.plan.hidden_size];
        if let Some(w) = &self.final_norm {
            ops.rms_norm_in_place(self.buffers.hidden.view_mut_as(&shape)?, w, self.plan.norm_eps)?;
        }
        Ok(self.buffers.hidden.view_mut_as(&shape)?)
    }

    /// From the tokens to what leaves the last layer; how many rows do.
    fn layers(
        &mut self,
        ops: &dyn Ops,
        input: &DecoderInput<'_>,
        step: &StepMetadata,
        kv: &mut KvPool,
        pieces: Option<&dyn Pieces>,
    ) -> Result<usize, ModelError> {
        let encoded = self.run_encoder(ops, input, step, kv)?;
        let (plan, b, tokens) = (&self.plan, &mut self.buffers, input.token_ids);
        let mut s = Step::new(ops, plan, &self.ropes, tokens.len(), input.positions, step, encoded);
        s.pieces = pieces;
        self.rows.first_layer += s.n as u64;
        ops.embed(&*self.embedding, tokens, plan.embedding_scale, b.hidden.view_mut_as(&[s.n, s.hidden])?)?;
        if let Some(p) = &self.positions {
            p.run(&s, b)?;
        }
        if let Some(n) = &self.embedding_norm {
            n.run(&s, b)?;
        }
        if let Some(p) = &self.per_layer_inputs {
            p.run(&s, b, input.token_ids)?;
        }
        if let Some(w) = self.layers.first().and_then(Layer::first_norm) {
            s.norm(b, w)?;
        }
        for (i, layer) in self.layers.iter().enumerate() {
            if let Some(fast) = input.fast_prefill.as_ref().filter(|f| f.first_layer == i) {
                s = fast.narrow(s, b, input.logits_rows)?;
            }
            // What is left of a step inside a prompt.
            if s.n == 0 {
                break;
            }
            layer.run(&s, b, kv, self.layers.get(i + 1).and_then(Layer::first_norm))?;
        }
        self.rows.last_layer += s.n as u64;
        Ok(s.n)
    }

    /// From the encoder's tokens to `encoded`; how many there were.
    fn run_encoder(
        &mut self,
        ops: &dyn Ops,
        input: &DecoderInput<'_>,
        step: &StepMetadata,
        kv: &mut KvPool,
    ) -> Result<usize, ModelError> {
        let (Some(e), Some(input)) = (&self.encoder, input.encoder) else { return Ok(0) };
        let (plan, b, tokens) = (&self.plan, &mut self.buffers, input.token_ids);
        let s = Step::new(ops, plan, &self.ropes, tokens.len(), input.positions, step, 0);
        ops.embed(&*self.embedding, tokens, plan.embedding_scale, b.hidden.view_mut_as(&[s.n, s.hidden])?)?;
        e.positions.run(&s, b)?;
        e.embedding_norm.run(&s, b)?;
        for layer in &e.layers {
            layer.run(&s, b, kv, None)?;
        }
        std::mem::swap(&mut b.hidden, &mut b.encoded);
        Ok(s.n)
    }

    /// Final norm and head, for the wanted rows of all parts of a step.
    ///
    /// # Errors
    /// More rows than a step can want.
    pub fn logits(&mut self, ops: &dyn Ops, rows: usize) -> Result<TensorMut<'_>, ModelError> {
        let (b, hidden) = (&mut self.buffers, self.plan.hidden_size);
        let shape = [rows, hidden];
        if let Some(w) = &self.final_norm {
            ops.rms_norm_in_place(b.last.view_mut_as(&shape)?, w, self.plan.norm_eps)?;
        }
        let Some(lm_head) = &self.lm_head else {
            let what = "logits of a model that gives hidden states".into();
            return Err(headway_tensor::TensorError::Unsupported(what).into());
        };
        let out = [rows, self.plan.vocab_size];
        ops.linear(&**lm_head, b.last.view_as(&shape)?, b.logits.view_mut_as(&out)?)?;
        if self.plan.logit_scale != 1.0 || self.plan.final_logit_soft_cap.is_some() {
            let cap = self.plan.final_logit_soft_cap;
            ops.scale_and_cap(b.logits.view_mut_as(&out)?, self.plan.logit_scale, cap)?;
        }
        Ok(self.buffers.logits.view_mut_as(&out)?)
    }
}

impl Layer {
    /// A stack of layers; `next` is the number of its first mixer, and then of the one after its last.
    fn load_all(
        loader: &Loader<'_>,
        plan: &ModelPlan,
        layers: &[LayerPlan],
        next: &mut u32,
        kernels: &mut Kernels<'_>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<Self>, ModelError> {
        let mut all = Vec::with_capacity(layers.len());
        for (i, l) in layers.iter().enumerate() {
            all.push(Self::load(loader, plan, (i, l), AttnLayer(*next), kernels)?);
            *next += l.mixers.len() as u32;
            progress(i + 1);
        }
        Ok(all)
    }

    /// The layer `l` at `index`; `first` is the number of its first mixer.
    fn load(
        loader: &Loader<'_>,
        plan: &ModelPlan,
        (index, l): (usize, &LayerPlan),
        first: AttnLayer,
        kernels: &mut Kernels<'_>,
    ) -> Result<Self, ModelError> {
        let per_layer = l.per_layer.as_ref();
        let per_layer = per_layer.map(|p| PerLayerBlock::load(loader, p, index, plan.hidden_size));
        let scalar = l.scalar.as_ref().map(|name| loader.values(name, &[1])).transpose()?;
        let norm = |n: &Option<NormPlan>| n.as_ref().map(|n| loader.norm(n, plan.hidden_size)).transpose();
        let layer_norm = |n: &Option<LayerNormPlan>| {
            n.as_ref().map(|n| LayerNorm::load(loader, n, plan.hidden_size)).transpose()
        };
        let mixers = (first.0..).zip(&l.mixers);
        let mixers = mixers.map(|(i, m)| Mixer::load(loader, plan, m, AttnLayer(i), kernels));
        Ok(Self {
            mixers: mixers.collect::<Result<_, _>>()?,
            pre_mixer_norm: norm(&l.pre_mixer_norm)?,
            post_mixer_norm: norm(&l.post_mixer_norm)?,
            pre_ffn_norm: norm(&l.pre_ffn_norm)?,
            post_ffn_norm: norm(&l.post_ffn_norm)?,
            feed_forward: l.feed_forward.as_ref().map(|f| FeedForward::load(loader, f)).transpose()?,
            feed_forward_scale: l.feed_forward_scale,
            per_layer: per_layer.transpose()?,
            after_mixer_norm: layer_norm(&l.after_mixer_norm)?,
            after_ffn_norm: layer_norm(&l.after_ffn_norm)?,
            scalar: scalar.map_or(1.0, |s| s[0]),
        })
    }

    /// The norm of what its first block reads.
    fn first_norm(&self) -> Option<&Tensor> {
        if self.mixers.is_empty() { self.pre_ffn_norm.as_ref() } else { self.pre_mixer_norm.as_ref() }
    }

    /// Mixers, feed-forward, the layer's own input; `next` is the norm of what the next layer's first block reads.
    fn run(
        &self,
        s: &Step<'_>,
        b: &mut Buffers,
        kv: &mut KvPool,
        next: Option<&Tensor>,
    ) -> Result<(), ModelError> {
        if self.per_layer.is_none() && self.scalar == 1.0 {
            return self.blocks(s, b, kv, next);
        }
        self.blocks(s, b, kv, None)?;
        if let Some(p) = &self.per_layer {
            p.run(s, b)?;
        }
        if self.scalar != 1.0 {
            s.ops.scale_and_cap(b.hidden.view_mut_as(&[s.n, s.hidden])?, self.scalar, None)?;
        }
        match next {
            Some(w) => s.norm(b, w),
            None => Ok(()),
        }
    }

    /// Mixers and feed-forward.
    fn blocks(
        &self,
        s: &Step<'_>,
        b: &mut Buffers,
        kv: &mut KvPool,
        next: Option<&Tensor>,
    ) -> Result<(), ModelError> {
        self.mix(s, b, kv)?;
        if !self.mixers.is_empty() {
            let after = if self.feed_forward.is_some() { self.pre_ffn_norm.as_ref() } else { next };
            s.join(b, self.post_mixer_norm.as_ref(), after)?;
            if let Some(n) = &self.after_mixer_norm {
                n.run(s, b)?;
            }
        }
        if let Some(f) = &self.feed_forward {
            f.run(s, b, self.pre_ffn_norm.is_some())?;
            s.scale(b, self.feed_forward_scale)?;
            s.join(b, self.post_ffn_norm.as_ref(), next)?;
            if let Some(n) = &self.after_ffn_norm {
                n.run(s, b)?;
            }
        }
        Ok(())
    }

    /// The sum of the mixers' outputs, into `mixed`.
    fn mix(&self, s: &Step<'_>, b: &mut Buffers, kv: &mut KvPool) -> Result<(), ModelError> {
        let shape = [s.n, s.hidden];
        for (i, mixer) in self.mixers.iter().enumerate() {
            if i > 0 {
                std::mem::swap(&mut b.mixed, &mut b.beside);
            }
            mixer.run(s, b, self.pre_mixer_norm.is_some(), kv)?;
            if i > 0 {
                s.ops.add(b.mixed.view_mut_as(&shape)?, b.beside.view_as(&shape)?)?;
            }
        }
        Ok(())
    }
}
