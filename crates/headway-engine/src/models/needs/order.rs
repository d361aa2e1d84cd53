//! Which mixer each layer has: every spelling of the order that configs use.

use super::{LayerNeeds, MOST_LAYERS, MixerNeeds, ModelNeeds, StateDims, attention::Shape, config::Config};
use crate::models::ModelError;
use serde_json::Value;

/// What a layer is made of, before dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Full,
    Sliding,
    Chunked,
    State,
    /// A state and attention side by side.
    Both,
    /// Two attention blocks in one layer.
    Twice,
    /// No mixer: feed-forward alone, or nothing.
    Nothing,
}

const LAYERS: &[&str] = &["num_hidden_layers", "n_layer", "n_layers", "num_layers"];
const LISTS: &[&str] = &["layer_types", "layers_block_type", "layer_block_types", "block_types"];

/// Reads a decoder.
pub(super) fn read(c: &Config<'_>) -> Result<ModelNeeds, ModelError> {
    let layers = match c.opt_count(LAYERS)? {
        Some(n) => n,
        None => named_layers(c).ok_or_else(|| c.error(LAYERS[0], "is missing"))?,
    };
    if layers > MOST_LAYERS {
        return Err(c.error(LAYERS[0], format!("is {layers}; at most {MOST_LAYERS} are expected")));
    }
    let kinds = kinds(c, layers)?;
    let attends = kinds.iter().any(|k| !matches!(k, Kind::State | Kind::Nothing));
    let keeps_state = kinds.iter().any(|k| matches!(k, Kind::State | Kind::Both));
    let shape = if attends { Some(Shape::read(c)?) } else { None };
    let state = if keeps_state { Some(StateDims::read(c)?) } else { None };
    let mut mixers = vec![];
    for (layer, kind) in kinds.iter().enumerate() {
        for mixer in mixers_of(c, *kind, layer, shape.as_ref(), state)? {
            mixers.push(LayerNeeds { layer, mixer, shares_cache_of: None });
        }
    }
    if mixers.is_empty() {
        return Err(c.error("layer_types", "leaves no layer that mixes tokens"));
    }
    share_caches(c, &mut mixers, layers)?;
    let (quantisation, kv_cache_dtype) = c.quantisation();
    Ok(ModelNeeds {
        architecture: c.architecture.clone(),
        num_layers: layers,
        dtype: c.dtype()?,
        quantisation,
        kv_cache_dtype,
        max_model_len: c.max_model_len()?,
        max_encoder_tokens: 0,
        experts: c.experts(),
        head_size: shape.as_ref().map(Shape::head_size),
        multimodal: c.multimodal,
        left_out: left_out(c, &mixers),
        mixers,
    })
}

/// The number of layers that a list of them tells.
fn named_layers(c: &Config<'_>) -> Option<usize> {
    let pattern = c.text("hybrid_override_pattern").map(|p| p.chars().count());
    pattern.or_else(|| LISTS.iter().find_map(|n| c.get(n)?.as_array().map(Vec::len)))
}

fn mixers_of(
    c: &Config<'_>,
    kind: Kind,
    layer: usize,
    shape: Option<&Shape>,
    state: Option<StateDims>,
) -> Result<Vec<MixerNeeds>, ModelError> {
    let state = || state.map(MixerNeeds::State);
    let Some(shape) = shape else {
        return Ok(state().into_iter().filter(|_| kind != Kind::Nothing).collect());
    };
    Ok(match kind {
        Kind::Nothing => vec![],
        Kind::State => state().into_iter().collect(),
        Kind::Both => state().into_iter().chain([shape.full()]).collect(),
        Kind::Twice => vec![shape.full(), shape.full()],
        Kind::Sliding => vec![shape.sliding(c)?],
        Kind::Chunked => vec![shape.chunked(c)?],
        Kind::Full => match grouped_heads(c, layer) {
            Some(group) => vec![shape.with_kv_heads((shape.num_heads() / group.max(1)).max(1))],
            None => vec![shape.full()],
        },
    })
}

/// Query heads to a key/value head, where a config gives it a layer (`block_configs`).
fn grouped_heads(c: &Config<'_>, layer: usize) -> Option<usize> {
    let attention = c.get("block_configs")?.get(layer)?.get("attention")?;
    attention.get("n_heads_in_group")?.as_u64().map(|n| n as usize)
}

