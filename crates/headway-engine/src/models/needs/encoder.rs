//! Models with an encoder: encoder and decoder (Whisper, BART, T5), or an encoder alone (BERT and its kin).

use super::{AttentionNeeds, LayerNeeds, MOST_LAYERS, MixerNeeds, ModelNeeds, config::Config};
use crate::models::ModelError;
use headway_attention::process::rules::AttnType;
use serde_json::Value;

const ALONE: &[&str] =
    &["bert", "roberta", "xlm-roberta", "electra", "distilbert", "camembert", "mpnet", "ernie", "nomic_bert"];

/// Reads a model with an encoder; `None` for others.
pub(super) fn read(c: &Config<'_>) -> Result<Option<ModelNeeds>, ModelError> {
    let both = c.get("is_encoder_decoder").and_then(Value::as_bool).unwrap_or(false)
        || matches!(c.model_type.as_str(), "whisper" | "t5" | "mt5" | "bart" | "mbart");
    if both {
        return encoder_decoder(c).map(Some);
    }
    if ALONE.contains(&c.model_type.as_str()) {
        return encoder_only(c).map(Some);
    }
    Ok(None)
}

fn check(c: &Config<'_>, layers: usize) -> Result<usize, ModelError> {
    match layers > MOST_LAYERS {
        true => Err(c.error("num_layers", format!("is {layers}; at most {MOST_LAYERS} are expected"))),
        false => Ok(layers),
    }
}

fn stack(layers: usize, kinds: &[AttentionNeeds]) -> Vec<LayerNeeds> {
    let one = |layer: usize| {
        let mixers = kinds.iter().cloned().map(MixerNeeds::Attention);
        mixers.map(move |mixer| LayerNeeds { layer, mixer, shares_cache_of: None })
    };
    (0..layers).flat_map(one).collect()
}

fn encoder_only(c: &Config<'_>) -> Result<ModelNeeds, ModelError> {
    let layers = check(c, c.count(&["num_hidden_layers", "n_layers"])?)?;
    let needs =
        AttentionNeeds { attn_type: AttnType::EncoderOnly, ..heads(c, "num_attention_heads", "n_heads")? };
    model(c, layers, stack(layers, &[needs]), 0)
}

fn encoder_decoder(c: &Config<'_>) -> Result<ModelNeeds, ModelError> {
    let encoder_layers = check(c, c.count(&["encoder_layers", "num_layers"])?)?;
    let layers = check(c, c.count(&["decoder_layers", "num_decoder_layers", "num_layers"])?)?;
    let encoder =
        AttentionNeeds { attn_type: AttnType::Encoder, ..heads(c, "encoder_attention_heads", "num_heads")? };
    let own = heads(c, "decoder_attention_heads", "num_heads")?;
    let cross = AttentionNeeds { attn_type: AttnType::EncoderDecoder, ..own.clone() };
    let mut mixers = stack(encoder_layers, &[encoder]);
    mixers.extend(stack(layers, &[own, cross]));
    let tokens = c.count(&["max_source_positions", "n_positions", "max_position_embeddings"])?;
    model(c, layers, mixers, tokens)
}

fn heads(c: &Config<'_>, name: &str, other: &str) -> Result<AttentionNeeds, ModelError> {
    let heads = c.count(&[name, other])?;
    let head_size = match c.opt_count(&["d_kv", "head_dim"])? {
        Some(n) => n,
        None => c.count(&["hidden_size", "d_model", "dim"])? / heads,
    };
    Ok(AttentionNeeds::new(heads, heads, head_size))
}

fn model(
    c: &Config<'_>,
    num_layers: usize,
    mixers: Vec<LayerNeeds>,
    max_encoder_tokens: usize,
) -> Result<ModelNeeds, ModelError> {
    let (quantisation, kv_cache_dtype) = c.quantisation();
    let head_size = mixers.iter().find_map(|m| match &m.mixer {
        MixerNeeds::Attention(a) => Some(a.head_size),
        _ => None,
    });
    Ok(ModelNeeds {
        architecture: c.architecture.clone(),
        num_layers,
        dtype: c.dtype()?,
        quantisation,
        kv_cache_dtype,
        max_model_len: c.opt_count(&["max_target_positions"])?.or(c.max_model_len()?),
        max_encoder_tokens,
        experts: None,
        mixers,
        head_size,
        multimodal: false,
        left_out: vec![],
    })
}
