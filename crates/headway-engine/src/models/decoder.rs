//! The decoder that runs a plan: one forward pass for every model. Buffers are sized once, for the
//! largest step; a step allocates nothing.

pub use super::load::{Taken, WeightDType};
use super::{
    ModelError, ModelPlan,
    load::Loader,
    plan::{AttentionPlan, FeedForwardPlan, LayerPlan, LinearPlan, MixerPlan, NormPlan},
    unused::unused,
};
use crate::loading::Checkpoint;
use headway_attention::{AttnLayer, DynAttention, KvMut, KvPool, LayerKernel, Qkv, StepEntry, StepMetadata};
use headway_tensor::{Activation, DType, Linear, Ops, RopeStyle, Tensor, TensorMut, View};
use std::{
    cell::{Cell, RefCell},
    sync::Arc,
};

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
}

/// A loaded model on a device.
pub struct Decoder {
    plan: ModelPlan,
    embedding: Arc<dyn Linear>,
    lm_head: Arc<dyn Linear>,
    final_norm: Tensor,
    ropes: Vec<Tensor>,
    layers: Vec<Layer>,
    buffers: Buffers,
    unused: Vec<String>,
    taken: Taken,
}

struct Layer {
    pre_mixer_norm: Option<Tensor>,
    post_mixer_norm: Option<Tensor>,
    pre_ffn_norm: Option<Tensor>,
    post_ffn_norm: Option<Tensor>,
    attention: Attention,
    feed_forward: FeedForward,
}

struct Attention {
    layer: AttnLayer,
    kernel: Box<dyn DynAttention>,
    qkv: Arc<dyn Linear>,
    o: Arc<dyn Linear>,
    qk_norm: Option<(Tensor, Tensor, bool)>,
    rope: usize,
    rope_style: RopeStyle,
    num_heads: usize,
    num_kv_heads: usize,
    head_size: usize,
}

struct FeedForward {
    gate_up: Arc<dyn Linear>,
    down: Arc<dyn Linear>,
    activation: Activation,
}

/// Activations, `[max_num_tokens, width]` each, float32 on the CPU.
struct Buffers {
    hidden: Tensor,
    normed: Tensor,
    mixed: Tensor,
    qkv: Tensor,
    heads: Tensor,
    gate_up: Tensor,
    gated: Tensor,
    last: Tensor,
    logits: Tensor,
}

impl Buffers {
    fn new(ops: &dyn Ops, plan: &ModelPlan, limits: StepLimits) -> Result<Self, ModelError> {
        let zeros = |rows, width| Tensor::zeros(ops, DType::F32, &[rows, width]);
        let n = limits.max_num_tokens;
        let widest = |f: &dyn Fn(&LayerPlan) -> usize| plan.layers.iter().map(f).max().unwrap_or(0);
        let qkv = widest(&|l| match &l.mixer {
            MixerPlan::Attention(a) => a.qkv.out_features,
        });
        let heads = widest(&|l| match &l.mixer {
            MixerPlan::Attention(a) => a.num_heads * a.head_size,
        });
        let gate_up = widest(&|l| match &l.feed_forward {
            FeedForwardPlan::Gated { gate_up, .. } => gate_up.out_features,
        });
        let h = plan.hidden_size;
        Ok(Self {
            hidden: zeros(n, h)?,
            normed: zeros(n, h)?,
            mixed: zeros(n, h)?,
            qkv: zeros(n, qkv)?,
            heads: zeros(n, heads)?,
            gate_up: zeros(n, gate_up)?,
            gated: zeros(n, gate_up / 2)?,
            last: zeros(limits.max_num_logits, h)?,
            logits: zeros(limits.max_num_logits, plan.vocab_size)?,
        })
    }

    fn bytes(&self) -> usize {
        let all = [
            &self.hidden,
            &self.normed,
            &self.mixed,
            &self.qkv,
            &self.heads,
            &self.gate_up,
            &self.gated,
            &self.last,
            &self.logits,
        ];
        all.into_iter().map(Tensor::bytes).sum()
    }
}

