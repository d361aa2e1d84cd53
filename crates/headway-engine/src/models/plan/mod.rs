//! A model as data: per layer its norms, its mixer, its feed-forward, and the names of their weights.
//! It says nothing of devices, dtypes or batches.

mod causal;
mod embedding;
mod experts;
mod masks;
mod per_layer;

pub use causal::CausalLayers;
pub use embedding::{CrossPlan, EncoderPlan, LayerNormPlan, Pooling, PositionsPlan};
pub use experts::{ExpertWeights, ExpertsPlan, StackedPlan};
pub use masks::MaskPlan;
pub use per_layer::{PerLayerBlockPlan, PerLayerInputsPlan};

use super::rope::RopePlan;
use headway_attention::process::rules::AttnType;
use headway_tensor::{Activation, DType, ExpertLimits};

/// A norm's weight, and what is added to it (1 for checkpoints that hold w and compute 1 + w).
#[derive(Clone, Debug, PartialEq)]
pub struct NormPlan {
    /// Name of the weight tensor.
    pub weight: String,
    /// Added to every element.
    pub offset: f32,
}

/// A linear layer: one or more tensors stacked along the output, each with an optional bias.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearPlan {
    /// In the order of the output.
    pub parts: Vec<LinearPartPlan>,
    /// Width of the input.
    pub in_features: usize,
    /// Width of the output, over all parts.
    pub out_features: usize,
}

/// One tensor of a linear layer, with an optional bias.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearPartPlan {
    /// Name of the weight tensor.
    pub weight: String,
    /// Name of the bias tensor.
    pub bias: Option<String>,
    /// Width of its share of the output.
    pub out_features: usize,
}

/// Where queries and keys are normed.
#[derive(Clone, Debug, PartialEq)]
pub struct QkNormPlan {
    /// Of queries.
    pub q: NormPlan,
    /// Of keys; `None`: the layer has none of its own.
    pub k: Option<NormPlan>,
    /// Over each head by itself (Qwen3, Gemma3), or over the whole projection (OLMo2).
    pub per_head: bool,
}

/// A softmax-attention mixer.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionPlan {
    /// What attends to what.
    pub attn_type: AttnType,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_size: usize,
    /// Factor on q·k.
    pub scale: f32,
    /// Queries, keys, values, in that order of the output; queries alone where the cache is another layer's.
    pub qkv: LinearPlan,
    /// Output projection.
    pub o: LinearPlan,
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNormPlan>,
    /// Value heads are normed too, without a weight.
    pub v_norm: bool,
    /// Index into [`ModelPlan::ropes`]; `None`: heads are not rotated.
    pub rope: Option<usize>,
    /// Tokens that a query sees, with its own; `None`: all.
    pub sliding_window: Option<usize>,
    /// `cap · tanh(score / cap)`.
    pub logit_soft_cap: Option<f32>,
    /// Name of the tensor with a logit a query head that joins the softmax's denominator: `[num_heads]`.
    pub sinks: Option<String>,
    /// An earlier mixer, by its place in [`ModelPlan::mixers`], whose keys and values this layer reads instead of
    /// having its own.
    pub shares_cache_of: Option<usize>,
    /// Factor on the mixer's output.
    pub output_scale: f32,
}

impl AttentionPlan {
    /// Causal attention of a decoder without positions, norms or limits, scores scaled by the root of the head size.
    pub fn plain(
        (num_heads, num_kv_heads): (usize, usize),
        head_size: usize,
        qkv: LinearPlan,
        o: LinearPlan,
    ) -> Self {
        Self {
            attn_type: AttnType::Decoder,
            num_heads,
            num_kv_heads,
            head_size,
            scale: (head_size as f64).powf(-0.5) as f32,
            qkv,
            o,
            qk_norm: None,
            v_norm: false,
            rope: None,
            sliding_window: None,
            logit_soft_cap: None,
            sinks: None,
            shares_cache_of: None,
            output_scale: 1.0,
        }
    }
}

/// The norm of a state-space mixer, after its gate or before.
#[derive(Clone, Debug, PartialEq)]
pub struct GatedNormPlan {
    /// Over the whole width.
    pub norm: NormPlan,
    /// Equal parts of the width that are normed each by itself.
    pub groups: usize,
    /// The norm comes before the gate.
    pub before_gate: bool,
}

