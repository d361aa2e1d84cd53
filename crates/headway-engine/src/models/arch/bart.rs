//! BART (arXiv 1910.13461): an encoder that sees its whole input, and a decoder that attends to it.

use super::{ConfigReader, hf::activation};
use crate::models::{
    ModelError, ModelPlan,
    plan::{
        AttentionPlan, CrossPlan, EncoderPlan, FeedForwardPlan, LayerNormPlan, LayerPlan, LinearPartPlan,
        LinearPlan, MixerPlan, PositionsPlan,
    },
};
use headway_attention::process::rules::AttnType;
use headway_tensor::Activation;

/// Rows of the tables of positions before that of position 0.
const FIRST: usize = 2;

/// One of the two stacks.
struct Stack {
    name: &'static str,
    hidden: usize,
    layers: usize,
    heads: usize,
    intermediate: usize,
    activation: Activation,
    positions: usize,
}

pub(super) fn bart(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    for flag in ["normalize_before", "add_final_layer_norm", "normalize_embedding"] {
        if c.get(flag).is_some_and(|v| v.as_bool() == Some(flag != "normalize_embedding")) {
            return Err(c.unsupported(
                format!("{flag} {}", flag != "normalize_embedding"),
                "norms on the stream after each block, and on the embedding, are",
            ));
        }
    }
    let (encoder, decoder) = (Stack::read(c, "encoder")?, Stack::read(c, "decoder")?);
    let (hidden, vocab) = (decoder.hidden, c.usize("vocab_size")?);
    let scaled = c.flag("scale_embedding")?;
    let shared = "model.shared.weight".to_owned();
    Ok(ModelPlan {
        architecture: c.architecture()?,
        hidden_size: hidden,
        vocab_size: vocab,
        max_position_embeddings: decoder.positions,
        norm_eps: 1e-5,
        embedding_scale: if scaled { (hidden as f64).sqrt() as f32 } else { 1.0 },
        embedding: shared.clone(),
        positions: Some(decoder.positions()),
        embedding_norm: Some(norm("model.decoder.layernorm_embedding")),
        lm_head: Some(LinearPlan {
            parts: vec![LinearPartPlan {
                weight: shared,
                bias: Some("final_logits_bias".into()),
                out_features: vocab,
            }],
            in_features: hidden,
            out_features: vocab,
        }),
        final_norm: None,
        pooling: None,
        logit_scale: 1.0,
        final_logit_soft_cap: None,
        per_layer_inputs: None,
        masks: crate::models::plan::MaskPlan::default(),
        ropes: vec![],
        layers: (0..decoder.layers).flat_map(|i| decoder.decoder_layer(i)).collect(),
        drafting_layers: 0,
        encoder: Some(Box::new(EncoderPlan {
            positions: encoder.positions(),
            embedding_norm: norm("model.encoder.layernorm_embedding"),
            max_tokens: encoder.positions,
            layers: (0..encoder.layers).map(|i| encoder.encoder_layer(i)).collect(),
        })),
    })
}

fn norm(module: &str) -> LayerNormPlan {
    LayerNormPlan { weight: format!("{module}.weight"), bias: format!("{module}.bias") }
}

impl Stack {
    fn read(c: &ConfigReader<'_>, name: &'static str) -> Result<Self, ModelError> {
        let field = |what: &str| format!("{name}_{what}");
        let (hidden, heads) = (c.usize("d_model")?, c.usize(&field("attention_heads"))?);
        if !hidden.is_multiple_of(heads) {
            let why = format!("{heads} does not divide d_model {hidden}");
            return Err(c.error(&field("attention_heads"), why));
        }
        let layers = c.usize(&field("layers"))?;
        if layers > 1024 {
            return Err(c.error(&field("layers"), format!("is {layers}; at most 1024 are expected")));
        }
        let activation = match c.text("activation_function")? {
            Some("gelu") => Activation::Gelu,
            Some("gelu_new") => Activation::GeluTanh,
            None => activation(c)?,
            Some(other) => {
                return Err(
                    c.unsupported(format!("activation_function {other}"), "supported: gelu, gelu_new")
                );
            }
        };
        let positions = c.usize("max_position_embeddings")?;
        Ok(Self {
            name,
            hidden,
            layers,
            heads,
            intermediate: c.usize(&field("ffn_dim"))?,
            activation,
            positions,
        })
    }

    fn positions(&self) -> PositionsPlan {
        PositionsPlan {
            weight: format!("model.{}.embed_positions.weight", self.name),
            rows: self.positions + FIRST,
            first: FIRST,
            types: None,
        }
    }

    fn layer(&self, i: usize) -> String {
        format!("model.{}.layers.{i}", self.name)
    }

    fn linear(&self, module: &str, parts: &[&str], from: usize, to: usize) -> LinearPlan {
        let part = |p: &&str| {
            let at = format!("{module}{p}");
            (format!("{at}.weight"), Some(format!("{at}.bias")), to)
        };
        LinearPlan::stacked(parts.iter().map(part), from)
    }

    fn self_attention(&self, layer: &str, attn_type: AttnType) -> MixerPlan {
        let (h, module) = (self.hidden, format!("{layer}.self_attn"));
        let head_size = h / self.heads;
        MixerPlan::Attention(AttentionPlan {
            attn_type,
            ..AttentionPlan::plain(
                (self.heads, self.heads),
                head_size,
                self.linear(&module, &[".q_proj", ".k_proj", ".v_proj"], h, h),
                self.linear(&module, &[".out_proj"], h, h),
            )
        })
    }

    /// A layer with a feed-forward at its end.
    fn with_feed_forward(&self, layer: &str, mixer: MixerPlan, mixer_norm: &str) -> LayerPlan {
        let (h, f) = (self.hidden, self.intermediate);
        LayerPlan {
            mixers: vec![mixer],
            after_mixer_norm: Some(norm(&format!("{layer}.{mixer_norm}"))),
            feed_forward: Some(FeedForwardPlan::Plain {
                up: self.linear(layer, &[".fc1"], h, f),
                down: self.linear(layer, &[".fc2"], f, h),
                activation: self.activation,
            }),
            after_ffn_norm: Some(norm(&format!("{layer}.final_layer_norm"))),
            ..LayerPlan::default()
        }
    }

    fn encoder_layer(&self, i: usize) -> LayerPlan {
        let layer = self.layer(i);
        let mixer = self.self_attention(&layer, AttnType::Encoder);
        self.with_feed_forward(&layer, mixer, "self_attn_layer_norm")
    }

    /// Self-attention; then attention to the encoder and the feed-forward.
    fn decoder_layer(&self, i: usize) -> [LayerPlan; 2] {
        let (layer, h) = (self.layer(i), self.hidden);
        let (module, head_size) = (format!("{layer}.encoder_attn"), h / self.heads);
        let first = LayerPlan {
            mixers: vec![self.self_attention(&layer, AttnType::Decoder)],
            after_mixer_norm: Some(norm(&format!("{layer}.self_attn_layer_norm"))),
            ..LayerPlan::default()
        };
        let cross = MixerPlan::Cross(CrossPlan {
            num_heads: self.heads,
            head_size,
            scale: (head_size as f64).powf(-0.5) as f32,
            q: self.linear(&module, &[".q_proj"], h, h),
            kv: self.linear(&module, &[".k_proj", ".v_proj"], h, h),
            o: self.linear(&module, &[".out_proj"], h, h),
        });
        let second = self.with_feed_forward(&layer, cross, "encoder_attn_layer_norm");
        [first, LayerPlan { continues: true, ..second }]
    }
}