impl Decoder {
    /// Loads every weight that the plan names. `kernel` makes each attention layer's impl; `progress`
    /// hears of each finished layer.
    ///
    /// # Errors
    /// A missing tensor or one of another shape, by name; formats without a kernel; no memory.
    pub fn load(
        plan: ModelPlan,
        checkpoint: &dyn Checkpoint,
        ops: &dyn Ops,
        dtype: WeightDType,
        limits: StepLimits,
        mut kernel: impl FnMut(AttnLayer, &AttentionPlan) -> Result<LayerKernel, ModelError>,
        mut progress: impl FnMut(usize),
    ) -> Result<Self, ModelError> {
        let loader = Loader { checkpoint, ops, dtype, used: RefCell::default(), taken: Cell::default() };
        let embedding = LinearPlan::single(plan.embedding.clone(), None, plan.hidden_size, plan.vocab_size);
        let (embedding, lm_head) = match &plan.lm_head {
            None => {
                let both = loader.linear(&embedding)?;
                (both.clone(), both)
            }
            Some(head) => (loader.table(&embedding)?, loader.linear(head)?),
        };
        let final_norm = loader.norm(&plan.final_norm, plan.hidden_size)?;
        let ropes = plan
            .ropes
            .iter()
            .map(|r| {
                let shape = [limits.max_model_len, r.rotary_dim / 2, 2];
                Tensor::from_slice(ops, &r.table(limits.max_model_len), &shape)
            })
            .collect::<Result<_, _>>()?;
        let mut layers = Vec::with_capacity(plan.layers.len());
        for (i, l) in plan.layers.iter().enumerate() {
            let MixerPlan::Attention(a) = &l.mixer;
            let index = AttnLayer(i as u32);
            let LayerKernel::Standard(k) = kernel(index, a)? else {
                return Err(ModelError::Unsupported {
                    file: checkpoint.describe(),
                    what: format!("a backend of another kind for attention layer {i}"),
                    remedy: "choose a backend for standard attention".into(),
                });
            };
            layers.push(Layer::load(&loader, &plan, l, index, k)?);
            progress(i + 1);
        }
        let taken = loader.taken.get();
        let unused = unused(&plan, checkpoint, &loader.used.into_inner())?;
        let buffers = Buffers::new(ops, &plan, limits)?;
        Ok(Self { plan, embedding, lm_head, final_norm, ropes, layers, buffers, unused, taken })
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
        let s = Step {
            ops,
            n: input.token_ids.len(),
            hidden: self.plan.hidden_size,
            eps: self.plan.rms_norm_eps,
        };
        let b = &mut self.buffers;
        let first = b.hidden.view_mut_as(&[s.n, s.hidden])?;
        ops.embed(&*self.embedding, input.token_ids, self.plan.embedding_scale, first)?;
        if let Some(w) = self.layers.first().and_then(|l| l.pre_mixer_norm.as_ref()) {
            let shape = [s.n, s.hidden];
            ops.rms_norm(b.hidden.view_as(&shape)?, w, s.eps, b.normed.view_mut_as(&shape)?)?;
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let a = &layer.attention;
            a.project(&s, b, layer.pre_mixer_norm.is_some(), &self.ropes, input.positions)?;
            a.attend(&s, b, step.layer(a.layer)?, &mut kv.layer(a.layer)?)?;
            s.join(b, layer.post_mixer_norm.as_ref(), layer.pre_ffn_norm.as_ref())?;
            layer.feed_forward.run(&s, b, layer.pre_ffn_norm.is_some())?;
            let next = self.layers.get(i + 1).and_then(|l| l.pre_mixer_norm.as_ref());
            s.join(b, layer.post_ffn_norm.as_ref(), next)?;
        }
        self.head(&s, input.logits_rows)
    }