/// A Mamba-2 mixer (arXiv 2405.21060).
#[derive(Clone, Debug, PartialEq)]
pub struct StateSpacePlan {
    /// Heads.
    pub num_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Groups of heads that share B and C.
    pub groups: usize,
    /// Elements of the state for each element of a head.
    pub state_size: usize,
    /// Width of the convolution.
    pub conv_kernel: usize,
    /// Tokens in a chunk of the scan.
    pub chunk_size: usize,
    /// The state's element type; `None`: that of the activations.
    pub state_dtype: Option<DType>,
    /// Limits of dt after its softplus.
    pub time_step_limit: (f32, f32),
    /// Gate, x, B, C, dt, in that order of the output.
    pub in_proj: LinearPlan,
    /// Factors on these five parts.
    pub in_scales: [f32; 5],
    /// `[conv_dim, 1, conv_kernel]`.
    pub conv_weight: String,
    /// `[conv_dim]`.
    pub conv_bias: Option<String>,
    /// `[num_heads]`: the logarithm of the decay, which is −exp of it.
    pub a_log: String,
    /// `[num_heads]`.
    pub d: String,
    /// `[num_heads]`.
    pub dt_bias: String,
    /// `None`: the gate alone.
    pub norm: Option<GatedNormPlan>,
    /// Output projection.
    pub out_proj: LinearPlan,
    /// Factor on the mixer's output.
    pub output_scale: f32,
}

impl StateSpacePlan {
    /// Elements of a token between scan and output projection.
    pub fn inner(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Channels of the convolution.
    pub fn conv_dim(&self) -> usize {
        self.inner() + 2 * self.groups * self.state_size
    }
}

/// Where latent attention gets its queries from.
#[derive(Clone, Debug, PartialEq)]
pub enum MlaQueryPlan {
    /// From the layer's input; [`MlaPlan::down`] gives the queries themselves.
    Direct,
    /// From a compressed form, which [`MlaPlan::down`] gives.
    Compressed {
        /// Of the compressed form.
        norm: NormPlan,
        /// From it to the queries.
        up: LinearPlan,
    },
}

/// A mixer of multi-head latent attention.
#[derive(Clone, Debug, PartialEq)]
pub struct MlaPlan {
    /// Query heads.
    pub num_heads: usize,
    /// Elements of the latent.
    pub kv_lora_rank: usize,
    /// Elements of a query and key head that have no position.
    pub qk_nope_head_dim: usize,
    /// Elements of a query and key head that are rotated; the heads share those of the key.
    pub qk_rope_head_dim: usize,
    /// Elements of a value head.
    pub v_head_dim: usize,
    /// Factor on q·k.
    pub scale: f32,
    /// Queries or their compressed form, then the latent and the rotated part of the key.
    pub down: LinearPlan,
    /// Queries.
    pub q: MlaQueryPlan,
    /// Norm of the latent.
    pub kv_norm: NormPlan,
    /// From the latent to keys and values: of each head first the key, then the value.
    pub kv_b: LinearPlan,
    /// Output projection.
    pub o: LinearPlan,
    /// Index into [`ModelPlan::ropes`].
    pub rope: usize,
}

impl MlaPlan {
    /// Elements of the queries of all heads.
    pub fn queries(&self) -> usize {
        self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
    }

