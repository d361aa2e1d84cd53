//! What each layer of a model needs of an attention backend, read from a `config.json` or a GGUF header.
//! Wider than [`ModelPlan`]: any architecture whose config says how its layers
//! mix tokens, whether this engine can run it or not.

mod attention;
mod config;
mod defaults;
mod encoder;
mod gguf;
mod order;
mod state;

pub(in crate::models) use state::DEFAULT_CHUNK;
pub use state::StateDims;

use super::{ModelError, ModelPlan, plan::MixerPlan};
use crate::loading::GgufFile;
use config::Config;
use headway_attention::process::rules::AttnType;
use headway_tensor::DType;
use serde_json::Value;

/// Most layers of a model: far beyond published ones.
pub(in crate::models) const MOST_LAYERS: usize = 1024;

/// A model, as far as attention goes.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelNeeds {
    /// As the config names it.
    pub architecture: String,
    /// Layers of the decoder, or of the encoder where that is all.
    pub num_layers: usize,
    /// The element type of the weights; `None`: the config doesn't say.
    pub dtype: Option<DType>,
    /// How the weights are quantised.
    pub quantisation: Option<String>,
    /// The KV cache dtype that the checkpoint brings scales for.
    pub kv_cache_dtype: Option<String>,
    /// Most tokens of a request; `None`: the config doesn't say.
    pub max_model_len: Option<usize>,
    /// Tokens of an encoder's input, at most; 0 without an encoder.
    pub max_encoder_tokens: usize,
    /// Experts that a token goes to, and experts there are, in layers that have any.
    pub experts: Option<(usize, usize)>,
    /// Every mixer, in the model's order.
    pub mixers: Vec<LayerNeeds>,
    /// The head size that the config names, which some rules read instead of a layer's.
    pub head_size: Option<usize>,
    /// Images or audio go into the same sequence.
    pub multimodal: bool,
    /// What the config has and this reading leaves out.
    pub left_out: Vec<String>,
}

/// One mixer. A layer that attends and keeps a state side by side has two.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerNeeds {
    /// The layer, by its index in the model.
    pub layer: usize,
    /// What it does.
    pub mixer: MixerNeeds,
    /// An earlier mixer, by index in [`ModelNeeds::mixers`], whose cache this one reads.
    pub shares_cache_of: Option<usize>,
}

/// What mixes tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum MixerNeeds {
    /// Softmax attention over keys and values.
    Attention(AttentionNeeds),
    /// Multi-head latent attention.
    Mla(MlaNeeds),
    /// A state of fixed size.
    State(StateDims),
}

/// How far a query looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// All tokens.
    All,
    /// The last ones, with its own.
    Window(usize),
    /// Those of its chunk.
    Chunk(usize),
    /// The prompt, and the last ones, with its own (R-SWA).
    Rswa(usize),
}

/// Softmax attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionNeeds {
    /// What attends to what.
    pub attn_type: AttnType,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads.
    pub num_kv_heads: usize,
    /// Elements of a key head.
    pub head_size: usize,
    /// Elements of a value head.
    pub head_size_v: usize,
    /// How far a query looks.
    pub reach: Reach,
    /// Attention sinks.
    pub sinks: bool,
    /// A cap on the logits.
    pub logit_soft_cap: bool,
    /// ALiBi slopes.
    pub alibi: bool,
    /// Both directions inside the images of a prompt.
    pub mm_prefix: bool,
    /// No token of a prompt is seen by an earlier one.
    pub causal: bool,
}

impl AttentionNeeds {
    /// Causal self-attention over all tokens, keys and values of one size.
    pub fn new(num_heads: usize, num_kv_heads: usize, head_size: usize) -> Self {
        Self {
            attn_type: AttnType::Decoder,
            num_heads,
            num_kv_heads,
            head_size,
            head_size_v: head_size,
            reach: Reach::All,
            sinks: false,
            logit_soft_cap: false,
            alibi: false,
            mm_prefix: false,
            causal: true,
        }
    }
}

