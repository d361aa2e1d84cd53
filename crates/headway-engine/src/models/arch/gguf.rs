//! Translators of GGUF headers: llama, the Qwens and gemma3, with the facts that their headers leave out.

use crate::{
    loading::{Checkpoint, GgufFile},
    models::{
        ModelError, ModelPlan,
        plan::{
            AttentionPlan, ExpertWeights, ExpertsPlan, FeedForwardPlan, LayerPlan, LinearPlan, MaskPlan,
            MixerPlan, NormPlan, QkNormPlan, StackedPlan,
        },
        rope::{RopePlan, RopeScaling},
    },
};
use headway_tensor::{Activation, RopeStyle, RouterScores, Routing};

/// Values of `general.architecture` with a translator.
pub(super) const KNOWN: &[&str] = &["llama", "qwen2", "qwen3", "qwen3moe", "gemma3"];

/// The plan of a GGUF file.
pub(super) fn plan(g: &GgufFile) -> Result<ModelPlan, ModelError> {
    let translate = translator(g)?;
    translate(&Header::read(g)?)
}

/// Refuses an architecture without a translator, before anything else of the header is looked at.
pub(super) fn refuse_unknown(g: &GgufFile) -> Result<(), ModelError> {
    translator(g).map(|_| ())
}

type Translate = fn(&Header<'_>) -> Result<ModelPlan, ModelError>;

fn translator(g: &GgufFile) -> Result<Translate, ModelError> {
    match g.architecture()? {
        "llama" => Ok(llama),
        "qwen2" => Ok(qwen2),
        "qwen3" | "qwen3moe" => Ok(qwen3),
        "gemma3" => Ok(gemma3),
        other => Err(ModelError::UnknownArchitecture {
            file: g.path().display().to_string(),
            name: format!("{other} (GGUF)"),
            known: super::known(),
        }),
    }
}

/// The header's sizes, under the architecture's prefix.
struct Header<'a> {
    file: &'a GgufFile,
    arch: String,
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    vocab: usize,
    context: usize,
    eps: f32,
}

impl<'a> Header<'a> {
    fn read(file: &'a GgufFile) -> Result<Self, ModelError> {
        let (m, arch) = (file.metadata(), file.architecture()?.to_owned());
        let size = |key: &str| m.usize(&format!("{arch}.{key}"));
        let (hidden, heads) = (size("embedding_length")?, size("attention.head_count")?);
        let kv_heads = m.opt_usize(&format!("{arch}.attention.head_count_kv"))?.unwrap_or(heads);
        let head_size = match m.opt_usize(&format!("{arch}.attention.key_length"))? {
            Some(d) => d,
            None => hidden / heads.max(1),
        };
        let vocab = file.get("token_embd.weight")?.rows();
        Ok(Self {
            hidden,
            heads,
            kv_heads,
            head_size,
            vocab,
            intermediate: size("feed_forward_length")?,
            layers: size("block_count")?,
            context: size("context_length")?,
            eps: Self::epsilon(file, &format!("{arch}.attention.layer_norm_rms_epsilon"))?,
            file,
            arch,
        })
    }

    fn epsilon(file: &GgufFile, key: &str) -> Result<f32, ModelError> {
        let eps = file.metadata().f32(key)?;
        if eps.is_finite() && eps >= 0.0 {
            return Ok(eps);
        }
        let (file, why) =
            (file.path().display().to_string(), format!("is {eps}; a number of at least 0 is needed"));
        Err(ModelError::Field { file, field: key.into(), why })
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }

    fn unsupported(&self, what: &str, remedy: &str) -> ModelError {
        let file = self.file.path().display().to_string();
        ModelError::Unsupported { file, what: what.into(), remedy: remedy.into() }
    }

    /// The rotary embedding that the header describes.
    fn rope(&self, style: RopeStyle) -> Result<RopePlan, ModelError> {
        let m = self.file.metadata();
        let theta = f64::from(m.opt_f32(&self.key("rope.freq_base"))?.unwrap_or(10000.0));
        let rotary_dim = m.opt_usize(&self.key("rope.dimension_count"))?.unwrap_or(self.head_size);
        let sound = theta > 0.0 && theta.is_finite();
        if !sound || rotary_dim < 2 || rotary_dim > self.head_size || !rotary_dim.is_multiple_of(2) {
            return Err(self.unsupported(
                &format!(
                    "a rotary embedding of base {theta} over {rotary_dim} of {} elements",
                    self.head_size
                ),
                "the file is damaged or of a newer kind",
            ));
        }
        let scaling = match m.opt_text(&self.key("rope.scaling.type"))? {
            None | Some("none") => self.rope_factors(rotary_dim)?,
            Some("linear") => {
                let factor = f64::from(m.f32(&self.key("rope.scaling.factor"))?);
                if !(factor > 0.0 && factor.is_finite()) {
                    let what = format!("linear rope scaling by {factor}");
                    return Err(self.unsupported(&what, "the file is damaged: convert it again"));
                }
                Some(RopeScaling::Linear { factor })
            }
            Some(other) => {
                return Err(
                    self.unsupported(&format!("rope scaling of type {other}"), "supported: none, linear")
                );
            }
        };
        Ok(RopePlan { theta, rotary_dim, style, scaling })
    }

