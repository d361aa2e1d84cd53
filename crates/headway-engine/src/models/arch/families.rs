//! Translators of Hugging Face configs, one function an architecture: what each has that the usual
//! decoder ([`super::hf`]) has not.

use super::{
    ConfigReader,
    experts::{GptOssExperts, QwenExperts},
    hf::{Names, Sizes, activation, model},
};
use crate::models::{
    ModelError, ModelPlan,
    plan::{AttentionPlan, FeedForwardPlan, LayerPlan, MixerPlan},
};

/// Layers by index, each from `layer`.
fn layers<F>(s: &Sizes, layer: F) -> Result<Vec<LayerPlan>, ModelError>
where
    F: Fn(usize, &Names) -> Result<LayerPlan, ModelError>,
{
    (0..s.layers).map(|i| layer(i, &Names::layer(i))).collect()
}

/// Pre-norm, GQA, gated SiLU; optional biases (arXiv 2302.13971, 2407.21783).
pub(super) fn llama(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    let s = Sizes::read(c, 1e-6)?;
    let (act, bias, mlp_bias) = (activation(c)?, c.flag("attention_bias")?, c.flag("mlp_bias")?);
    let rope = c.rope("full_attention", s.head_size, 10000.0)?;
    let layers =
        layers(&s, |_, n| Ok(n.pre_norm_layer(n.attention(&s, bias, bias), n.gated(&s, act, mlp_bias))))?;
    model(c, &s, vec![rope], layers, false)
}

/// Llama's layers with one sliding window for all (arXiv 2310.06825).
pub(super) fn mistral(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    let s = Sizes::read(c, 1e-6)?;
    let (act, window) = (activation(c)?, c.opt_usize("sliding_window")?);
    let rope = c.rope("full_attention", s.head_size, 10000.0)?;
    let layers = layers(&s, |_, n| {
        let attention = AttentionPlan { sliding_window: window, ..n.attention(&s, false, false) };
        Ok(n.pre_norm_layer(attention, n.gated(&s, act, false)))
    })?;
    model(c, &s, vec![rope], layers, false)
}

/// The windows of Qwen's layers: by `layer_types`, or from `max_window_layers` on where sliding windows
/// are switched on.
fn qwen_windows(c: &ConfigReader<'_>, s: &Sizes) -> Result<Vec<Option<usize>>, ModelError> {
    let window = if c.flag("use_sliding_window")? { c.opt_usize("sliding_window")? } else { None };
    let first = c.opt_usize("max_window_layers")?.unwrap_or(28);
    let types = c.layer_types(s.layers)?;
    (0..s.layers)
        .map(|i| match &types {
            None => Ok(window.filter(|_| i >= first)),
            Some(t) => layer_window(c, &t[i], window),
        })
        .collect()
}

/// The window of a layer of a named type.
fn layer_window(
    c: &ConfigReader<'_>,
    kind: &str,
    window: Option<usize>,
) -> Result<Option<usize>, ModelError> {
    match kind {
        "full_attention" => Ok(None),
        "sliding_attention" if window.is_some() => Ok(window),
        "sliding_attention" => {
            Err(c.error("sliding_window", "is missing, but layer_types has sliding layers"))
        }
        other => {
            Err(c.unsupported(format!("layer type {other}"), "supported: full_attention, sliding_attention"))
        }
    }
}

/// Llama's layers with biases on q, k and v (arXiv 2407.10671).
pub(super) fn qwen2(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    let s = Sizes::read(c, 1e-6)?;
    let (act, windows) = (activation(c)?, qwen_windows(c, &s)?);
    let rope = c.rope("full_attention", s.head_size, 10000.0)?;
    let layers = layers(&s, |i, n| {
        let attention = AttentionPlan { sliding_window: windows[i], ..n.attention(&s, true, false) };
        Ok(n.pre_norm_layer(attention, n.gated(&s, act, false)))
    })?;
    model(c, &s, vec![rope], layers, false)
}

/// Llama's layers with a norm on every query and key head (arXiv 2505.09388).
pub(super) fn qwen3(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    let act = activation(c)?;
    qwen3_with(c, |_, n, s| n.gated(s, act, false))
}

