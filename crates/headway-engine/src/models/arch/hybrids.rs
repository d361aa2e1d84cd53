//! Translators of models with Mamba-2 mixers: alone, among attention layers, or beside attention in one
//! layer. One function an architecture, as in [`super::families`].

use super::{
    ConfigReader,
    experts::GraniteExperts,
    hf::{Names, Sizes, activation, check_layers, model},
    state_space::{BAMBA, Fields, MixerSizes, NormOrder, flag_or},
};
use crate::models::{
    ModelError, ModelPlan,
    plan::{AttentionPlan, FeedForwardPlan, LayerPlan, LinearPlan, MixerPlan, NormPlan},
};
use headway_tensor::Activation;

/// Positions of models that have no limit of their own: a state has no last position.
const ENDLESS: usize = 1 << 20;

/// Which layers attend: by their types under one of these names.
fn attends(c: &ConfigReader<'_>, kinds: &[String]) -> Result<Vec<bool>, ModelError> {
    let attends = |kind: &String| match kind.as_str() {
        "attention" | "full_attention" => Ok(true),
        "mamba" | "mamba2" | "linear_attention" => Ok(false),
        other => Err(c.unsupported(format!("layer type {other}"), "supported: attention, mamba")),
    };
    kinds.iter().map(attends).collect()
}

fn factor(c: &ConfigReader<'_>, field: &str) -> Result<f32, ModelError> {
    Ok(c.opt_f64(field)?.unwrap_or(1.0) as f32)
}

/// Factors, `N` of them; ones where the field isn't there.
fn factors<const N: usize>(c: &ConfigReader<'_>, field: &str) -> Result<[f32; N], ModelError> {
    let Some(v) = c.get(field) else { return Ok([1.0; N]) };
    let list: Option<Vec<f32>> =
        v.as_array().and_then(|a| a.iter().map(|x| x.as_f64().map(|x| x as f32)).collect());
    list.and_then(|l| l.try_into().ok())
        .ok_or_else(|| c.error(field, format!("is {v}; {N} numbers are needed")))
}

/// Mamba-2 mixers and nothing else (arXiv 2405.21060).
pub(super) fn mamba2(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    const FIELDS: Fields = Fields {
        heads: "num_heads",
        head_dim: "head_dim",
        groups: "n_groups",
        state: "state_size",
        conv: "conv_kernel",
        chunk: "chunk_size",
        conv_bias: "use_conv_bias",
        proj_bias: "use_bias",
        expand: Some("expand"),
        inner: None,
        activation: Some("hidden_act"),
    };
    let layers = c.usize("num_hidden_layers")?;
    check_layers(c, layers)?;
    let s = Sizes {
        hidden: c.usize("hidden_size")?,
        intermediate: 0,
        layers,
        heads: 0,
        kv_heads: 0,
        head_size: 0,
        vocab: c.usize("vocab_size")?,
        max_positions: c.opt_usize("max_position_embeddings")?.unwrap_or(ENDLESS),
        eps: c.opt_non_negative("layer_norm_epsilon")?.unwrap_or(1e-5) as f32,
    };
    let mixer = MixerSizes::read(c, &FIELDS, s.hidden)?;
    let layer = |i| {
        let n = Names::under("backbone.layers", i);
        LayerPlan {
            pre_mixer_norm: Some(n.norm("norm", 0.0)),
            mixers: vec![MixerPlan::StateSpace(mixer.plan(&n, "mixer", &s, Some(NormOrder::AfterGate)))],
            ..LayerPlan::default()
        }
    };
    let layers = (0..s.layers).map(layer).collect();
    Ok(backbone(model(c, &s, vec![], layers, false)?))
}

/// The names of models whose list of layers is a `backbone`.
fn backbone(plan: ModelPlan) -> ModelPlan {
    ModelPlan {
        embedding: "backbone.embeddings.weight".into(),
        final_norm: Some(NormPlan::plain("backbone.norm_f.weight")),
        ..plan
    }
}

