//! Tensors of the files that a loaded model never asked for. A layer too many means that config and
//! weights don't belong together: answers would be nonsense. Anything else is reported, but for what every published file of
//! its kind has: the dense layer behind an encoder's first token (`pooler`), which pooled embeddings don't go through.

use super::{ModelError, ModelPlan};
use crate::loading::Checkpoint;
use std::collections::HashSet;

/// Tensors that converters add and that hold nothing that the config doesn't say.
const DERIVED: [&str; 4] =
    ["rotary_emb.inv_freq", "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

/// Names that nobody asked for and that say something of their own, in the order of the files.
///
/// # Errors
/// [`ModelError::ExtraLayer`].
pub(super) fn unused(
    plan: &ModelPlan,
    checkpoint: &dyn Checkpoint,
    used: &HashSet<String>,
) -> Result<Vec<String>, ModelError> {
    let mut left = beyond(plan, checkpoint, used)?;
    left.retain(|name| !(plan.lm_head.is_none() && is_copy_of_embedding(plan, checkpoint, name)));
    Ok(left)
}

/// Names that are not `used`, without a look into the tensors.
///
/// # Errors
/// [`ModelError::ExtraLayer`].
pub(super) fn beyond(
    plan: &ModelPlan,
    checkpoint: &dyn Checkpoint,
    used: &HashSet<String>,
) -> Result<Vec<String>, ModelError> {
    let mut left = vec![];
    for name in checkpoint.names() {
        let of_training = plan.pooling.is_some() && name.split('.').any(|part| part == "pooler");
        if used.contains(name) || of_training || DERIVED.iter().any(|d| name.ends_with(d)) {
            continue;
        }
        if layer_of(name).is_some_and(|layer| layer >= plan.layers.len() + plan.drafting_layers) {
            return Err(ModelError::ExtraLayer {
                file: checkpoint.describe(),
                name: name.into(),
                layers: plan.layers.len(),
            });
        }
        left.push(name.to_owned());
    }
    Ok(left)
}

/// `model.layers.7.mlp…` and `blk.7.…` are of layer 7.
fn layer_of(name: &str) -> Option<usize> {
    let rest = ["model.layers.", "backbone.layers.", "encoder.layer.", "blk."]
        .iter()
        .find_map(|p| name.strip_prefix(p))?;
    rest.split('.').next()?.parse().ok()
}

/// A head that is stored although it is tied, with the embedding's very bytes.
fn is_copy_of_embedding(plan: &ModelPlan, checkpoint: &dyn Checkpoint, name: &str) -> bool {
    if name != "lm_head.weight" && name != "output.weight" {
        return false;
    }
    match (checkpoint.get(name), checkpoint.get(&plan.embedding)) {
        (Ok(head), Ok(embedding)) => {
            head.dtype() == embedding.dtype() && head.bytes().as_slice() == embedding.bytes().as_slice()
        }
        _ => false,
    }
}

/// What to tell of unused tensors; `None` where there are none.
pub fn warning(unused: &[String]) -> Option<String> {
    let first = unused.iter().take(3).map(|n| format!("'{n}'")).collect::<Vec<_>>().join(", ");
    match unused.len() {
        0 => None,
        n @ 1..=3 => Some(format!("{n} tensors of the files are not used by this model: {first}")),
        n => Some(format!("{n} tensors of the files are not used by this model: {first} and {} more", n - 3)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_read_from_names() {
        assert_eq!(layer_of("model.layers.7.mlp.up_proj.weight"), Some(7));
        assert_eq!(layer_of("blk.12.attn_q.weight"), Some(12));
        assert_eq!(layer_of("backbone.layers.3.mixer.D"), Some(3));
        assert_eq!(layer_of("model.vision.layers.3.weight"), None);
        assert_eq!(layer_of("model.norm.weight"), None);
    }

    #[test]
    fn warnings_are_short() {
        let names = |n: usize| (0..n).map(|i| format!("t{i}")).collect::<Vec<_>>();
        assert_eq!(warning(&[]), None);
        assert!(warning(&names(5)).is_some_and(|w| w.ends_with("'t0', 't1', 't2' and 2 more")));
    }
}
