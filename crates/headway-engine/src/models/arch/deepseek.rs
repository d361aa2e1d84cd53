//! DeepSeek V2 and V3 (arXiv 2405.04434, 2412.19437): latent attention in every layer; the first layers have a dense
//! feed-forward, the others a mixture of experts.

use super::{
    ConfigReader,
    experts::DeepSeekExperts,
    hf::{Names, Sizes, model},
};
use crate::models::{
    ModelError, ModelPlan,
    plan::{LayerPlan, LinearPlan, MixerPlan, MlaPlan, MlaQueryPlan},
    rope::RopePlan,
};
use headway_tensor::RopeStyle;

/// The sizes of latent attention, as the config names them.
struct Latent {
    kv_lora_rank: usize,
    q_lora_rank: Option<usize>,
    nope: usize,
    rope: usize,
    v: usize,
    bias: bool,
}

impl Latent {
    fn read(c: &ConfigReader<'_>, s: &Sizes) -> Result<Self, ModelError> {
        let field = |name: &str| {
            c.opt_usize(name)?.ok_or_else(|| c.error(name, "is missing; latent attention (MLA) needs it"))
        };
        let latent = Self {
            kv_lora_rank: field("kv_lora_rank")?,
            q_lora_rank: c.opt_usize("q_lora_rank")?,
            nope: field("qk_nope_head_dim")?,
            rope: field("qk_rope_head_dim")?,
            v: field("v_head_dim")?,
            bias: c.flag("attention_bias")?,
        };
        let whole = latent.nope + latent.rope;
        if let Some(n) = c.opt_usize("qk_head_dim")?.filter(|&n| n != whole) {
            let why = format!(
                "is {n}, but qk_nope_head_dim {} + qk_rope_head_dim {} is {whole}; correct one of them",
                latent.nope, latent.rope
            );
            return Err(c.error("qk_head_dim", why));
        }
        if !latent.rope.is_multiple_of(2) {
            let why =
                format!("is {}; an even number is needed, since elements are rotated in pairs", latent.rope);
            return Err(c.error("qk_rope_head_dim", why));
        }
        if s.kv_heads != s.heads {
            let why = format!(
                "is {}, but latent attention has keys and values for each of the {} heads; set it to that or leave \
                 it out",
                s.kv_heads, s.heads
            );
            return Err(c.error("num_key_value_heads", why));
        }
        if c.get("sliding_window").is_some() {
            return Err(c.unsupported(
                "latent attention with a sliding window",
                "latent attention over all tokens is",
            ));
        }
        Ok(latent)
    }

    fn plan(&self, s: &Sizes, names: &Names, rope: &RopePlan) -> MlaPlan {
        let attn = |module: &str| format!("self_attn.{module}");
        let (head, row) = (self.nope + self.rope, self.kv_lora_rank + self.rope);
        let kv_a = names.part(&attn("kv_a_proj_with_mqa"), self.bias, row);
        let queries = s.heads * head;
        let (first, q) = match self.q_lora_rank {
            None => (names.part(&attn("q_proj"), false, queries), MlaQueryPlan::Direct),
            Some(rank) => {
                let up = LinearPlan::stacked([names.part(&attn("q_b_proj"), false, queries)], rank);
                let norm = names.norm(&attn("q_a_layernorm"), 0.0);
                (names.part(&attn("q_a_proj"), self.bias, rank), MlaQueryPlan::Compressed { norm, up })
            }
        };
        let expanded = s.heads * (self.nope + self.v);
        MlaPlan {
            num_heads: s.heads,
            kv_lora_rank: self.kv_lora_rank,
            qk_nope_head_dim: self.nope,
            qk_rope_head_dim: self.rope,
            v_head_dim: self.v,
            scale: ((head as f64).powf(-0.5) * rope.mla_softmax_factor()) as f32,
            down: LinearPlan::stacked([first, kv_a], s.hidden),
            q,
            kv_norm: names.norm(&attn("kv_a_layernorm"), 0.0),
            kv_b: LinearPlan::stacked([names.part(&attn("kv_b_proj"), false, expanded)], self.kv_lora_rank),
            o: LinearPlan::stacked([names.part(&attn("o_proj"), self.bias, s.hidden)], s.heads * self.v),
            rope: 0,
        }
    }
}

/// DeepSeek V2.
pub(super) fn v2(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    decoder(c, &DeepSeekExperts::v2(c)?)
}

/// DeepSeek V3.
pub(super) fn v3(c: &ConfigReader<'_>) -> Result<ModelPlan, ModelError> {
    decoder(c, &DeepSeekExperts::v3(c)?)
}