/// Latent attention, in the config's own terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlaNeeds {
    /// Query heads.
    pub num_heads: usize,
    /// Elements of the latent.
    pub kv_lora_rank: usize,
    /// Elements of a query head without a position.
    pub qk_nope_head_dim: usize,
    /// Elements of a query head that are rotated.
    pub qk_rope_head_dim: usize,
    /// Elements of a value head.
    pub v_head_dim: usize,
    /// Keys that an index chooses for each query.
    pub index_topk: Option<usize>,
}

impl MlaNeeds {
    /// Elements of a cached row: latent and rotated key.
    pub fn head_size(&self) -> usize {
        self.kv_lora_rank + self.qk_rope_head_dim
    }
}

impl ModelNeeds {
    /// Reads a `config.json`; `file` names it in errors.
    ///
    /// # Errors
    /// [`ModelError::Field`] for a field that is needed and missing or of a wrong kind;
    /// [`ModelError::Unsupported`] for layers of a kind that isn't known.
    pub fn from_config(file: &str, json: &Value) -> Result<Self, ModelError> {
        let c = Config::new(file, json)?;
        Ok(if let Some(stacks) = encoder::read(&c)? { stacks } else { order::read(&c)? })
    }

    /// Reads a GGUF header.
    ///
    /// # Errors
    /// As [`ModelNeeds::from_config`].
    pub fn from_gguf(g: &GgufFile) -> Result<Self, ModelError> {
        gguf::read(g)
    }
}

impl ModelNeeds {
    /// Of a plan that this engine runs, whatever else its config says.
    pub fn of_plan(plan: &ModelPlan) -> Self {
        Self {
            architecture: plan.architecture.clone(),
            num_layers: plan.num_layers(),
            dtype: None,
            quantisation: None,
            kv_cache_dtype: None,
            max_model_len: Some(plan.max_position_embeddings),
            max_encoder_tokens: plan.encoder.as_ref().map_or(0, |e| e.max_tokens),
            experts: plan.expert_limits().map(|l| (l.top_k, l.experts)),
            mixers: LayerNeeds::of_plan(plan),
            head_size: None,
            multimodal: false,
            left_out: vec![],
        }
    }
}

impl LayerNeeds {
    /// The needs of a plan that this engine runs.
    pub fn of_plan(plan: &ModelPlan) -> Vec<Self> {
        let needs = |(layer, mixer): (usize, &MixerPlan)| {
            let shares_cache_of = match mixer {
                MixerPlan::Attention(a) => a.shares_cache_of,
                _ => None,
            };
            let mixer = match mixer {
                MixerPlan::Mla(a) => MixerNeeds::Mla(MlaNeeds {
                    num_heads: a.num_heads,
                    kv_lora_rank: a.kv_lora_rank,
                    qk_nope_head_dim: a.qk_nope_head_dim,
                    qk_rope_head_dim: a.qk_rope_head_dim,
                    v_head_dim: a.v_head_dim,
                    index_topk: None,
                }),
                MixerPlan::Attention(a) => MixerNeeds::Attention(AttentionNeeds {
                    reach: match (a.sliding_window, plan.masks.rswa_window) {
                        (Some(w), _) => Reach::Window(w),
                        (None, Some(w)) => Reach::Rswa(w),
                        (None, None) => Reach::All,
                    },
                    mm_prefix: plan.masks.mm_prefix,
                    causal: plan.masks.causal.holds(a.sliding_window),
                    logit_soft_cap: a.logit_soft_cap.is_some(),
                    sinks: a.sinks.is_some(),
                    attn_type: a.attn_type,
                    ..AttentionNeeds::new(a.num_heads, a.num_kv_heads, a.head_size)
                }),
                MixerPlan::Cross(a) => MixerNeeds::Attention(AttentionNeeds {
                    attn_type: AttnType::EncoderDecoder,
                    ..AttentionNeeds::new(a.num_heads, a.num_heads, a.head_size)
                }),
                MixerPlan::StateSpace(m) => MixerNeeds::State(StateDims::Mamba2 {
                    heads: m.num_heads,
                    head_dim: m.head_dim,
                    groups: m.groups,
                    state: m.state_size,
                    conv: m.conv_kernel,
                    chunk: m.chunk_size,
                    dtype: m.state_dtype,
                }),
            };
            Self { layer, shares_cache_of, mixer }
        };
        plan.mixers().map(needs).collect()
    }
}

#[cfg(test)]
mod tests;