/// Attention in a few layers, half of each head rotated.
pub(super) fn bamba(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    let s = Sizes::read(c, 1e-5)?;
    let (act, bias, mlp_bias) = (activation(c)?, c.flag("attention_bias")?, c.flag("mlp_bias")?);
    let attends = bamba_attends(c, &s)?;
    let mixer = MixerSizes::read(c, &BAMBA, s.hidden)?;
    let mut rope = c.rope("full_attention", s.head_size, 10000.0)?;
    let says = |v: Option<&serde_json::Value>| v.is_some_and(|v| v.get("partial_rotary_factor").is_some());
    if c.get("partial_rotary_factor").is_none() && !says(c.get("rope_parameters")) {
        rope.rotary_dim = s.head_size / 2;
    }
    let layer = |i: usize| {
        let n = Names::layer(i);
        let mixer = match attends[i] {
            true => MixerPlan::Attention(n.attention(&s, bias, bias)),
            false => MixerPlan::StateSpace(mixer.plan(&n, "mamba", &s, Some(NormOrder::AfterGate))),
        };
        LayerPlan {
            pre_mixer_norm: Some(n.norm("input_layernorm", 0.0)),
            pre_ffn_norm: Some(n.norm("pre_ff_layernorm", 0.0)),
            mixers: vec![mixer],
            feed_forward: Some(n.gated_at("feed_forward", s.hidden, s.intermediate, act, mlp_bias)),
            ..LayerPlan::default()
        }
    };
    let layers = (0..s.layers).map(layer).collect();
    let plan = model(c, &s, vec![rope], layers, false)?;
    Ok(ModelPlan { final_norm: Some(NormPlan::plain("model.final_layernorm.weight")), ..plan })
}

/// Which layers of Bamba attend: by their types, or by a list of numbers.
fn bamba_attends(c: &ConfigReader<'_>, s: &Sizes) -> Result<Vec<bool>, ModelError> {
    let field = "attn_layer_indices";
    let list = c.indices(field)?;
    if let Some(i) = list.iter().find(|i| **i >= s.layers) {
        return Err(c.error(field, format!("names layer {i} of {} layers, numbered from 0", s.layers)));
    }
    let by_number: Vec<bool> = (0..s.layers).map(|i| list.contains(&i)).collect();
    let Some(kinds) = c.layer_types(s.layers)? else { return Ok(by_number) };
    let by_type = attends(c, &kinds)?;
    if c.get(field).is_some() && by_type != by_number {
        return Err(c.error(field, "contradicts layer_types; correct one of them, or leave it out"));
    }
    Ok(by_type)
}

/// Granite 4: factors on embedding, scores, residual branches and logits; attention without positions.
pub(super) fn granite_hybrid(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    let s = Sizes::read(c, 1e-6)?;
    let bias = c.flag("attention_bias")?;
    let kinds = c.layer_types(s.layers)?.ok_or_else(|| c.error("layer_types", "is missing"))?;
    let attends = attends(c, &kinds)?;
    let mixer = MixerSizes::read(c, &BAMBA, s.hidden)?;
    let experts = GraniteExperts::read(c)?;
    let rotates = match c.text("position_embedding_type")? {
        Some("rope") => true,
        None | Some("nope") => false,
        Some(other) => {
            let what = format!("position_embedding_type {other}");
            return Err(c.unsupported(what, "supported: rope, nope"));
        }
    };
    let ropes = if rotates { vec![c.rope("full_attention", s.head_size, 10000.0)?] } else { vec![] };
    let (scale, branch) = (c.opt_f64("attention_multiplier")?, factor(c, "residual_multiplier")?);
    let layer = |i: usize| {
        let n = Names::layer(i);
        let mixer = match attends[i] {
            true => MixerPlan::Attention(AttentionPlan {
                scale: scale.map_or(s.default_scale(), |x| x as f32),
                rope: rotates.then_some(0),
                output_scale: branch,
                ..n.attention(&s, bias, bias)
            }),
            false => MixerPlan::StateSpace(crate::models::plan::StateSpacePlan {
                output_scale: branch,
                ..mixer.plan(&n, "mamba", &s, Some(NormOrder::AfterGate))
            }),
        };
        LayerPlan {
            pre_mixer_norm: Some(n.norm("input_layernorm", 0.0)),
            pre_ffn_norm: Some(n.norm("post_attention_layernorm", 0.0)),
            mixers: vec![mixer],
            feed_forward: Some(experts.layer(&n, &s)),
            feed_forward_scale: branch,
            ..LayerPlan::default()
        }
    };
    let layers = (0..s.layers).map(layer).collect();
    let plan = model(c, &s, ropes, layers, false)?;
    let logits = factor(c, "logits_scaling")?;
    if logits == 0.0 {
        return Err(c.error("logits_scaling", "is 0; it divides the logits"));
    }
    Ok(ModelPlan { embedding_scale: factor(c, "embedding_multiplier")?, logit_scale: 1.0 / logits, ..plan })
}

