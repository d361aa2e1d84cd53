//! Activations of a step, `[max_num_tokens, width]` each, in one type but for logits, of tokens and of experts, which are
//! float32. Sized once for the widest layer of the plan; a step takes views.

use super::StepLimits;
use crate::models::{
    ModelError, ModelPlan,
    plan::{FeedForwardPlan, MixerPlan},
};
use headway_tensor::{DType, ExpertBuffers, Ops, Persistent, Tensor, View};

/// What all layers share. A mixer reads `normed` or `hidden`, and leaves its output in `mixed`; so does a
/// feed-forward.
pub(super) struct Buffers {
    /// The residual stream.
    pub hidden: Tensor,
    /// The stream, normed for the block that reads it next.
    pub normed: Tensor,
    /// A block's output.
    pub mixed: Tensor,
    /// The outputs of mixers beside the first; no rows where every layer has one at most.
    pub beside: Tensor,
    /// A mixer's projected input.
    pub qkv: Tensor,
    /// Queries that come from a compressed form.
    pub queries: Tensor,
    /// What a mixer's kernel writes.
    pub heads: Tensor,
    /// The same as e4m3 codes, where an output projection takes them; no rows otherwise.
    pub codes: Tensor,
    pub gate_up: Tensor,
    pub gated: Tensor,
    /// Logits of experts, float32: one that rounds to another expert is another answer.
    pub router: Tensor,
    /// What experts work in, where there are any.
    pub experts: Option<Box<dyn ExpertBuffers>>,
    /// Inputs of all layers, where layers have their own.
    pub per_layer: Tensor,
    /// What these are made from, and a layer's gated input.
    pub per_token: Tensor,
    /// What leaves the encoder, and its keys and values for a layer.
    pub encoded: Tensor,
    pub encoded_kv: Tensor,
    /// Rows whose logits are wanted.
    pub last: Tensor,
    pub logits: Tensor,
    /// `[max_num_logits]`: 0, 1, …: all rows, where wanted ones alone were computed.
    pub all_logits_rows: View<i32>,
}

/// The widths that a plan's layers need at most.
#[derive(Default)]
struct Widths {
    qkv: usize,
    queries: usize,
    heads: usize,
    gate_up: usize,
    gated: usize,
    router: usize,
    encoded_kv: usize,
}

impl Widths {
    fn of(plan: &ModelPlan) -> Self {
        let mut w = Self::default();
        for (_, mixer) in plan.mixers() {
            match mixer {
                MixerPlan::Attention(a) => {
                    w.qkv = w.qkv.max(a.qkv.out_features);
                    w.heads = w.heads.max(a.o.in_features);
                }
                MixerPlan::Mla(a) => {
                    let (down, queries) = a.widths();
                    w.qkv = w.qkv.max(down);
                    w.queries = w.queries.max(queries);
                    w.heads = w.heads.max(a.o.in_features);
                }
                MixerPlan::Cross(a) => {
                    w.qkv = w.qkv.max(a.q.out_features);
                    w.encoded_kv = w.encoded_kv.max(a.kv.out_features);
                    w.heads = w.heads.max(a.o.in_features);
                }
                MixerPlan::StateSpace(m) => {
                    w.qkv = w.qkv.max(m.in_proj.out_features);
                    w.heads = w.heads.max(m.inner());
                }
            }
        }
        plan.all_layers().filter_map(|l| l.feed_forward.as_ref()).for_each(|f| w.feed_forward(f));
        w
    }

    fn feed_forward(&mut self, plan: &FeedForwardPlan) {
        match plan {
            FeedForwardPlan::Gated { gate_up, down, .. } => {
                self.gate_up = self.gate_up.max(gate_up.out_features);
                self.gated = self.gated.max(down.in_features);
            }
            FeedForwardPlan::Plain { up, .. } => self.gated = self.gated.max(up.out_features),
            FeedForwardPlan::Experts(e) => {
                self.router = self.router.max(e.routing.experts);
                e.shared.iter().for_each(|f| self.feed_forward(f));
            }
        }
    }
}

impl Buffers {
    /// `coded`: some output projection takes codes.
    pub fn new(
        ops: &dyn Ops,
        plan: &ModelPlan,
        limits: StepLimits,
        coded: bool,
        dtype: DType,
    ) -> Result<Self, ModelError> {
        let zeros = |rows, width| Tensor::zeros(ops, dtype, &[rows, width]);
        let (n, h, w) = (limits.max_num_tokens, plan.hidden_size, Widths::of(plan));
        let beside = if plan.layers.iter().any(|l| l.mixers.len() > 1) { n } else { 0 };
        let per_layer = plan.per_layer_inputs.as_ref().map_or(0, |p| p.all());
        let encoded = if plan.encoder.is_some() { n } else { 0 };
        let logits = if plan.pooling.is_some() { 0 } else { limits.max_num_logits };
        Ok(Self {
            hidden: zeros(n, h)?,
            normed: zeros(n, h)?,
            mixed: zeros(n, h)?,
            beside: zeros(beside, h)?,
            qkv: zeros(n, w.qkv)?,
            queries: zeros(n, w.queries)?,
            heads: zeros(n, w.heads)?,
            codes: Tensor::zeros(ops, DType::F8E4M3, &[if coded { n } else { 0 }, w.heads])?,
            gate_up: zeros(n, w.gate_up)?,
            gated: zeros(n, w.gated)?,
            router: Tensor::zeros(ops, DType::F32, &[n, w.router])?,
            experts: plan.expert_limits().map(|l| ops.expert_buffers(l, n)).transpose()?,
            per_layer: zeros(n, per_layer)?,
            per_token: zeros(n, per_layer)?,
            encoded: zeros(encoded, h)?,
            encoded_kv: zeros(encoded, w.encoded_kv)?,
            last: zeros(limits.max_num_logits, h)?,
            logits: Tensor::zeros(ops, DType::F32, &[logits, plan.vocab_size])?,
            all_logits_rows: Persistent::new(ops, limits.max_num_logits)?.write(
                ops,
                limits.max_num_logits,
                |o| (0..).zip(o).for_each(|(i, o)| *o = i),
            ),
        })
    }

    pub fn bytes(&self) -> usize {
        let all = [
            &self.hidden,
            &self.normed,
            &self.mixed,
            &self.beside,
            &self.qkv,
            &self.queries,
            &self.heads,
            &self.codes,
            &self.gate_up,
            &self.gated,
            &self.router,
            &self.per_layer,
            &self.per_token,
            &self.encoded,
            &self.encoded_kv,
            &self.last,
            &self.logits,
        ];
        all.into_iter().map(Tensor::bytes).sum::<usize>() + self.experts.as_ref().map_or(0, |e| e.bytes())
    }
}
