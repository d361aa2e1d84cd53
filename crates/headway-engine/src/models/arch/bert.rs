//! BERT (arXiv 1810.04805) and RoBERTa (arXiv 1907.11692): encoders that see their whole input at once, with
//! learned positions and norms on the stream itself. Their hidden states become one vector.

use super::{ConfigReader, hf::activation};
use crate::models::{
    ModelError, ModelPlan,
    plan::{
        AttentionPlan, FeedForwardPlan, LayerNormPlan, LayerPlan, LinearPlan, MaskPlan, MixerPlan, Pooling,
        PositionsPlan,
    },
};
use headway_attention::process::rules::AttnType;
use headway_tensor::Activation;

/// The sizes of all layers.
struct Sizes {
    hidden: usize,
    heads: usize,
    intermediate: usize,
    activation: Activation,
}

pub(super) fn bert(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    encoder(c, 0)
}

/// Positions begin after the padding's.
pub(super) fn roberta(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    encoder(c, c.count("pad_token_id")?.unwrap_or(1) + 1)
}

fn encoder(c: &ConfigReader<'_>, first: usize) -> Result<ModelPlan, ModelError> {
    for flag in ["is_decoder", "add_cross_attention"] {
        if c.flag(flag)? {
            return Err(
                c.unsupported(flag, "encoders alone are, with is_decoder and add_cross_attention false")
            );
        }
    }
    match c.text("position_embedding_type")? {
        None | Some("absolute") => {}
        Some(other) => {
            return Err(c.unsupported(format!("position_embedding_type {other}"), "absolute positions are"));
        }
    }
    let (hidden, heads) = (c.usize("hidden_size")?, c.usize("num_attention_heads")?);
    if !hidden.is_multiple_of(heads) {
        return Err(c.error("num_attention_heads", format!("{heads} does not divide hidden_size {hidden}")));
    }
    let rows = c.usize("max_position_embeddings")?;
    if rows <= first {
        let why = format!("is {rows}; the first {first} rows stand for no position, so more are needed");
        return Err(c.error("max_position_embeddings", why));
    }
    let layers = c.usize("num_hidden_layers")?;
    if layers > 1024 {
        return Err(c.error("num_hidden_layers", format!("is {layers}; at most 1024 are expected")));
    }
    let (intermediate, activation) = (c.usize("intermediate_size")?, activation(c)?);
    let s = Sizes { hidden, heads, intermediate, activation };
    let table = |name: &str| format!("embeddings.{name}_embeddings.weight");
    Ok(ModelPlan {
        architecture: c.architecture()?,
        hidden_size: hidden,
        vocab_size: c.usize("vocab_size")?,
        max_position_embeddings: rows - first,
        norm_eps: c.opt_non_negative("layer_norm_eps")?.unwrap_or(1e-12) as f32,
        embedding_scale: 1.0,
        embedding: table("word"),
        positions: Some(PositionsPlan {
            weight: table("position"),
            rows,
            first,
            types: Some((table("token_type"), c.opt_usize("type_vocab_size")?.unwrap_or(2))),
        }),
        embedding_norm: Some(norm("embeddings")),
        lm_head: None,
        final_norm: None,
        pooling: Some(Pooling::default()),
        logit_scale: 1.0,
        final_logit_soft_cap: None,
        per_layer_inputs: None,
        masks: MaskPlan::default(),
        ropes: vec![],
        encoder: None,
        layers: (0..layers).map(|i| layer(&format!("encoder.layer.{i}"), &s)).collect(),
        drafting_layers: 0,
    })
}

fn norm(module: &str) -> LayerNormPlan {
    let part = |p: &str| format!("{module}.LayerNorm.{p}");
    LayerNormPlan { weight: part("weight"), bias: part("bias") }
}

fn layer(name: &str, s: &Sizes) -> LayerPlan {
    let part = |module: &str, width: usize| {
        let at = format!("{name}.{module}");
        (format!("{at}.weight"), Some(format!("{at}.bias")), width)
    };
    let one = |module: &str, from: usize, to: usize| LinearPlan::stacked([part(module, to)], from);
    let qkv = ["query", "key", "value"].map(|m| part(&format!("attention.self.{m}"), s.hidden));
    let head_size = s.hidden / s.heads;
    LayerPlan {
        mixers: vec![MixerPlan::Attention(AttentionPlan {
            attn_type: AttnType::EncoderOnly,
            ..AttentionPlan::plain(
                (s.heads, s.heads),
                head_size,
                LinearPlan::stacked(qkv, s.hidden),
                one("attention.output.dense", s.hidden, s.hidden),
            )
        })],
        after_mixer_norm: Some(norm(&format!("{name}.attention.output"))),
        feed_forward: Some(FeedForwardPlan::Plain {
            up: one("intermediate.dense", s.hidden, s.intermediate),
            down: one("output.dense", s.intermediate, s.hidden),
            activation: s.activation,
        }),
        after_ffn_norm: Some(norm(&format!("{name}.output"))),
        ..LayerPlan::default()
    }
}
