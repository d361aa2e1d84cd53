//! Bounds on the few hyperparameters that every model of the field has.
//!
//! Whatever the architecture, these numbers size loops and buffers, so they are checked once, before any
//! plan is made of them. Absent keys pass: the plan asks for what it needs.
//!
//! Not for consistency with tensor shapes: the plan compares those.

use super::metadata::Metadata;
use super::value::Value;
use crate::loading::LoadError;

/// Most layers that ggml's tools allow for.
pub const MAX_LAYERS: usize = 512;
/// More heads than any model has by an order of magnitude.
const MAX_HEADS: usize = 4096;
/// Bounds on single sizes: key behind the architecture's name, largest value.
const SIZES: [(&str, usize); 9] = [
    ("embedding_length", 1 << 20),
    ("context_length", 1 << 30),
    ("vocab_size", 1 << 26),
    ("attention.key_length", 1 << 16),
    ("attention.value_length", 1 << 16),
    ("rope.dimension_count", 1 << 16),
    ("expert_count", 1 << 16),
    ("expert_used_count", 1 << 16),
    ("attention.sliding_window", 1 << 31),
];

/// Checks layer count, head counts and sizes of the architecture that the file names.
///
/// # Errors
/// [`LoadError::MissingKey`] without `general.architecture`; [`LoadError::BadKey`] naming the key and its
/// bounds for a count of 0 or beyond reason, for KV heads that exceed or do not divide the heads, and
/// for an embedding length that the heads do not divide while no head size is given.
pub fn check_hyperparameters(metadata: &Metadata) -> Result<(), LoadError> {
    let arch = metadata.text("general.architecture")?;
    let key = |name: &str| format!("{arch}.{name}");
    let layers = bounded(metadata, &key("block_count"), 1, MAX_LAYERS)?;
    for (name, most) in SIZES {
        // Some converters write 0 for "no window" and "no experts".
        let least = usize::from(!name.starts_with("expert") && !name.ends_with("window"));
        bounded(metadata, &key(name), least, most)?;
    }
    let lengths = layers.map_or(Ok(None), |n| metadata.opt_per_layer(&key("feed_forward_length"), n))?;
    if let Some(bad) = lengths.iter().flatten().find(|&&length| length > 1 << 24) {
        return Err(metadata.bad(&key("feed_forward_length"), format!("must be at most 16777216, is {bad}")));
    }
    check_heads(metadata, &key, layers)
}

/// The size at `key`, checked to lie in `least..=most`.
fn bounded(metadata: &Metadata, key: &str, least: usize, most: usize) -> Result<Option<usize>, LoadError> {
    let value = metadata.opt_usize(key)?;
    match value {
        Some(v) if !(least..=most).contains(&v) => {
            Err(metadata.bad(key, format!("must be {least} to {most}, is {v}")))
        }
        value => Ok(value),
    }
}

fn check_heads(
    metadata: &Metadata,
    key: &impl Fn(&str) -> String,
    layers: Option<usize>,
) -> Result<(), LoadError> {
    let (heads_key, kv_key) = (key("attention.head_count"), key("attention.head_count_kv"));
    // A state-space layer has no heads: its entry (or the only one) is 0.
    let per_layer = matches!(metadata.get(&heads_key), Some(Value::Array(_)));
    let least = usize::from(!per_layer && !metadata.contains(&key("ssm.state_size")));
    let layers = layers.unwrap_or(1);
    let Some(heads) = metadata.opt_per_layer(&heads_key, layers)? else { return Ok(()) };
    let kv_heads = metadata.opt_per_layer(&kv_key, layers)?.unwrap_or_else(|| heads.clone());
    let kv_per_layer = matches!(metadata.get(&kv_key), Some(Value::Array(_)));
    for (&heads, &kv) in heads.iter().zip(&kv_heads) {
        if !(least..=MAX_HEADS).contains(&heads) {
            return Err(metadata.bad(&heads_key, format!("must be {least} to {MAX_HEADS}, is {heads}")));
        }
        let no_kv = kv == 0 && (heads == 0 || kv_per_layer || least == 0);
        if !no_kv && (kv == 0 || kv > heads || !heads.is_multiple_of(kv)) {
            return Err(metadata.bad(&kv_key, format!("must divide the {heads} attention heads, is {kv}")));
        }
    }
    let embedding = metadata.opt_usize(&key("embedding_length"))?;
    match (embedding, heads.first()) {
        (Some(embedding), Some(&heads))
            if heads > 0
                && !metadata.contains(&key("attention.key_length"))
                && !embedding.is_multiple_of(heads) =>
        {
            let what = format!("must divide the embedding length {embedding}, is {heads}");
            Err(metadata.bad(&heads_key, what))
        }
        _ => Ok(()),
    }
}