    /// Final norm and head, for the wanted rows alone.
    fn head(&mut self, s: &Step<'_>, rows: &View<i32>) -> Result<TensorMut<'_>, ModelError> {
        let (b, ops) = (&mut self.buffers, s.ops);
        let shape = [rows.len(), s.hidden];
        ops.gather_rows(b.hidden.view_as(&[s.n, s.hidden])?, rows, b.last.view_mut_as(&shape)?)?;
        ops.rms_norm_in_place(b.last.view_mut_as(&shape)?, &self.final_norm, s.eps)?;
        let out = [rows.len(), self.plan.vocab_size];
        ops.linear(&*self.lm_head, b.last.view_as(&shape)?, b.logits.view_mut_as(&out)?)?;
        if self.plan.logit_scale != 1.0 || self.plan.final_logit_soft_cap.is_some() {
            let cap = self.plan.final_logit_soft_cap;
            ops.scale_and_cap(b.logits.view_mut_as(&out)?, self.plan.logit_scale, cap)?;
        }
        Ok(self.buffers.logits.view_mut_as(&out)?)
    }
}

/// What every block of a step needs.
struct Step<'a> {
    ops: &'a dyn Ops,
    n: usize,
    hidden: usize,
    eps: f32,
}

impl Step<'_> {
    /// Adds a block's output (normed first, where the plan says so) to the residual stream, and norms
    /// the stream for the next block where that one reads it normed.
    fn join(&self, b: &mut Buffers, post: Option<&Tensor>, next: Option<&Tensor>) -> Result<(), ModelError> {
        let shape = [self.n, self.hidden];
        if let Some(w) = post {
            self.ops.rms_norm_in_place(b.mixed.view_mut_as(&shape)?, w, self.eps)?;
        }
        let (x, acc) = (b.mixed.view_as(&shape)?, b.hidden.view_mut_as(&shape)?);
        match next {
            Some(w) => self.ops.add_rms_norm(acc, x, w, self.eps, b.normed.view_mut_as(&shape)?)?,
            None => self.ops.add(acc, x)?,
        }
        Ok(())
    }
}

impl Layer {
    fn load(
        loader: &Loader<'_>,
        plan: &ModelPlan,
        l: &LayerPlan,
        layer: AttnLayer,
        kernel: Box<dyn DynAttention>,
    ) -> Result<Self, ModelError> {
        let norm = |n: &Option<NormPlan>| n.as_ref().map(|n| loader.norm(n, plan.hidden_size)).transpose();
        let MixerPlan::Attention(a) = &l.mixer;
        let FeedForwardPlan::Gated { gate_up, down, activation } = &l.feed_forward;
        Ok(Self {
            pre_mixer_norm: norm(&l.pre_mixer_norm)?,
            post_mixer_norm: norm(&l.post_mixer_norm)?,
            pre_ffn_norm: norm(&l.pre_ffn_norm)?,
            post_ffn_norm: norm(&l.post_ffn_norm)?,
            attention: Attention::load(loader, plan, a, layer, kernel)?,
            feed_forward: FeedForward {
                gate_up: loader.linear(gate_up)?,
                down: loader.linear(down)?,
                activation: *activation,
            },
        })
    }
}

impl Attention {
    fn load(
        loader: &Loader<'_>,
        plan: &ModelPlan,
        a: &AttentionPlan,
        layer: AttnLayer,
        kernel: Box<dyn DynAttention>,
    ) -> Result<Self, ModelError> {
        let qk_norm = match &a.qk_norm {
            None => None,
            Some(n) => {
                let width = |heads| a.head_size * if n.per_head { 1 } else { heads };
                let (q, k) = (width(a.num_heads), width(a.num_kv_heads));
                Some((loader.norm(&n.q, q)?, loader.norm(&n.k, k)?, n.per_head))
            }
        };
        Ok(Self {
            layer,
            kernel,
            qkv: loader.linear(&a.qkv)?,
            o: loader.linear(&a.o)?,
            qk_norm,
            rope: a.rope,
            rope_style: plan.ropes[a.rope].style,
            num_heads: a.num_heads,
            num_kv_heads: a.num_kv_heads,
            head_size: a.head_size,
        })
    }

