//! Gemma 4, the dense language models: the last layers read the caches of earlier ones, layers that see all
//! tokens have heads of their own size, and every layer may get an input of its own from the tokens.

use super::{
    ConfigReader,
    hf::{Names, Sizes, activation, model},
};
use crate::models::{
    ModelError, ModelPlan,
    plan::{
        AttentionPlan, LayerPlan, LinearPlan, MixerPlan, NormPlan, PerLayerBlockPlan, PerLayerInputsPlan,
    },
    rope::RopePlan,
};
use headway_tensor::Activation;

/// Every so many layers one sees all tokens, where the config doesn't list them.
const PATTERN: usize = 6;

/// What the layers of one kind have in common.
struct Kind {
    sizes: Sizes,
    window: Option<usize>,
    rope: usize,
    /// Keys serve as values too.
    keys_are_values: bool,
}

/// The layers' kinds and the caches that they share.
struct Layers {
    sliding: Kind,
    full: Kind,
    is_full: Vec<bool>,
    /// From here on layers read caches of earlier ones.
    first_sharing: usize,
}

pub(super) fn gemma4(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    if c.flag("enable_moe_block")? {
        return Err(c.unsupported("enable_moe_block: Gemma 4 with experts", "the dense Gemma 4 models are"));
    }
    if c.get("use_bidirectional_attention").is_some_and(|v| v.as_str() != Some("vision")) {
        return Err(c.unsupported("use_bidirectional_attention for text", "only causal decoders are"));
    }
    let s = Sizes::read(c, 1e-6)?;
    let layers = Layers::read(c, &s)?;
    let (act, bias) = (activation(c)?, c.flag("attention_bias")?);
    let wide = c.flag("use_double_wide_mlp")?;
    let per_layer = c.count("hidden_size_per_layer_input")?.unwrap_or(256);
    let layer = |i: usize| -> Result<LayerPlan, ModelError> {
        let n = Names::layer(i);
        let intermediate = s.intermediate * if wide && i >= layers.first_sharing { 2 } else { 1 };
        Ok(LayerPlan {
            pre_mixer_norm: Some(n.norm("input_layernorm", 0.0)),
            post_mixer_norm: Some(n.norm("post_attention_layernorm", 0.0)),
            pre_ffn_norm: Some(n.norm("pre_feedforward_layernorm", 0.0)),
            post_ffn_norm: Some(n.norm("post_feedforward_layernorm", 0.0)),
            mixers: vec![MixerPlan::Attention(layers.attention(c, i, bias)?)],
            feed_forward: Some(n.gated_at("mlp", s.hidden, intermediate, act, false)),
            per_layer: (per_layer > 0).then(|| block(&n, s.hidden, per_layer, act)),
            scalar: Some(n.tensor("layer_scalar")),
            ..LayerPlan::default()
        })
    };
    let all = (0..s.layers).map(layer).collect::<Result<_, _>>()?;
    let mut plan = model(c, &s, ropes(c, &layers)?, all, true)?;
    plan.embedding_scale = (s.hidden as f64).sqrt() as f32;
    plan.final_logit_soft_cap = c.opt_cap("final_logit_softcapping")?;
    if per_layer > 0 {
        plan.per_layer_inputs = Some(inputs(c, &s, per_layer)?);
    }
    Ok(plan)
}

impl Layers {
    fn read(c: &ConfigReader<'_>, s: &Sizes) -> Result<Self, ModelError> {
        let is_full = match c.layer_types(s.layers)? {
            None => (0..s.layers).map(|i| (i + 1).is_multiple_of(PATTERN) || i + 1 == s.layers).collect(),
            Some(types) => types
                .iter()
                .map(|t| match t.as_str() {
                    "full_attention" => Ok(true),
                    "sliding_attention" => Ok(false),
                    other => Err(c.unsupported(
                        format!("layer type {other}"),
                        "supported: full_attention, sliding_attention",
                    )),
                })
                .collect::<Result<Vec<_>, _>>()?,
        };
        let shared = c.count("num_kv_shared_layers")?.unwrap_or(0);
        if shared >= s.layers {
            let why = format!("is {shared}; it must be below num_hidden_layers, {}", s.layers);
            return Err(c.error("num_kv_shared_layers", why));
        }
        let keys_are_values = c.flag("attention_k_eq_v")?;
        let global_kv = c.opt_usize("num_global_key_value_heads")?.filter(|_| keys_are_values);
        let full =
            Sizes { head_size: global_head_size(c)?, kv_heads: global_kv.unwrap_or(s.kv_heads), ..s.clone() };
        if !full.heads.is_multiple_of(full.kv_heads) {
            let why = format!("{} does not divide the {} query heads", full.kv_heads, full.heads);
            return Err(c.error("num_global_key_value_heads", why));
        }
        let window = Some(c.opt_usize("sliding_window")?.unwrap_or(512));
        Ok(Self {
            sliding: Kind { sizes: s.clone(), window, rope: 1, keys_are_values: false },
            full: Kind { sizes: full, window: None, rope: 0, keys_are_values },
            is_full,
            first_sharing: s.layers - shared,
        })
    }

