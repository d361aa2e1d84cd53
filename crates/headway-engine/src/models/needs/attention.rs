//! The dimensions of softmax and of latent attention.

use super::{AttentionNeeds, MixerNeeds, MlaNeeds, Reach, config::Config};
use crate::models::{ModelError, plan::CausalLayers};
use serde_json::Value;

const HEADS: &[&str] = &["num_attention_heads", "n_head", "n_heads", "num_heads"];
const KV_HEADS: &[&str] =
    &["num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_query_groups"];
const HEAD_SIZE: &[&str] = &["head_dim", "attention_head_dim", "kv_channels"];
const HIDDEN: &[&str] = &["hidden_size", "d_model", "n_embd", "dim"];

/// What the layers of a model have in common.
pub(super) struct Shape {
    base: AttentionNeeds,
    windowed: AttentionNeeds,
    mla: Option<MlaNeeds>,
    window: Option<usize>,
    chunk: Option<usize>,
}

impl Shape {
    pub fn read(c: &Config<'_>) -> Result<Self, ModelError> {
        let num_heads = c.count(HEADS)?;
        let mla = mla(c, num_heads)?;
        let base = AttentionNeeds {
            sinks: c.flag("add_full_attention_sink_bias")? || c.model_type == "gpt_oss",
            logit_soft_cap: number(c, "attn_logit_softcapping").is_some_and(|x| x > 0.0),
            alibi: alibi(c),
            mm_prefix: mm_prefix(c),
            ..heads(c, num_heads, mla.is_some())?
        };
        let window = c.opt_count(&["sliding_window", "sliding_window_size", "attention_window_size"])?;
        let chunk = c.opt_count(&["attention_chunk_size"])?.filter(|_| c.model_type.starts_with("llama4"));
        let (mut windowed, mut base) = (windowed(c, &base)?, global(c, base)?);
        let causal = CausalLayers::read(|f| c.get(f)).map_err(|(field, why)| c.error(field, why))?;
        (windowed.causal, base.causal) = (causal.holds(window), causal.holds(None));
        if let Some(w) = c.opt_count(&["rswa_window"])? {
            base.reach = Reach::Rswa(w);
        }
        Ok(Self { windowed, base, mla, window, chunk })
    }

    /// A layer that sees all tokens.
    pub fn full(&self) -> MixerNeeds {
        match self.mla {
            Some(m) => MixerNeeds::Mla(m),
            None => MixerNeeds::Attention(self.base.clone()),
        }
    }

    /// A layer with the model's window.
    pub fn sliding(&self, c: &Config<'_>) -> Result<MixerNeeds, ModelError> {
        let w = self
            .window
            .ok_or_else(|| c.error("sliding_window", "is missing, but there are sliding layers"))?;
        if self.mla.is_some() {
            return Err(c.unsupported(
                "latent attention with a sliding window",
                "supported: latent attention over all tokens",
            ));
        }
        Ok(MixerNeeds::Attention(AttentionNeeds { reach: Reach::Window(w), ..self.windowed.clone() }))
    }

    /// A layer that sees its chunk.
    pub fn chunked(&self, c: &Config<'_>) -> Result<MixerNeeds, ModelError> {
        let n = self
            .chunk
            .ok_or_else(|| c.error("attention_chunk_size", "is missing, but there are chunked layers"))?;
        Ok(MixerNeeds::Attention(AttentionNeeds { reach: Reach::Chunk(n), ..self.windowed.clone() }))
    }

    /// Attention with other key/value heads, as configs give them a layer.
    pub fn with_kv_heads(&self, num_kv_heads: usize) -> MixerNeeds {
        MixerNeeds::Attention(AttentionNeeds { num_kv_heads, ..self.base.clone() })
    }

    pub fn num_heads(&self) -> usize {
        self.base.num_heads
    }

    pub fn head_size(&self) -> usize {
        self.mla.map_or(self.base.head_size, |m| m.head_size())
    }
}