/// Nemotron-H: each layer is one block, a state, attention without positions or a feed-forward of two
/// matrices (arXiv 2504.03624).
pub(super) fn nemotron_h(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    const FIELDS: Fields = Fields {
        heads: "mamba_num_heads",
        head_dim: "mamba_head_dim",
        groups: "n_groups",
        state: "ssm_state_size",
        conv: "conv_kernel",
        chunk: "chunk_size",
        conv_bias: "use_conv_bias",
        proj_bias: "use_bias",
        expand: None,
        inner: None,
        activation: Some("mamba_hidden_act"),
    };
    let blocks = nemotron_blocks(c)?;
    if c.opt_usize("num_hidden_layers")?.is_some_and(|n| n != blocks.len()) {
        let why = format!("is not the {} layers that the model's list of layers has", blocks.len());
        return Err(c.error("num_hidden_layers", why));
    }
    let mut s = Sizes::of_layers(c, 1e-5, blocks.len())?;
    s.eps = c.opt_non_negative("layer_norm_epsilon")?.unwrap_or(1e-5) as f32;
    if let Some(size) = c.opt_usize("attention_head_dim")? {
        s.head_size = size;
    }
    let act = match c.text("mlp_hidden_act")?.unwrap_or("relu2") {
        "relu2" => Activation::Relu2,
        "silu" => Activation::Silu,
        "gelu" => Activation::Gelu,
        other => return Err(c.unsupported(format!("activation {other}"), "supported: relu2, silu, gelu")),
    };
    let (bias, mlp_bias) = (c.flag("attention_bias")?, c.flag("mlp_bias")?);
    let mixer = match blocks.contains(&Block::State) {
        true => Some(MixerSizes::read(c, &FIELDS, s.hidden)?),
        false => None,
    };
    let layer = |(i, block): (usize, &Block)| {
        let n = Names::under("backbone.layers", i);
        let norm = Some(n.norm("norm", 0.0));
        let mixer = match (block, &mixer) {
            (Block::State, Some(m)) => {
                MixerPlan::StateSpace(m.plan(&n, "mixer", &s, Some(NormOrder::AfterGate)))
            }
            (Block::Attention, _) => MixerPlan::Attention(AttentionPlan {
                qkv: n.qkv_of("mixer", &s, bias),
                o: LinearPlan::stacked([n.part("mixer.o_proj", bias, s.hidden)], s.heads * s.head_size),
                rope: None,
                ..n.attention(&s, bias, bias)
            }),
            _ => {
                let part = |m: &str, width| [n.part(&format!("mixer.{m}"), mlp_bias, width)];
                return LayerPlan {
                    pre_ffn_norm: norm,
                    feed_forward: Some(FeedForwardPlan::Plain {
                        up: LinearPlan::stacked(part("up_proj", s.intermediate), s.hidden),
                        down: LinearPlan::stacked(part("down_proj", s.hidden), s.intermediate),
                        activation: act,
                    }),
                    ..LayerPlan::default()
                };
            }
        };
        LayerPlan { pre_mixer_norm: norm, mixers: vec![mixer], ..LayerPlan::default() }
    };
    let layers = blocks.iter().enumerate().map(layer).collect();
    Ok(backbone(model(c, &s, vec![], layers, false)?))
}

/// What a layer of Nemotron-H is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    State,
    Attention,
    FeedForward,
}

fn nemotron_blocks(c: &ConfigReader<'_>) -> Result<Vec<Block>, ModelError> {
    let field = "layers_block_type";
    if let Some(pattern) = c.text("hybrid_override_pattern")? {
        let block = |letter| match letter {
            'M' => Ok(Block::State),
            '*' => Ok(Block::Attention),
            '-' => Ok(Block::FeedForward),
            'E' => Err(no_experts(c)),
            other => {
                Err(c.error("hybrid_override_pattern", format!("has the letter {other}; known: M, *, -, E")))
            }
        };
        let blocks = pattern.chars().map(block).collect::<Result<Vec<_>, _>>()?;
        if c.get(field).is_some() && listed_blocks(c, field)? != blocks {
            let why = "contradicts hybrid_override_pattern; correct one of them, or leave it out";
            return Err(c.error(field, why));
        }
        return Ok(blocks);
    }
    if c.get(field).is_none() {
        let why = format!("is missing, and so is {field}: one must list the layers");
        return Err(c.error("hybrid_override_pattern", why));
    }
    listed_blocks(c, field)
}