    fn attention(&self, c: &ConfigReader<'_>, i: usize, bias: bool) -> Result<AttentionPlan, ModelError> {
        let (n, kind) = (Names::layer(i), if self.is_full[i] { &self.full } else { &self.sliding });
        let s = &kind.sizes;
        let mut plan = AttentionPlan {
            scale: 1.0,
            qk_norm: Some(n.qk_norm(0.0, true)),
            v_norm: true,
            rope: Some(kind.rope),
            sliding_window: kind.window,
            ..n.attention(s, bias, bias)
        };
        if kind.keys_are_values {
            plan.qkv.parts[2] = plan.qkv.parts[1].clone();
        }
        if i < self.first_sharing {
            return Ok(plan);
        }
        let owner = self.is_full[..self.first_sharing].iter().rposition(|full| *full == self.is_full[i]);
        let owner = owner.ok_or_else(|| {
            let kind = if self.is_full[i] { "full_attention" } else { "sliding_attention" };
            let first = self.first_sharing;
            let why = format!(
                "leaves layer {i} ({kind}) without a cache to read: none of the first {first} layers is of its kind"
            );
            c.error("num_kv_shared_layers", why)
        })?;
        // Layers have one mixer each.
        plan.shares_cache_of = Some(owner);
        plan.qkv = LinearPlan::stacked([n.part("self_attn.q_proj", bias, s.heads * s.head_size)], s.hidden);
        plan.qk_norm.iter_mut().for_each(|norm| norm.k = None);
        Ok(plan)
    }
}

/// Elements of a head of layers that see all tokens: of all in one field, or of each in `per_layer_config`
/// (as transformers writes it from 5.19 on).
fn global_head_size(c: &ConfigReader<'_>) -> Result<usize, ModelError> {
    let field = "per_layer_config";
    let Some(each) = c.get(field) else { return Ok(c.opt_usize("global_head_dim")?.unwrap_or(512)) };
    let sizes: Option<Vec<u64>> =
        each.as_object().and_then(|o| o.values().map(|l| l.get("head_dim")?.as_u64()).collect());
    match sizes.as_deref() {
        Some([first, rest @ ..]) if *first > 0 && rest.iter().all(|n| n == first) => Ok(*first as usize),
        _ => Err(c.error(field, "must give every full_attention layer the same head_dim, or be left out")),
    }
}

/// Of layers that see all tokens, then of the others.
fn ropes(c: &ConfigReader<'_>, layers: &Layers) -> Result<Vec<RopePlan>, ModelError> {
    let (full, sliding) = (layers.full.sizes.head_size, layers.sliding.sizes.head_size);
    if let Some(p) = c.get("rope_parameters") {
        for kind in ["full_attention", "sliding_attention"] {
            if !p.get(kind).is_some_and(|v| v.is_object()) {
                let why =
                    format!("has no object {kind}; give both kinds of layers theirs, or leave the field out");
                return Err(c.error("rope_parameters", why));
            }
        }
    }
    let full = match c.get("rope_parameters") {
        Some(_) => c.rope("full_attention", full, 1_000_000.0)?,
        None => c.proportional(1_000_000.0, full, 0.25, 1.0)?,
    };
    Ok(vec![full, c.rope("sliding_attention", sliding, 10000.0)?])
}

fn block(n: &Names, hidden: usize, width: usize, activation: Activation) -> PerLayerBlockPlan {
    PerLayerBlockPlan {
        gate: LinearPlan::stacked([n.part("per_layer_input_gate", false, width)], hidden),
        activation,
        projection: LinearPlan::stacked([n.part("per_layer_projection", false, hidden)], width),
        norm: n.norm("post_per_layer_input_norm", 0.0),
    }
}

fn inputs(c: &ConfigReader<'_>, s: &Sizes, width: usize) -> Result<PerLayerInputsPlan, ModelError> {
    let table = c.opt_usize("vocab_size_per_layer_input")?.unwrap_or(262_144);
    if table != s.vocab {
        return Err(c.error(
            "vocab_size_per_layer_input",
            format!("is {table}; tables of vocab_size, {}, rows are supported", s.vocab),
        ));
    }
    let projection = "model.per_layer_model_projection.weight".to_owned();
    Ok(PerLayerInputsPlan {
        layers: s.layers,
        width,
        table: "model.embed_tokens_per_layer.weight".into(),
        table_scale: (width as f64).sqrt() as f32,
        projection: LinearPlan::single(projection, None, s.hidden, s.layers * width),
        projection_scale: (s.hidden as f64).powf(-0.5) as f32,
        norm: NormPlan::plain("model.per_layer_projection_norm.weight"),
        scale: 0.5f32.sqrt(),
    })
}
