//! What Hugging Face decoder configs have in common: sizes, activation, and the usual weight names.

use super::ConfigReader;
use crate::models::{
    ModelError,
    needs::MOST_LAYERS,
    plan::{
        AttentionPlan, FeedForwardPlan, LayerPlan, LinearPlan, MaskPlan, MixerPlan, ModelPlan, NormPlan,
        QkNormPlan,
    },
    rope::RopePlan,
};
use headway_tensor::Activation;

/// The sizes that every decoder config states.
#[derive(Clone)]
pub(super) struct Sizes {
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_size: usize,
    pub vocab: usize,
    pub max_positions: usize,
    pub eps: f32,
}

impl Sizes {
    pub(super) fn read(c: &ConfigReader<'_>, default_eps: f64) -> Result<Self, ModelError> {
        Self::of_layers(c, default_eps, c.usize("num_hidden_layers")?)
    }

    /// As [`Sizes::read`], where something else tells the number of layers.
    pub(super) fn of_layers(
        c: &ConfigReader<'_>,
        default_eps: f64,
        layers: usize,
    ) -> Result<Self, ModelError> {
        let (hidden, heads) = (c.usize("hidden_size")?, c.usize("num_attention_heads")?);
        let head_size = match c.opt_usize("head_dim")? {
            Some(d) => d,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                return Err(
                    c.error("num_attention_heads", format!("{heads} does not divide hidden_size {hidden}"))
                );
            }
        };
        let kv_heads = c.opt_usize("num_key_value_heads")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(c.error(
                "num_key_value_heads",
                format!("{kv_heads} does not divide the {heads} query heads"),
            ));
        }
        check_layers(c, layers)?;
        Ok(Self {
            hidden,
            intermediate: c.usize("intermediate_size")?,
            layers,
            heads,
            kv_heads,
            head_size,
            vocab: c.usize("vocab_size")?,
            max_positions: c.usize("max_position_embeddings")?,
            eps: c.opt_non_negative("rms_norm_eps")?.unwrap_or(default_eps) as f32,
        })
    }

    pub(super) fn default_scale(&self) -> f32 {
        (self.head_size as f64).powf(-0.5) as f32
    }
}

/// Refuses more layers than any model has.
pub(super) fn check_layers(c: &ConfigReader<'_>, layers: usize) -> Result<(), ModelError> {
    match layers > MOST_LAYERS {
        true => Err(c.error("num_hidden_layers", format!("is {layers}; at most {MOST_LAYERS} are expected"))),
        false => Ok(()),
    }
}

/// Weight names of one layer, under `model.layers.N`.
pub(super) struct Names(String);

impl Names {
    pub(super) fn layer(i: usize) -> Self {
        Self::under("model.layers", i)
    }

    /// Layer `i` of another list.
    pub(super) fn under(list: &str, i: usize) -> Self {
        Self(format!("{list}.{i}"))
    }

    /// A tensor that is no module's weight.
    pub(super) fn tensor(&self, name: &str) -> String {
        format!("{}.{name}", self.0)
    }

    pub(super) fn weight(&self, module: &str) -> String {
        format!("{}.{module}.weight", self.0)
    }

    pub(super) fn part(&self, module: &str, bias: bool, width: usize) -> (String, Option<String>, usize) {
        (self.weight(module), bias.then(|| format!("{}.{module}.bias", self.0)), width)
    }

    pub(super) fn norm(&self, module: &str, offset: f32) -> NormPlan {
        NormPlan { weight: self.weight(module), offset }
    }

    /// Separate `q_proj`, `k_proj`, `v_proj`.
    pub(super) fn qkv(&self, s: &Sizes, bias: bool) -> LinearPlan {
        self.qkv_of("self_attn", s, bias)
    }