    /// Elements of a token's first projection, and of queries that come from it (0 where they are in it).
    pub fn widths(&self) -> (usize, usize) {
        match &self.q {
            MlaQueryPlan::Direct => (self.down.out_features, 0),
            MlaQueryPlan::Compressed { .. } => (self.down.out_features, self.queries()),
        }
    }
}

/// What mixes tokens in a layer.
#[derive(Clone, Debug, PartialEq)]
pub enum MixerPlan {
    /// Softmax attention.
    Attention(AttentionPlan),
    /// Multi-head latent attention.
    Mla(MlaPlan),
    /// A Mamba-2 state.
    StateSpace(StateSpacePlan),
    /// Attention to an encoder's output.
    Cross(CrossPlan),
}

/// What follows the mixer.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedForwardPlan {
    /// `down(activation(gate(x)) · up(x))`.
    Gated {
        /// Gate and up, in that order of the output.
        gate_up: LinearPlan,
        /// Down.
        down: LinearPlan,
        /// Between them.
        activation: Activation,
        /// Factor on the gate, before its activation.
        gate_scale: f32,
    },
    /// `down(activation(up(x)))`.
    Plain {
        /// Up.
        up: LinearPlan,
        /// Down.
        down: LinearPlan,
        /// Between them.
        activation: Activation,
    },
    /// Some of many feed-forwards, chosen for each token.
    Experts(ExpertsPlan),
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerPlan {
    /// Before the mixer; `None`: the mixer reads the residual stream itself.
    pub pre_mixer_norm: Option<NormPlan>,
    /// On the mixer's output, before it joins the residual stream.
    pub post_mixer_norm: Option<NormPlan>,
    /// Before the feed-forward.
    pub pre_ffn_norm: Option<NormPlan>,
    /// On the feed-forward's output.
    pub post_ffn_norm: Option<NormPlan>,
    /// Side by side on the same input, their outputs added; a layer may have none.
    pub mixers: Vec<MixerPlan>,
    /// The feed-forward, where the layer has one.
    pub feed_forward: Option<FeedForwardPlan>,
    /// Factor on the feed-forward's output.
    pub feed_forward_scale: f32,
    /// What follows the feed-forward where the layer has an input of its own.
    pub per_layer: Option<PerLayerBlockPlan>,
    /// On the stream itself, once the mixers' output has joined it.
    pub after_mixer_norm: Option<LayerNormPlan>,
    /// On the stream itself, once the feed-forward's output has joined it.
    pub after_ffn_norm: Option<LayerNormPlan>,
    /// Name of the tensor `[1]` with a factor on the stream that leaves the layer.
    pub scalar: Option<String>,
    /// The rest of the layer before, whose blocks follow one another: not a layer by itself.
    pub continues: bool,
}

impl Default for LayerPlan {
    /// Neither norms nor blocks.
    fn default() -> Self {
        Self {
            pre_mixer_norm: None,
            post_mixer_norm: None,
            pre_ffn_norm: None,
            post_ffn_norm: None,
            mixers: vec![],
            feed_forward: None,
            feed_forward_scale: 1.0,
            per_layer: None,
            after_mixer_norm: None,
            after_ffn_norm: None,
            scalar: None,
            continues: false,
        }
    }
}

/// A whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelPlan {
    /// As the config names it.
    pub architecture: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Most positions that the model was made for.
    pub max_position_embeddings: usize,
    /// Of every norm.
    pub norm_eps: f32,
    /// Factor on the embedding.
    pub embedding_scale: f32,
    /// The embedding table.
    pub embedding: String,
    /// Added to the embedding.
    pub positions: Option<PositionsPlan>,
    /// On the embedding, positions included.
    pub embedding_norm: Option<LayerNormPlan>,
    /// The head; `None`: the embedding table.
    pub lm_head: Option<LinearPlan>,
    /// Before the head.
    pub final_norm: Option<NormPlan>,
    /// How an encoder's hidden states become a vector; `None`: the model generates.
    pub pooling: Option<Pooling>,
    /// Factor on the logits, before the cap.
    pub logit_scale: f32,
    /// `cap · tanh(logit / cap)`.
    pub final_logit_soft_cap: Option<f32>,
    /// What is made of the tokens for every layer.
    pub per_layer_inputs: Option<PerLayerInputsPlan>,
    /// What attention sees besides causality and windows.
    pub masks: MaskPlan,
    /// The rotary embeddings that layers refer to.
    pub ropes: Vec<RopePlan>,
    /// The layers.
    pub layers: Vec<LayerPlan>,
    /// What the decoder attends to beside its own tokens.
    pub encoder: Option<Box<EncoderPlan>>,
    /// Layers that the files may have after these, which draft tokens (multi-token prediction) and are not run.
    pub drafting_layers: usize,
}

impl ModelPlan {
    /// Every mixer with the index of its layer, an encoder's first. A mixer's place here is its
    /// [`AttnLayer`](headway_attention::AttnLayer).
    pub fn mixers(&self) -> impl Iterator<Item = (usize, &MixerPlan)> {
        let encoder = self.encoder.iter().flat_map(|e| e.layers.iter().enumerate());
        let parts = self.layers.iter().scan(0, |seen, l| {
            *seen += usize::from(!l.continues);
            Some((seen.saturating_sub(1), l))
        });
        encoder.chain(parts).flat_map(|(i, l)| l.mixers.iter().map(move |m| (i, m)))
    }