    /// Llama 3's scaling, which GGUF files carry as a divisor for each pair.
    fn rope_factors(&self, rotary_dim: usize) -> Result<Option<RopeScaling>, ModelError> {
        if !self.file.contains("rope_freqs.weight") {
            return Ok(None);
        }
        let w = self.file.get("rope_freqs.weight")?;
        let factors: Vec<f64> = w.to_f32().into_iter().map(f64::from).collect();
        if factors.len() != rotary_dim / 2 || factors.iter().any(|f| *f <= 0.0 || !f.is_finite()) {
            return Err(ModelError::WrongShape {
                file: self.file.describe(),
                name: "rope_freqs.weight".into(),
                found: w.shape().to_vec(),
                expected: vec![rotary_dim / 2],
            });
        }
        Ok(Some(RopeScaling::PerFrequency { factors, attention_factor: 1.0 }))
    }

    fn norm(&self, layer: usize, name: &str) -> NormPlan {
        NormPlan::plain(format!("blk.{layer}.{name}.weight"))
    }

    fn attention(&self, layer: usize, qkv_bias: bool) -> AttentionPlan {
        let part = |(name, width): (&str, usize)| {
            let module = format!("blk.{layer}.{name}");
            (format!("{module}.weight"), qkv_bias.then(|| format!("{module}.bias")), width)
        };
        let (q, kv) = (self.heads * self.head_size, self.kv_heads * self.head_size);
        let qkv = [("attn_q", q), ("attn_k", kv), ("attn_v", kv)];
        AttentionPlan {
            rope: Some(0),
            ..AttentionPlan::plain(
                (self.heads, self.kv_heads),
                self.head_size,
                LinearPlan::stacked(qkv.map(part), self.hidden),
                LinearPlan::single(format!("blk.{layer}.attn_output.weight"), None, q, self.hidden),
            )
        }
    }

    fn gated(&self, layer: usize, activation: Activation) -> FeedForwardPlan {
        let name = |n: &str| format!("blk.{layer}.{n}.weight");
        FeedForwardPlan::Gated {
            gate_up: LinearPlan::stacked(
                ["ffn_gate", "ffn_up"].map(|n| (name(n), None, self.intermediate)),
                self.hidden,
            ),
            down: LinearPlan::single(name("ffn_down"), None, self.intermediate, self.hidden),
            activation,
            gate_scale: 1.0,
        }
    }

    /// A layer's experts, where the file has any in it: stacked, a tensor for all. Softmax over all experts; the
    /// chosen ones' weights are divided by their sum.
    fn feed_forward(&self, layer: usize) -> Result<FeedForwardPlan, ModelError> {
        let name = |n: &str| format!("blk.{layer}.{n}.weight");
        let m = self.file.metadata();
        let (count, used) = (self.key("expert_count"), self.key("expert_used_count"));
        let experts = m.opt_usize(&count)?.unwrap_or(0);
        if experts == 0 || self.file.contains(&name("ffn_gate")) {
            return Ok(self.gated(layer, Activation::Silu));
        }
        let top_k = m.usize(&used)?;
        if top_k == 0 || top_k > experts {
            return Err(m
                .bad(&used, format!("is {top_k}; it must be from 1 to {count}, which is {experts}"))
                .into());
        }
        if self.file.contains(&name("ffn_gate.0")) {
            return Err(self.unsupported(
                "a file with a tensor of its own for every expert",
                "convert it again with a current llama.cpp, which stacks them",
            ));
        }
        let inner = m.opt_usize(&self.key("expert_feed_forward_length"))?.unwrap_or(self.intermediate);
        let stacked = |n: &str, in_features, out_features| StackedPlan {
            weight: name(n),
            bias: None,
            transposed: false,
            in_features,
            out_features,
        };
        Ok(FeedForwardPlan::Experts(ExpertsPlan {
            router: LinearPlan::single(name("ffn_gate_inp"), None, self.hidden, experts),
            correction: None,
            routing: Routing { renormalize: true, ..Routing::top_k(experts, top_k, RouterScores::Softmax) },
            weights: ExpertWeights::Stacked {
                gate_up: ["ffn_gate_exps", "ffn_up_exps"].map(|n| stacked(n, self.hidden, inner)).into(),
                interleaved: false,
                down: stacked("ffn_down_exps", inner, self.hidden),
            },
            intermediate: inner,
            activation: Activation::Silu,
            shared: None,
        }))
    }