    /// Columns of q, k and v in the fused projection.
    fn columns(&self) -> [std::ops::Range<usize>; 3] {
        let (q, kv) = (self.num_heads * self.head_size, self.num_kv_heads * self.head_size);
        [0..q, q..q + kv, q + kv..q + 2 * kv]
    }

    /// Queries, keys and values: projected, normed, rotated.
    fn project(
        &self,
        s: &Step<'_>,
        b: &mut Buffers,
        normed: bool,
        ropes: &[Tensor],
        positions: &View<i32>,
    ) -> Result<(), ModelError> {
        let x = if normed { &b.normed } else { &b.hidden };
        let width = (self.num_heads + 2 * self.num_kv_heads) * self.head_size;
        let shape = [s.n, width];
        s.ops.linear(&*self.qkv, x.view_as(&[s.n, s.hidden])?, b.qkv.view_mut_as(&shape)?)?;
        let [q, k, _] = self.columns();
        if let Some((qw, kw, per_head)) = &self.qk_norm {
            for (cols, heads, w) in [(q.clone(), self.num_heads, qw), (k.clone(), self.num_kv_heads, kw)] {
                let x = b.qkv.view_mut_as(&shape)?.cols(cols)?;
                s.ops.rms_norm_in_place(if *per_head { x.heads(heads)? } else { x }, w, s.eps)?;
            }
        }
        // q and k lie side by side, so one call rotates the heads of both.
        let x = b.qkv.view_mut_as(&shape)?.cols(0..k.end)?.heads(self.num_heads + self.num_kv_heads)?;
        Ok(s.ops.rope(x, positions, &ropes[self.rope], self.rope_style)?)
    }

    /// Cache write, kernel, output projection.
    fn attend(
        &self,
        s: &Step<'_>,
        b: &mut Buffers,
        entry: &StepEntry,
        cache: &mut KvMut<'_>,
    ) -> Result<(), ModelError> {
        let width = (self.num_heads + 2 * self.num_kv_heads) * self.head_size;
        let qkv = b.qkv.view_as(&[s.n, width])?;
        let [q, k, v] = self.columns();
        let x = Qkv {
            q: qkv.cols(q)?.heads(self.num_heads)?,
            k: qkv.cols(k)?.heads(self.num_kv_heads)?,
            v: qkv.cols(v)?.heads(self.num_kv_heads)?,
        };
        let out = b.heads.view_mut_as(&[s.n, self.num_heads, self.head_size])?;
        self.kernel.run(s.ops, &x, cache, entry, out)?;
        let heads = b.heads.view_as(&[s.n, self.num_heads * self.head_size])?;
        Ok(s.ops.linear(&*self.o, heads, b.mixed.view_mut_as(&[s.n, s.hidden])?)?)
    }
}

impl FeedForward {
    fn run(&self, s: &Step<'_>, b: &mut Buffers, normed: bool) -> Result<(), ModelError> {
        let x = if normed { &b.normed } else { &b.hidden };
        let both = self.gate_up.out_features();
        let (wide, half) = ([s.n, both], [s.n, both / 2]);
        s.ops.linear(&*self.gate_up, x.view_as(&[s.n, s.hidden])?, b.gate_up.view_mut_as(&wide)?)?;
        s.ops.gated(self.activation, b.gate_up.view_as(&wide)?, b.gated.view_mut_as(&half)?)?;
        Ok(s.ops.linear(&*self.down, b.gated.view_as(&half)?, b.mixed.view_mut_as(&[s.n, s.hidden])?)?)
    }
}