    /// Layers of the decoder.
    pub fn num_layers(&self) -> usize {
        self.layers.iter().filter(|l| !l.continues).count()
    }

    /// The layers of encoder and decoder.
    pub(in crate::models) fn all_layers(&self) -> impl Iterator<Item = &LayerPlan> {
        self.encoder.iter().flat_map(|e| &e.layers).chain(&self.layers)
    }

    /// The sizes of the experts: the largest of all layers; `None` where no layer has any.
    pub fn expert_limits(&self) -> Option<ExpertLimits> {
        self.experts().map(|e| e.limits()).reduce(ExpertLimits::max)
    }

    /// Every layer's mixture of experts.
    pub fn experts(&self) -> impl Iterator<Item = &ExpertsPlan> {
        self.layers.iter().filter_map(|l| match &l.feed_forward {
            Some(FeedForwardPlan::Experts(e)) => Some(e),
            _ => None,
        })
    }

    /// Elements of activations that a token of a step takes, without the experts' own rows
    /// ([`ExpertLimits::buffer_bytes`]).
    pub fn activation_width(&self) -> usize {
        let mixer = self.mixers().map(|(_, m)| m.activation_width()).max().unwrap_or(0);
        let feed_forward = self.all_layers().filter_map(|l| l.feed_forward.as_ref());
        let feed_forward = feed_forward.map(FeedForwardPlan::activation_width).max().unwrap_or(0);
        let per_layer = self.per_layer_inputs.as_ref().map_or(0, |p| p.all().saturating_mul(2));
        let blocks = mixer.saturating_add(feed_forward).saturating_add(per_layer);
        let streams = if self.encoder.is_some() { 4 } else { 3 };
        self.hidden_size.saturating_mul(streams).saturating_add(blocks)
    }
}

impl MixerPlan {
    /// Elements that a token takes between the mixer's input and its output.
    pub fn activation_width(&self) -> usize {
        match self {
            Self::Attention(a) => a.qkv.out_features.saturating_add(a.o.in_features),
            Self::Mla(a) => {
                let (down, queries) = a.widths();
                down.saturating_add(queries).saturating_add(a.o.in_features)
            }
            Self::Cross(a) => {
                a.q.out_features.saturating_add(a.kv.out_features).saturating_add(a.o.in_features)
            }
            // The kernel keeps the convolution's output too.
            Self::StateSpace(m) => {
                m.in_proj.out_features.saturating_add(m.inner()).saturating_add(m.conv_dim())
            }
        }
    }
}

impl FeedForwardPlan {
    /// Elements that a token takes between the feed-forward's input and its output.
    pub fn activation_width(&self) -> usize {
        match self {
            Self::Gated { gate_up, down, .. } => gate_up.out_features.saturating_add(down.in_features),
            Self::Experts(e) => {
                let shared = e.shared.as_ref().map_or(0, |s| s.activation_width());
                shared.saturating_add(e.routing.experts)
            }
            Self::Plain { up, .. } => up.out_features,
        }
    }
}

impl LinearPlan {
    /// One tensor with an optional bias.
    pub fn single(weight: String, bias: Option<String>, in_features: usize, out_features: usize) -> Self {
        Self { parts: vec![LinearPartPlan { weight, bias, out_features }], in_features, out_features }
    }

    /// Several tensors, `(weight, bias, width of the output)` each.
    pub fn stacked(
        parts: impl IntoIterator<Item = (String, Option<String>, usize)>,
        in_features: usize,
    ) -> Self {
        let part = |(weight, bias, out_features)| LinearPartPlan { weight, bias, out_features };
        let parts: Vec<_> = parts.into_iter().map(part).collect();
        let out_features = parts.iter().map(|p| p.out_features).sum();
        Self { parts, in_features, out_features }
    }
}

impl NormPlan {
    /// A norm whose tensor holds the factor itself.
    pub fn plain(weight: impl Into<String>) -> Self {
        Self { weight: weight.into(), offset: 0.0 }
    }
}