    fn pre_norm_layer(&self, layer: usize, attention: AttentionPlan) -> Result<LayerPlan, ModelError> {
        Ok(LayerPlan {
            pre_mixer_norm: Some(self.norm(layer, "attn_norm")),
            post_mixer_norm: None,
            pre_ffn_norm: Some(self.norm(layer, "ffn_norm")),
            post_ffn_norm: None,
            mixers: vec![MixerPlan::Attention(attention)],
            feed_forward: Some(self.feed_forward(layer)?),
            ..LayerPlan::default()
        })
    }

    fn model(&self, ropes: Vec<RopePlan>, layers: Vec<LayerPlan>) -> ModelPlan {
        let head = "output.weight";
        ModelPlan {
            architecture: format!("{} (GGUF)", self.arch),
            hidden_size: self.hidden,
            vocab_size: self.vocab,
            max_position_embeddings: self.context,
            norm_eps: self.eps,
            embedding_scale: 1.0,
            embedding: "token_embd.weight".into(),
            lm_head: self
                .file
                .contains(head)
                .then(|| LinearPlan::single(head.into(), None, self.hidden, self.vocab)),
            positions: None,
            embedding_norm: None,
            final_norm: Some(NormPlan::plain("output_norm.weight")),
            pooling: None,
            logit_scale: 1.0,
            final_logit_soft_cap: None,
            per_layer_inputs: None,
            masks: MaskPlan::default(),
            ropes,
            layers,
            encoder: None,
            drafting_layers: 0,
        }
    }
}

/// Rows of q and k are permuted for neighbouring pairs. Mixtral is of this architecture.
fn llama(h: &Header<'_>) -> Result<ModelPlan, ModelError> {
    let layers = (0..h.layers).map(|i| h.pre_norm_layer(i, h.attention(i, false)));
    Ok(h.model(vec![h.rope(RopeStyle::Interleaved)?], layers.collect::<Result<_, _>>()?))
}

fn qwen2(h: &Header<'_>) -> Result<ModelPlan, ModelError> {
    let layers = (0..h.layers).map(|i| h.pre_norm_layer(i, h.attention(i, true)));
    Ok(h.model(vec![h.rope(RopeStyle::Halves)?], layers.collect::<Result<_, _>>()?))
}

/// With a norm on every query and key head; `qwen3moe` has experts.
fn qwen3(h: &Header<'_>) -> Result<ModelPlan, ModelError> {
    let layer = |i| {
        let (q, k) = (h.norm(i, "attn_q_norm"), h.norm(i, "attn_k_norm"));
        let qk_norm = Some(QkNormPlan { q, k: Some(k), per_head: true });
        h.pre_norm_layer(i, AttentionPlan { qk_norm, ..h.attention(i, false) })
    };
    let layers = (0..h.layers).map(layer).collect::<Result<_, _>>()?;
    Ok(h.model(vec![h.rope(RopeStyle::Halves)?], layers))
}

/// Norm weights come with their 1 added. Which layers slide (all but every sixth) and the local rotary
/// base (10000) follow from the architecture.
fn gemma3(h: &Header<'_>) -> Result<ModelPlan, ModelError> {
    const PATTERN: usize = 6;
    // Gemma 3 27B, the one with 62 layers, scales by its width a head instead of the head size.
    let scaled_by = if h.layers == 62 { h.hidden / h.heads } else { h.head_size };
    let window = h.file.metadata().opt_usize(&h.key("attention.sliding_window"))?.filter(|w| *w > 0);
    let full = h.rope(RopeStyle::Halves)?;
    let local = RopePlan { theta: 10000.0, scaling: None, ..full.clone() };
    let layers = (0..h.layers)
        .map(|i| {
            let sliding_window = window.filter(|_| !(i + 1).is_multiple_of(PATTERN));
            LayerPlan {
                pre_mixer_norm: Some(h.norm(i, "attn_norm")),
                post_mixer_norm: Some(h.norm(i, "post_attention_norm")),
                pre_ffn_norm: Some(h.norm(i, "ffn_norm")),
                post_ffn_norm: Some(h.norm(i, "post_ffw_norm")),
                mixers: vec![MixerPlan::Attention(AttentionPlan {
                    scale: (scaled_by as f64).powf(-0.5) as f32,
                    qk_norm: Some(QkNormPlan {
                        q: h.norm(i, "attn_q_norm"),
                        k: Some(h.norm(i, "attn_k_norm")),
                        per_head: true,
                    }),
                    sliding_window,
                    rope: Some(usize::from(sliding_window.is_some())),
                    ..h.attention(i, false)
                })],
                feed_forward: Some(h.gated(i, Activation::GeluTanh)),
                ..LayerPlan::default()
            }
        })
        .collect();
    let mut plan = h.model(vec![full, local], layers);
    plan.embedding_scale = (h.hidden as f64).sqrt() as f32;
    Ok(plan)
}