/// Qwen3 with a mixture of experts (arXiv 2505.09388).
pub(super) fn qwen3_moe(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    let experts = QwenExperts::read(c)?;
    qwen3_with(c, |i, n, s| experts.layer(i, n, s))
}

fn qwen3_with(
    c: &ConfigReader<'_>,
    feed_forward: impl Fn(usize, &Names, &Sizes) -> FeedForwardPlan,
) -> Result<ModelPlan, ModelError> {
    let s = Sizes::read(c, 1e-6)?;
    let (bias, windows) = (c.flag("attention_bias")?, qwen_windows(c, &s)?);
    let rope = c.rope("full_attention", s.head_size, 10000.0)?;
    let layers = layers(&s, |i, n| {
        let attention = AttentionPlan {
            qk_norm: Some(n.qk_norm(0.0, true)),
            sliding_window: windows[i],
            ..n.attention(&s, bias, bias)
        };
        Ok(n.pre_norm_layer(attention, feed_forward(i, n, &s)))
    })?;
    model(c, &s, vec![rope], layers, false)
}

/// Windows on every other layer, sinks, biases, and experts in every layer (arXiv 2508.10925).
pub(super) fn gpt_oss(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    let (s, experts) = (Sizes::read(c, 1e-5)?, GptOssExperts::read(c)?);
    let bias = c.get("attention_bias").is_none() || c.flag("attention_bias")?;
    let window = Some(c.opt_usize("sliding_window")?.unwrap_or(128));
    let types = c.layer_types(s.layers)?;
    let rope = c.rope("full_attention", s.head_size, 150_000.0)?;
    let layers = layers(&s, |i, n| {
        let sliding_window = match &types {
            Some(t) => layer_window(c, &t[i], window)?,
            None => window.filter(|_| i.is_multiple_of(2)),
        };
        let attention = AttentionPlan {
            sliding_window,
            sinks: Some(n.tensor("self_attn.sinks")),
            ..n.attention(&s, bias, bias)
        };
        Ok(n.pre_norm_layer(attention, experts.layer(n, &s)))
    })?;
    model(c, &s, vec![rope], layers, false)
}

/// What Gemma 2 and 3 share: norms of 1 + w before and after each block, a scaled embedding, tied
/// weights, a query scale of its own.
fn gemma(
    c: &ConfigReader<'_>,
    s: &Sizes,
    ropes: Vec<crate::models::rope::RopePlan>,
    attention: impl Fn(usize, &Names) -> Result<AttentionPlan, ModelError>,
) -> Result<ModelPlan, ModelError> {
    if c.flag("use_bidirectional_attention")? {
        return Err(c.unsupported("bidirectional attention", "only causal decoders are"));
    }
    let act = activation(c)?;
    let layers = layers(s, |i, n| {
        Ok(LayerPlan {
            pre_mixer_norm: Some(n.norm("input_layernorm", 1.0)),
            post_mixer_norm: Some(n.norm("post_attention_layernorm", 1.0)),
            pre_ffn_norm: Some(n.norm("pre_feedforward_layernorm", 1.0)),
            post_ffn_norm: Some(n.norm("post_feedforward_layernorm", 1.0)),
            mixers: vec![MixerPlan::Attention(attention(i, n)?)],
            feed_forward: Some(n.gated(s, act, false)),
            ..LayerPlan::default()
        })
    })?;
    let mut plan = model(c, s, ropes, layers, true)?;
    plan.final_norm.iter_mut().for_each(|n| n.offset = 1.0);
    plan.embedding_scale = (s.hidden as f64).sqrt() as f32;
    plan.final_logit_soft_cap = c.opt_cap("final_logit_softcapping")?;
    Ok(plan)
}

fn gemma_scale(c: &ConfigReader<'_>, s: &Sizes) -> Result<f32, ModelError> {
    let scalar = c.opt_f64("query_pre_attn_scalar")?.unwrap_or(s.head_size as f64);
    if scalar <= 0.0 {
        return Err(c.error("query_pre_attn_scalar", format!("is {scalar}; it must be above 0")));
    }
    Ok(scalar.powf(-0.5) as f32)
}