/// Heads and their sizes.
fn heads(c: &Config<'_>, num_heads: usize, latent: bool) -> Result<AttentionNeeds, ModelError> {
    let head_size = match c.opt_count(HEAD_SIZE)? {
        Some(n) => n,
        None if latent => c.count(&["v_head_dim"])?,
        None => {
            let hidden = c.count(HIDDEN)?;
            if !hidden.is_multiple_of(num_heads) {
                return Err(
                    c.error("head_dim", format!("is missing, and {num_heads} heads don't divide {hidden}"))
                );
            }
            hidden / num_heads
        }
    };
    let one_kv_head = c.flag("multi_query")? && !c.flag("new_decoder_architecture")?;
    let num_kv_heads = match c.opt_count(KV_HEADS)? {
        _ if one_kv_head => 1,
        Some(n) => n,
        None => num_heads,
    };
    let head_size_v = match c.opt_count(&["v_head_dim"])? {
        Some(v) if !latent => v,
        _ => head_size,
    };
    if num_kv_heads > num_heads || !num_heads.is_multiple_of(num_kv_heads) {
        return Err(c.error(
            "num_key_value_heads",
            format!("is {num_kv_heads}; it must divide the {num_heads} attention heads"),
        ));
    }
    Ok(AttentionNeeds { head_size_v, ..AttentionNeeds::new(num_heads, num_kv_heads, head_size) })
}

/// Layers with a window may have heads of their own (`swa_…`).
fn windowed(c: &Config<'_>, base: &AttentionNeeds) -> Result<AttentionNeeds, ModelError> {
    let own = |name: &str, otherwise: usize| Ok::<_, ModelError>(c.opt_count(&[name])?.unwrap_or(otherwise));
    Ok(AttentionNeeds {
        num_heads: own("swa_num_attention_heads", base.num_heads)?,
        num_kv_heads: own("swa_num_key_value_heads", base.num_kv_heads)?,
        head_size: own("swa_head_dim", base.head_size)?,
        head_size_v: own("swa_v_head_dim", base.head_size_v)?,
        sinks: base.sinks || c.flag("add_swa_attention_sink_bias")?,
        ..base.clone()
    })
}

/// Layers without a window may have heads of their own (`global_…`).
fn global(c: &Config<'_>, base: AttentionNeeds) -> Result<AttentionNeeds, ModelError> {
    let one = c.get("per_layer_config").and_then(Value::as_object).and_then(|o| o.values().next());
    let one = one.and_then(|l| l.get("head_dim")?.as_u64()).map(|n| n as usize);
    let head_size = c.opt_count(&["global_head_dim"])?.or(one);
    let num_kv_heads = c.opt_count(&["num_global_key_value_heads"])?;
    Ok(AttentionNeeds {
        head_size: head_size.unwrap_or(base.head_size),
        head_size_v: head_size.unwrap_or(base.head_size_v),
        num_kv_heads: num_kv_heads.unwrap_or(base.num_kv_heads),
        ..base
    })
}

/// Latent attention, where the config has a latent.
fn mla(c: &Config<'_>, num_heads: usize) -> Result<Option<MlaNeeds>, ModelError> {
    let Some(kv_lora_rank) = c.opt_count(&["kv_lora_rank"])? else { return Ok(None) };
    if let Some(v) = c.get("compress_ratios").or_else(|| c.get("o_lora_rank")) {
        return Err(c.unsupported(
            format!("latent attention over compressed states ({v})"),
            "supported: latent attention with one row a token, with or without an index of keys",
        ));
    }
    Ok(Some(MlaNeeds {
        num_heads,
        kv_lora_rank,
        qk_nope_head_dim: c.count(&["qk_nope_head_dim"])?,
        qk_rope_head_dim: c.count(&["qk_rope_head_dim"])?,
        v_head_dim: c.count(&["v_head_dim"])?,
        index_topk: c.opt_count(&["index_topk"])?,
    }))
}

fn number(c: &Config<'_>, field: &str) -> Option<f64> {
    c.get(field).and_then(Value::as_f64)
}

fn alibi(c: &Config<'_>) -> bool {
    let yes = |v: Option<&Value>| v.and_then(Value::as_bool).unwrap_or(false);
    c.model_type == "bloom"
        || yes(c.get("alibi"))
        || yes(c.get("attn_config").and_then(|a| a.get("alibi")))
        || c.text("position_embedding_type") == Some("alibi")
}

/// Models whose prompts attend in both directions inside an image.
fn mm_prefix(c: &Config<'_>) -> bool {
    let asked = c.get("is_mm_prefix_lm").and_then(Value::as_bool) == Some(true);
    let both_ways = c.get("use_bidirectional_attention").and_then(Value::as_str) == Some("vision");
    let known = both_ways || matches!(c.outer_type.as_str(), "gemma3" | "paligemma" | "molmo2");
    asked || (c.multimodal && known)
}