fn decoder(c: &ConfigReader<'_>, experts: &DeepSeekExperts) -> Result<ModelPlan, ModelError> {
    let s = Sizes::read(c, 1e-6)?;
    let latent = Latent::read(c, &s)?;
    let halves = c.get("rope_interleave").is_some() && !c.flag("rope_interleave")?;
    let style = if halves { RopeStyle::Halves } else { RopeStyle::Interleaved };
    let rope = RopePlan { style, ..c.rope("full_attention", latent.rope, 10000.0)? };
    let layer = |i: usize| {
        let n = Names::layer(i);
        LayerPlan {
            pre_mixer_norm: Some(n.norm("input_layernorm", 0.0)),
            post_mixer_norm: None,
            pre_ffn_norm: Some(n.norm("post_attention_layernorm", 0.0)),
            post_ffn_norm: None,
            mixers: vec![MixerPlan::Mla(latent.plan(&s, &n, &rope))],
            feed_forward: Some(experts.layer(i, &n, &s)),
            ..LayerPlan::default()
        }
    };
    let layers = (0..s.layers).map(layer).collect();
    model(c, &s, vec![rope], layers, false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn config() -> Value {
        json!({
            "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 96, "intermediate_size": 192,
            "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 2048,
            "hidden_act": "silu", "kv_lora_rank": 48, "q_lora_rank": 40, "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16, "v_head_dim": 24, "rope_theta": 10000.0, "n_routed_experts": null,
        })
    }

    fn with(field: &str, value: Value) -> Result<ModelPlan, String> {
        let mut json = config();
        json[field] = value;
        v3(&ConfigReader::new("config.json", &json)).map_err(|e| e.to_string())
    }

    fn latent(plan: &ModelPlan) -> &MlaPlan {
        let MixerPlan::Mla(a) = &plan.layers[0].mixers[0] else { panic!("not latent attention") };
        a
    }

    #[test]
    fn queries_come_compressed_or_not() {
        let plan = with("tie_word_embeddings", json!(false)).unwrap();
        let a = latent(&plan);
        assert_eq!(a.down.parts.iter().map(|p| p.out_features).collect::<Vec<_>>(), [40, 64]);
        assert_eq!((a.widths(), a.kv_b.out_features, a.o.in_features), ((104, 192), 224, 96));
        assert_eq!(plan.ropes[0].style, RopeStyle::Interleaved);
        let plan = with("q_lora_rank", json!(null)).unwrap();
        assert_eq!((latent(&plan).widths(), &latent(&plan).q), ((256, 0), &MlaQueryPlan::Direct));
        let plan = with("rope_interleave", json!(false)).unwrap();
        assert_eq!(plan.ropes[0].style, RopeStyle::Halves);
    }

    #[test]
    fn yarn_sharpens_the_softmax() {
        let yarn = json!({
            "rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        });
        let plain = latent(&with("rope_scaling", json!(null)).unwrap()).scale;
        let scaled = latent(&with("rope_scaling", yarn).unwrap()).scale;
        assert!((plain - 48f32.powf(-0.5)).abs() < 1e-7);
        assert!((scaled / plain - (0.1 * 40f32.ln() + 1.0).powi(2)).abs() < 1e-5);
    }

    #[test]
    fn fields_that_are_missing_or_contradict_are_named_with_what_to_do() {
        for field in ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"] {
            let e = with(field, json!(null)).unwrap_err();
            assert!(e.contains(field) && e.contains("latent attention (MLA) needs it"), "{e}");
            assert!(with(field, json!(0)).unwrap_err().contains(field));
            assert!(with(field, json!("8")).unwrap_err().contains(field));
        }
        let e = with("qk_head_dim", json!(64)).unwrap_err();
        assert!(e.contains("qk_head_dim is 64") && e.contains("is 48; correct one of them"), "{e}");
        let e = with("qk_rope_head_dim", json!(15)).unwrap_err();
        assert!(e.contains("qk_rope_head_dim is 15") && e.contains("even"), "{e}");
        let e = with("num_key_value_heads", json!(2)).unwrap_err();
        assert!(e.contains("num_key_value_heads is 2") && e.contains("leave it out"), "{e}");
        let e = with("sliding_window", json!(128)).unwrap_err();
        assert!(e.contains("latent attention with a sliding window"), "{e}");
        let e = with("q_lora_rank", json!(-4)).unwrap_err();
        assert!(e.contains("q_lora_rank"), "{e}");
    }
}