/// Soft caps on scores and logits; every other layer slides (arXiv 2408.00118).
pub(super) fn gemma2(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    let s = Sizes::read(c, 1e-6)?;
    let (scale, window) = (gemma_scale(c, &s)?, c.opt_usize("sliding_window")?);
    let cap = c.opt_cap("attn_logit_softcapping")?;
    let (types, bias) = (c.layer_types(s.layers)?, c.flag("attention_bias")?);
    let rope = c.rope("full_attention", s.head_size, 10000.0)?;
    gemma(c, &s, vec![rope], |i, n| {
        let sliding_window = match &types {
            Some(t) => layer_window(c, &t[i], window)?,
            None => window.filter(|_| i % 2 == 0),
        };
        Ok(AttentionPlan { scale, sliding_window, logit_soft_cap: cap, ..n.attention(&s, bias, bias) })
    })
}

/// Norms on query and key heads; five sliding layers to a full one, with rotary bases of their own
/// (arXiv 2503.19786).
pub(super) fn gemma3(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    let s = Sizes::read(c, 1e-6)?;
    let (scale, window) = (gemma_scale(c, &s)?, c.opt_usize("sliding_window")?);
    let cap = c.opt_cap("attn_logit_softcapping")?;
    let (types, bias) = (c.layer_types(s.layers)?, c.flag("attention_bias")?);
    let pattern = match c.opt_usize("sliding_window_pattern")? {
        Some(p) => p,
        None => c.opt_usize("_sliding_window_pattern")?.unwrap_or(6),
    };
    let full = c.rope("full_attention", s.head_size, 1_000_000.0)?;
    let mut local = c.rope("sliding_attention", s.head_size, 10000.0)?;
    if c.get("rope_parameters").is_none_or(|p| p.get("sliding_attention").is_none()) {
        local.theta = c.opt_f64("rope_local_base_freq")?.unwrap_or(10000.0);
        c.base("rope_local_base_freq", local.theta)?;
        local.scaling = None;
    }
    gemma(c, &s, vec![full, local], |i, n| {
        let sliding_window = match &types {
            Some(t) => layer_window(c, &t[i], window)?,
            None => window.filter(|_| !(i + 1).is_multiple_of(pattern)),
        };
        Ok(AttentionPlan {
            scale,
            sliding_window,
            logit_soft_cap: cap,
            qk_norm: Some(n.qk_norm(1.0, true)),
            rope: Some(usize::from(sliding_window.is_some())),
            ..n.attention(&s, bias, bias)
        })
    })
}

/// Fused projections, part of each head rotated (arXiv 2404.14219).
pub(super) fn phi3(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    let s = Sizes::read(c, 1e-5)?;
    let (act, window) = (activation(c)?, c.opt_usize("sliding_window")?);
    let rope = c.rope("full_attention", s.head_size, 10000.0)?;
    let layers = layers(&s, |_, n| {
        let attention = AttentionPlan {
            qkv: n.fused_qkv("self_attn.qkv_proj", &s),
            sliding_window: window,
            ..n.attention(&s, false, false)
        };
        Ok(n.pre_norm_layer(attention, n.fused_gated("mlp.gate_up_proj", &s, act)))
    })?;
    model(c, &s, vec![rope], layers, false)
}

/// Norms after mixer and feed-forward only, and over whole projections of q and k (arXiv 2501.00656).
pub(super) fn olmo2(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    let s = Sizes::read(c, 1e-5)?;
    let (act, bias) = (activation(c)?, c.flag("attention_bias")?);
    let rope = c.rope("full_attention", s.head_size, 10000.0)?;
    let layers = layers(&s, |_, n| {
        Ok(LayerPlan {
            pre_mixer_norm: None,
            post_mixer_norm: Some(n.norm("post_attention_layernorm", 0.0)),
            pre_ffn_norm: None,
            post_ffn_norm: Some(n.norm("post_feedforward_layernorm", 0.0)),
            mixers: vec![MixerPlan::Attention(AttentionPlan {
                qk_norm: Some(n.qk_norm(0.0, false)),
                ..n.attention(&s, bias, bias)
            })],
            feed_forward: Some(n.gated(&s, act, false)),
            ..LayerPlan::default()
        })
    })?;
    model(c, &s, vec![rope], layers, false)
}