fn kinds(c: &Config<'_>, layers: usize) -> Result<Vec<Kind>, ModelError> {
    if let Some(pattern) = c.text("hybrid_override_pattern") {
        return by_letters(c, pattern, layers);
    }
    for name in LISTS {
        let listed = c.per_layer(name, layers, |v| v.as_str().map(str::to_owned))?;
        if let Some(list) = listed {
            return list.iter().map(|t| by_name(c, name, t)).collect();
        }
    }
    if let Some(blocks) = c.per_layer("block_configs", layers, |b| Some(b.clone()))? {
        return blocks.iter().map(|b| by_block(c, b)).collect();
    }
    if let Some(k) = hybrid(c, layers)? {
        return Ok(k);
    }
    windows(c, layers)
}

/// `M-M*`: M a state, * attention, - and E no mixer.
fn by_letters(c: &Config<'_>, pattern: &str, layers: usize) -> Result<Vec<Kind>, ModelError> {
    let kinds: Vec<Kind> = pattern
        .chars()
        .map(|p| match p {
            'M' => Ok(Kind::State),
            '*' => Ok(Kind::Full),
            '-' | 'E' => Ok(Kind::Nothing),
            other => {
                Err(c.error("hybrid_override_pattern", format!("has the letter {other}; known: M, *, -, E")))
            }
        })
        .collect::<Result<_, _>>()?;
    match kinds.len() == layers {
        true => Ok(kinds),
        false => {
            Err(c
                .error("hybrid_override_pattern", format!("has {} letters for {layers} layers", kinds.len())))
        }
    }
}

fn by_name(c: &Config<'_>, list: &str, name: &str) -> Result<Kind, ModelError> {
    Ok(match name {
        "full_attention" | "attention" | "global_attention" => Kind::Full,
        "sliding_attention" | "local_attention" => Kind::Sliding,
        "chunked_attention" => Kind::Chunked,
        "linear_attention" | "mamba" | "mamba2" | "conv" => Kind::State,
        "hybrid" => Kind::Both,
        "mlp" | "moe" => Kind::Nothing,
        other => {
            return Err(c.unsupported(
                format!("{list} with {other}"),
                "known: full_attention, sliding_attention, chunked_attention, linear_attention, mamba, conv, hybrid, mlp, moe",
            ));
        }
    })
}

fn by_block(c: &Config<'_>, block: &Value) -> Result<Kind, ModelError> {
    let says = |name: &str| {
        block.get("attention").and_then(|a| a.get(name)).and_then(Value::as_bool).unwrap_or(false)
    };
    if block.get("attention").is_none() {
        return Err(c.error("block_configs", "has a block without attention"));
    }
    Ok(if says("no_op") || says("replace_with_linear") { Kind::Nothing } else { Kind::Full })
}

/// Orders of attention among states.
fn hybrid(c: &Config<'_>, layers: usize) -> Result<Option<Vec<Kind>>, ModelError> {
    let attention_where = |f: &dyn Fn(usize) -> bool| {
        Some((0..layers).map(|i| if f(i) { Kind::Full } else { Kind::State }).collect())
    };
    if let Some(list) = c.per_layer("attn_type_list", layers, Value::as_u64)? {
        return Ok(attention_where(&|i| list[i] == 1));
    }
    if let Some(full) = c.get("linear_attn_config").and_then(|l| l.get("full_attn_layers")?.as_array()) {
        // Counted from 1.
        return Ok(attention_where(&|i| full.iter().any(|v| v.as_u64() == Some(i as u64 + 1))));
    }
    if let Some(full) = c.indices("full_attn_idxs")? {
        return Ok(attention_where(&|i| full.contains(&i)));
    }
    Ok(match c.model_type.as_str() {
        "bamba" => {
            let full = c.indices("attn_layer_indices")?.unwrap_or_default();
            attention_where(&|i| full.contains(&i))
        }
        "jamba" => {
            let (period, offset) = (c.count(&["attn_layer_period"])?, c.count(&["attn_layer_offset"])?);
            attention_where(&|i| i % period == offset)
        }
        "mamba" | "mamba2" | "falcon_mamba" => attention_where(&|_| false),
        "falcon_h1" => Some(vec![Kind::Both; layers]),
        "longcat_flash" => Some(vec![Kind::Twice; layers]),
        _ => match c.opt_count(&["full_attention_interval"])? {
            Some(n) => attention_where(&|i| (i + 1) % n == 0),
            None => None,
        },
    })
}

