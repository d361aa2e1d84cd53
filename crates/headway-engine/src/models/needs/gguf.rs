//! Needs out of a GGUF header: the same facts under the architecture's prefix.

use super::{AttentionNeeds, LayerNeeds, MOST_LAYERS, MixerNeeds, MlaNeeds, ModelNeeds, Reach, StateDims};
use crate::{
    loading::{GgufFile, gguf::Metadata},
    models::ModelError,
};
use headway_tensor::{DType, WeightType};

struct Keys<'a> {
    m: &'a Metadata,
    arch: &'a str,
}

impl Keys<'_> {
    fn opt(&self, key: &str) -> Result<Option<usize>, ModelError> {
        Ok(self.m.opt_usize(&format!("{}.{key}", self.arch))?)
    }

    fn get(&self, key: &str) -> Result<usize, ModelError> {
        Ok(self.m.usize(&format!("{}.{key}", self.arch))?)
    }

    /// A number for all layers, or one a layer.
    fn per_layer(&self, key: &str, layers: usize) -> Result<Option<Vec<usize>>, ModelError> {
        Ok(self.m.opt_per_layer(&format!("{}.{key}", self.arch), layers)?)
    }
}

/// Reads a header.
pub(super) fn read(g: &GgufFile) -> Result<ModelNeeds, ModelError> {
    let k = Keys { m: g.metadata(), arch: g.architecture()? };
    let layers = k.get("block_count")?;
    if layers > MOST_LAYERS {
        let key = format!("{}.block_count", k.arch);
        return Err(ModelError::Field {
            file: g.path().display().to_string(),
            field: key,
            why: format!("is {layers}; at most {MOST_LAYERS} are expected"),
        });
    }
    let mixers = mixers(&k, layers)?;
    let quantised = g.tensors().any(|t| matches!(t.dtype, WeightType::Quant(_)));
    let head_size = mixers.iter().find_map(|m| match &m.mixer {
        MixerNeeds::Attention(a) => Some(a.head_size),
        MixerNeeds::Mla(l) => Some(l.head_size()),
        MixerNeeds::State(_) => None,
    });
    Ok(ModelNeeds {
        architecture: format!("{} (GGUF)", k.arch),
        num_layers: layers,
        dtype: dtype(g, quantised),
        quantisation: quantised.then(|| "GGUF blocks".to_owned()),
        kv_cache_dtype: None,
        max_model_len: k.opt("context_length")?,
        max_encoder_tokens: 0,
        experts: k.opt("expert_used_count")?.zip(k.opt("expert_count")?).filter(|(k, n)| *k > 0 && k <= n),
        head_size,
        multimodal: false,
        left_out: vec![],
        mixers,
    })
}

/// The type of the largest tensor; none where weights are quantised.
fn dtype(g: &GgufFile, quantised: bool) -> Option<DType> {
    if quantised {
        return Some(DType::F16);
    }
    let largest = g.tensors().max_by_key(|t| t.shape.iter().product::<usize>())?;
    match largest.dtype {
        WeightType::F32 => Some(DType::F32),
        WeightType::BF16 => Some(DType::BF16),
        _ => Some(DType::F16),
    }
}

fn mixers(k: &Keys<'_>, layers: usize) -> Result<Vec<LayerNeeds>, ModelError> {
    let kv_heads = k.per_layer("attention.head_count_kv", layers)?;
    let state = state(k)?;
    let attends = |layer: usize| kv_heads.as_ref().is_none_or(|h| h[layer] > 0);
    if state.is_some() && kv_heads.is_none() {
        // A header that has states and doesn't say which layers attend has none that do.
        return Ok((0..layers)
            .filter_map(|layer| {
                Some(LayerNeeds { layer, mixer: MixerNeeds::State(state?), shares_cache_of: None })
            })
            .collect());
    }
    let heads = k.per_layer("attention.head_count", layers)?;
    let heads = heads.ok_or_else(|| k.m.bad(&format!("{}.attention.head_count", k.arch), "is missing"))?;
    let window = k.opt("attention.sliding_window")?;
    let every = k.opt("attention.sliding_window_pattern").unwrap_or(None).or(match k.arch {
        "gemma2" | "gpt-oss" => Some(2),
        "gemma3" => Some(6),
        _ => None,
    });
    (0..layers)
        .map(|layer| {
            let mixer = match (attends(layer), state) {
                (false, Some(s)) => MixerNeeds::State(s),
                _ => attention(
                    k,
                    heads[layer],
                    kv_heads.as_ref().map(|h| h[layer]),
                    reach(window, every, layer),
                )?,
            };
            Ok(LayerNeeds { layer, mixer, shares_cache_of: None })
        })
        .collect()
}

fn reach(window: Option<usize>, every: Option<usize>, layer: usize) -> Reach {
    match (window, every) {
        (Some(w), Some(n)) if !(layer + 1).is_multiple_of(n.max(1)) => Reach::Window(w),
        (Some(w), None) => Reach::Window(w),
        _ => Reach::All,
    }
}

fn attention(k: &Keys<'_>, heads: usize, kv: Option<usize>, reach: Reach) -> Result<MixerNeeds, ModelError> {
    if let Some(kv_lora_rank) = k.opt("attention.kv_lora_rank")? {
        let qk_rope_head_dim = k.get("rope.dimension_count")?;
        let key = match k.opt("attention.key_length_mla")? {
            Some(n) => n,
            None => k.get("attention.key_length")?,
        };
        let v_head_dim = match k.opt("attention.value_length_mla")? {
            Some(n) => n,
            None => k.get("attention.value_length")?,
        };
        return Ok(MixerNeeds::Mla(MlaNeeds {
            num_heads: heads,
            kv_lora_rank,
            qk_nope_head_dim: key.saturating_sub(qk_rope_head_dim),
            qk_rope_head_dim,
            v_head_dim,
            index_topk: None,
        }));
    }
    let head_size = match k.opt("attention.key_length")? {
        Some(n) => n,
        None => k.get("embedding_length")? / heads.max(1),
    };
    Ok(MixerNeeds::Attention(AttentionNeeds {
        head_size_v: k.opt("attention.value_length")?.unwrap_or(head_size),
        reach,
        sinks: k.arch == "gpt-oss",
        logit_soft_cap: k.arch == "gemma2",
        ..AttentionNeeds::new(heads, kv.filter(|n| *n > 0).unwrap_or(heads), head_size)
    }))
}

/// Mamba's dimensions, where the header has them.
fn state(k: &Keys<'_>) -> Result<Option<StateDims>, ModelError> {
    let Some(state) = k.opt("ssm.state_size")? else { return Ok(None) };
    let (inner, conv) = (k.get("ssm.inner_size")?, k.get("ssm.conv_kernel")?);
    Ok(Some(match k.opt("ssm.group_count")? {
        // The header's time-step rank is the number of heads of Mamba-2.
        Some(groups) => {
            let heads = k.get("ssm.time_step_rank")?;
            let (head_dim, chunk) = (inner / heads.max(1), super::DEFAULT_CHUNK);
            StateDims::Mamba2 { heads, head_dim, groups, state, conv, chunk, dtype: None }
        }
        None => StateDims::Mamba1 { inner, state, conv, dtype: None },
    }))
}