    /// Separate `q_proj`, `k_proj`, `v_proj` of a module.
    pub(super) fn qkv_of(&self, module: &str, s: &Sizes, bias: bool) -> LinearPlan {
        let (q, kv) = (s.heads * s.head_size, s.kv_heads * s.head_size);
        let parts = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)];
        let parts = parts.map(|(m, width)| self.part(&format!("{module}.{m}"), bias, width));
        LinearPlan::stacked(parts, s.hidden)
    }

    /// One fused projection `module` with the output width of `qkv`.
    pub(super) fn fused_qkv(&self, module: &str, s: &Sizes) -> LinearPlan {
        LinearPlan::single(self.weight(module), None, s.hidden, self.qkv(s, false).out_features)
    }

    pub(super) fn o(&self, s: &Sizes, bias: bool) -> LinearPlan {
        LinearPlan::stacked([self.part("self_attn.o_proj", bias, s.hidden)], s.heads * s.head_size)
    }

    /// Separate `gate_proj` and `up_proj`, then `down_proj`.
    pub(super) fn gated(&self, s: &Sizes, activation: Activation, bias: bool) -> FeedForwardPlan {
        self.gated_at("mlp", s.hidden, s.intermediate, activation, bias)
    }

    /// [`Names::gated`] under another module, of another width.
    pub(super) fn gated_at(
        &self,
        module: &str,
        hidden: usize,
        intermediate: usize,
        activation: Activation,
        bias: bool,
    ) -> FeedForwardPlan {
        let part = |name: &str, width| self.part(&format!("{module}.{name}"), bias, width);
        FeedForwardPlan::Gated {
            gate_up: LinearPlan::stacked(["gate_proj", "up_proj"].map(|n| part(n, intermediate)), hidden),
            down: LinearPlan::stacked([part("down_proj", hidden)], intermediate),
            activation,
            gate_scale: 1.0,
        }
    }

    pub(super) fn fused_gated(&self, module: &str, s: &Sizes, activation: Activation) -> FeedForwardPlan {
        FeedForwardPlan::Gated {
            gate_up: LinearPlan::single(self.weight(module), None, s.hidden, 2 * s.intermediate),
            down: LinearPlan::stacked([self.part("mlp.down_proj", false, s.hidden)], s.intermediate),
            activation,
            gate_scale: 1.0,
        }
    }

    /// Norms of each query and key head.
    pub(super) fn qk_norm(&self, offset: f32, per_head: bool) -> QkNormPlan {
        let (q, k) = (self.norm("self_attn.q_norm", offset), self.norm("self_attn.k_norm", offset));
        QkNormPlan { q, k: Some(k), per_head }
    }

    /// A layer with norms before mixer and feed-forward, and none after.
    pub(super) fn pre_norm_layer(
        &self,
        attention: AttentionPlan,
        feed_forward: FeedForwardPlan,
    ) -> LayerPlan {
        LayerPlan {
            pre_mixer_norm: Some(self.norm("input_layernorm", 0.0)),
            post_mixer_norm: None,
            pre_ffn_norm: Some(self.norm("post_attention_layernorm", 0.0)),
            post_ffn_norm: None,
            mixers: vec![MixerPlan::Attention(attention)],
            feed_forward: Some(feed_forward),
            ..LayerPlan::default()
        }
    }

    /// Attention with separate projections and nothing special.
    pub(super) fn attention(&self, s: &Sizes, qkv_bias: bool, o_bias: bool) -> AttentionPlan {
        AttentionPlan {
            rope: Some(0),
            ..AttentionPlan::plain(
                (s.heads, s.kv_heads),
                s.head_size,
                self.qkv(s, qkv_bias),
                self.o(s, o_bias),
            )
        }
    }
}

/// The activation by its name in the config.
pub(super) fn activation(c: &ConfigReader<'_>) -> Result<Activation, ModelError> {
    let field = ["hidden_activation", "hidden_act"].into_iter().find(|f| c.get(f).is_some());
    match field.map_or(Ok(None), |f| c.text(f))? {
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        Some("gelu") => Ok(Activation::Gelu),
        other => Err(c.unsupported(
            format!("activation {}", other.unwrap_or("(none given)")),
            "supported: silu, gelu, gelu_pytorch_tanh",
        )),
    }
}

/// The model around its layers: embedding, final norm, head.
pub(super) fn model(
    c: &ConfigReader<'_>,
    s: &Sizes,
    ropes: Vec<RopePlan>,
    layers: Vec<LayerPlan>,
    tied_by_default: bool,
) -> Result<ModelPlan, ModelError> {
    let tied = match c.get("tie_word_embeddings") {
        None => tied_by_default,
        Some(_) => c.flag("tie_word_embeddings")?,
    };
    Ok(ModelPlan {
        architecture: c.architecture()?,
        hidden_size: s.hidden,
        vocab_size: s.vocab,
        max_position_embeddings: s.max_positions,
        norm_eps: s.eps,
        embedding_scale: 1.0,
        embedding: "model.embed_tokens.weight".into(),
        lm_head: (!tied).then(|| LinearPlan::single("lm_head.weight".into(), None, s.hidden, s.vocab)),
        positions: None,
        embedding_norm: None,
        final_norm: Some(NormPlan::plain("model.norm.weight")),
        pooling: None,
        logit_scale: 1.0,
        final_logit_soft_cap: None,
        per_layer_inputs: None,
        masks: MaskPlan::default(),
        ropes,
        layers,
        encoder: None,
        drafting_layers: c.count("num_nextn_predict_layers")?.unwrap_or(0),
    })
}