/// Orders of windows among full attention.
fn windows(c: &Config<'_>, layers: usize) -> Result<Vec<Kind>, ModelError> {
    let short = |kind: Kind, f: &dyn Fn(usize) -> bool| {
        (0..layers).map(|i| if f(i) { kind } else { Kind::Full }).collect()
    };
    if let Some(list) = c.per_layer("hybrid_layer_pattern", layers, Value::as_u64)? {
        return Ok(short(Kind::Sliding, &|i| list[i] == 1));
    }
    if c.model_type.starts_with("llama4") {
        // Layers with positions see their chunk, those without see all.
        let rope = c.per_layer("no_rope_layers", layers, Value::as_u64)?;
        let every = c.opt_count(&["no_rope_layer_interval"])?.unwrap_or(4);
        return Ok(short(Kind::Chunked, &|i| match &rope {
            Some(list) => list[i] == 1,
            None => (i + 1) % every != 0,
        }));
    }
    if c.opt_count(&["sliding_window", "sliding_window_size"])?.is_none() {
        return Ok(vec![Kind::Full; layers]);
    }
    if let Some(pattern) = c.text("sliding_window_pattern") {
        let letters: Vec<char> = pattern.chars().collect();
        return Ok(short(Kind::Sliding, &|i| letters.get(i % letters.len().max(1)) == Some(&'L')));
    }
    let every = match c.get("sliding_window_pattern").or_else(|| c.get("_sliding_window_pattern")) {
        Some(v) => Some(v.as_u64().filter(|n| *n > 0).ok_or_else(|| {
            c.error("sliding_window_pattern", format!("is {v}; a whole number above 0, or letters L and G"))
        })? as usize),
        None => match c.model_type.as_str() {
            "gemma2" | "gpt_oss" => Some(2),
            "gemma3" | "gemma3_text" => Some(6),
            "gemma3n_text" => Some(5),
            "cohere2" | "olmo3" | "exaone4" => Some(4),
            _ => None,
        },
    };
    if let Some(n) = every {
        return Ok(short(Kind::Sliding, &|i| (i + 1) % n != 0));
    }
    let switched = c.get("use_sliding_window").and_then(Value::as_bool);
    let off_unless_switched = ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"];
    Ok(match switched {
        Some(false) => vec![Kind::Full; layers],
        None if off_unless_switched.contains(&c.model_type.as_str()) => vec![Kind::Full; layers],
        Some(true) => {
            let first = c.opt_count(&["max_window_layers"])?.unwrap_or(0);
            short(Kind::Sliding, &|i| i >= first)
        }
        None => vec![Kind::Sliding; layers],
    })
}

/// The last `num_kv_shared_layers` layers read the cache of the last layer of their kind before them.
fn share_caches(c: &Config<'_>, mixers: &mut [LayerNeeds], layers: usize) -> Result<(), ModelError> {
    let Some(n) = c.get("num_kv_shared_layers").and_then(Value::as_u64).filter(|n| *n > 0) else {
        return Ok(());
    };
    let first = layers.saturating_sub(n as usize);
    if first == 0 {
        return Err(c.error("num_kv_shared_layers", format!("is {n}; fewer than the {layers} layers")));
    }
    let owners = mixers.to_vec();
    for m in mixers.iter_mut().filter(|m| m.layer >= first) {
        m.shares_cache_of = owners.iter().rposition(|o| o.layer < first && o.mixer == m.mixer);
    }
    Ok(())
}

/// What the needs don't tell of this model.
fn left_out(c: &Config<'_>, mixers: &[LayerNeeds]) -> Vec<String> {
    let mut out = vec![];
    if mixers.iter().any(|m| matches!(m.mixer, MixerNeeds::Mla(l) if l.index_topk.is_some())) {
        out.push(
            "the cache of the index that chooses keys is not counted; it comes on top of the KV cache".into(),
        );
    }
    if c.get("sparse_attention_config").is_some() {
        out.push(
            "sparse_attention_config: its layers are read as full attention; engines give them a backend and an index \
             cache of their own"
                .into(),
        );
    }
    if let Some(n) = c.get("num_nextn_predict_layers").and_then(Value::as_u64).filter(|n| *n > 0) {
        out.push(format!("num_nextn_predict_layers: {n} layers for drafting are not counted"));
    }
    if c.multimodal {
        out.push("vision and audio parts: their encoders are not looked at".into());
    }
    out
}