fn no_experts(c: &ConfigReader<'_>) -> ModelError {
    c.unsupported("layers of experts", "models of this family without experts are")
}

fn listed_blocks(c: &ConfigReader<'_>, field: &str) -> Result<Vec<Block>, ModelError> {
    let list = c.get(field).and_then(|v| v.as_array());
    let list = list.ok_or_else(|| c.error(field, "is not a list of strings"))?;
    let block = |v: &serde_json::Value| match v.as_str() {
        Some("mamba" | "linear_attention") => Ok(Block::State),
        Some("attention" | "full_attention") => Ok(Block::Attention),
        Some("mlp") => Ok(Block::FeedForward),
        Some("moe") => Err(no_experts(c)),
        _ => Err(c.error(field, format!("has {v}; known: linear_attention, full_attention, mlp, moe"))),
    };
    list.iter().map(block).collect()
}

/// Falcon-H1: a state and attention side by side in every layer, and a factor on nearly everything.
pub(super) fn falcon_h1(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    let s = Sizes::read(c, 1e-5)?;
    let (act, bias, mlp_bias) = (activation(c)?, c.flag("attention_bias")?, c.flag("mlp_bias")?);
    let mixer = MixerSizes::read(c, &Fields { inner: Some("mamba_d_ssm"), ..BAMBA }, s.hidden)?;
    let rope = c.rope("full_attention", s.head_size, 100_000.0)?;
    let (into_ssm, into_attention) = (factor(c, "ssm_in_multiplier")?, factor(c, "attention_in_multiplier")?);
    // A factor on the input of a projection is one on its output, unless a bias comes between.
    for (name, factor, bias) in
        [("ssm_in_multiplier", into_ssm, mixer.proj_bias), ("attention_in_multiplier", into_attention, bias)]
    {
        if bias && factor != 1.0 {
            return Err(c.unsupported(
                format!("{name} {factor} with a bias on the projections"),
                "one of the two must go: no published model has both",
            ));
        }
    }
    let norm = flag_or(c, "mamba_rms_norm", false)?;
    let before_gate = flag_or(c, "mamba_norm_before_gate", true)?;
    let norm = norm.then_some(if before_gate { NormOrder::BeforeGate } else { NormOrder::AfterGate });
    let in_scales = factors::<5>(c, "ssm_multipliers")?.map(|x| x * into_ssm);
    let [gate_scale, down_scale] = factors(c, "mlp_multipliers")?;
    let (ssm_out, attention_out) = (factor(c, "ssm_out_multiplier")?, factor(c, "attention_out_multiplier")?);
    let key = factor(c, "key_multiplier")?;
    let layer = |i| {
        let n = Names::layer(i);
        let mut feed_forward = n.gated_at("feed_forward", s.hidden, s.intermediate, act, mlp_bias);
        if let FeedForwardPlan::Gated { gate_scale: scale, .. } = &mut feed_forward {
            *scale = gate_scale;
        }
        LayerPlan {
            pre_mixer_norm: Some(n.norm("input_layernorm", 0.0)),
            pre_ffn_norm: Some(n.norm("pre_ff_layernorm", 0.0)),
            mixers: vec![
                MixerPlan::StateSpace(crate::models::plan::StateSpacePlan {
                    in_scales,
                    output_scale: ssm_out,
                    ..mixer.plan(&n, "mamba", &s, norm)
                }),
                // Scores are linear in queries and keys, and the output is in values.
                MixerPlan::Attention(AttentionPlan {
                    scale: s.default_scale() * into_attention * into_attention * key,
                    output_scale: attention_out * into_attention,
                    ..n.attention(&s, bias, bias)
                }),
            ],
            feed_forward: Some(feed_forward),
            feed_forward_scale: down_scale,
            ..LayerPlan::default()
        }
    };
    let layers = (0..s.layers).map(layer).collect();
    let plan = model(c, &s, vec![rope], layers, false)?;
    Ok(ModelPlan {
        embedding_scale: factor(c, "embedding_multiplier")?,
        logit_scale: factor(c, "lm_head_multiplier")?,
        final_norm: Some(NormPlan::plain("model.final_layernorm.weight")),
        ..plan
    })
}

#[cfg(test)]
mod tests;
