//! `--kv-sharing-fast-prefill`: the model's last layers, where all of them read the caches of earlier ones, compute only
//! the rows whose logits are wanted. Nothing reads what the other rows would be there: they have no cache to fill.

use super::{
    StartupError,
    inputs::{FastTokens, TokenInputs},
};
use crate::models::needs::LayerNeeds;
use headway_attention::{AttnLayer, CommonAttentionMetadata, Result, step::fast_prefill::FastPrefill};
use headway_tensor::Exec;
use std::ops::RangeInclusive;

/// The layers after the last one that keeps anything of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharingLayers {
    /// By their index in the model.
    pub layers: RangeInclusive<usize>,
    /// The first one's mixer, as attention layers are numbered.
    pub first: AttnLayer,
}

impl SharingLayers {
    /// Those of a model; `None`: its last layer keeps keys and values, or a state.
    pub fn of(layers: &[LayerNeeds]) -> Option<Self> {
        let last = layers.last()?.layer;
        let owner = layers.iter().rfind(|l| l.shares_cache_of.is_none());
        let from = owner.map_or(0, |l| l.layer + 1);
        let first = layers.iter().position(|l| l.layer >= from && l.shares_cache_of.is_some())?;
        Some(Self { layers: layers[first].layer..=last, first: AttnLayer(first as u32) })
    }

    /// Those that compute wanted rows alone, as asked.
    ///
    /// # Errors
    /// Asked of a model that has none.
    pub fn asked(
        asked: bool,
        layers: &[LayerNeeds],
        architecture: &str,
    ) -> std::result::Result<Option<Self>, StartupError> {
        match (asked, Self::of(layers)) {
            (false, _) => Ok(None),
            (true, Some(all)) => Ok(Some(all)),
            (true, None) => Err(StartupError::Option {
                option: "--kv-sharing-fast-prefill",
                value: "true".into(),
                why: format!(
                    "is not supported with {architecture}, whose last layer has a cache or a state of its own, which \
                     every token has to be written to; leave it out"
                ),
            }),
        }
    }

    /// In words.
    pub fn describe(&self) -> String {
        match (self.layers.start(), self.layers.end()) {
            (first, last) if first == last => format!("layer {first} reads an earlier layer's cache"),
            (first, last) => format!("layers {first}-{last} read earlier layers' caches"),
        }
    }
}

/// Makes the batches of wanted rows, in buffers that live as long as the model.
pub(super) struct FastRows {
    first_layer: usize,
    batches: FastPrefill,
}

impl FastRows {
    /// For steps of at most so many requests and wanted rows.
    ///
    /// # Errors
    /// No memory.
    pub fn new(
        cx: &dyn Exec,
        sharing: &SharingLayers,
        max_num_reqs: usize,
        max_num_logits: usize,
    ) -> Result<Self> {
        let batches = FastPrefill::new(cx, max_num_reqs, max_num_logits)?;
        Ok(Self { first_layer: *sharing.layers.start(), batches })
    }

    /// Gives every group's inputs their batch of wanted rows, and the decoder those rows' positions; neither where all
    /// rows are wanted.
    ///
    /// # Errors
    /// As [`FastPrefill::attach`].
    pub fn attach(
        &mut self,
        cx: &dyn Exec,
        commons: &mut [CommonAttentionMetadata],
        tokens: &mut TokenInputs,
    ) -> Result<()> {
        if self.batches.attach(cx, commons)? {
            let short = commons.iter().find_map(|c| c.fast_prefill.as_ref());
            let positions = short.and_then(|c| c.inputs.positions.clone());
            tokens.fast = positions.map(|positions| FastTokens { first_layer: self.first_layer, positions });
        }
        Ok(())
    }

    /// How often a buffer could not be recycled.
    pub fn reallocs(&self) -> usize {
        self.batches.reallocs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::needs::{AttentionNeeds, MixerNeeds};

    fn layers(owners: &[(usize, Option<usize>)]) -> Vec<LayerNeeds> {
        let mixer = MixerNeeds::Attention(AttentionNeeds::new(2, 1, 8));
        let of = |&(layer, shares_cache_of)| LayerNeeds { layer, mixer: mixer.clone(), shares_cache_of };
        owners.iter().map(of).collect()
    }

    #[test]
    fn the_last_layers_without_anything_of_their_own() {
        let of = |owners: &[(usize, Option<usize>)]| {
            SharingLayers::of(&layers(owners)).map(|s| (s.layers, s.first.0))
        };
        assert_eq!(of(&[(0, None), (1, None), (2, Some(0)), (3, Some(1))]), Some((2..=3, 2)));
        // Sharing layers before an owner have to compute every row for it.
        assert_eq!(of(&[(0, None), (1, Some(0)), (2, None), (3, Some(2))]), Some((3..=3, 3)));
        assert_eq!(of(&[(0, None), (1, Some(0)), (2, None)]), None);
        // A layer whose second mixer has a cache counts as one that has.
        assert_eq!(of(&[(0, None), (1, Some(0)), (1, None), (2, Some(0))]), Some((2..=2, 3)));
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn a_model_without_such_layers_refuses_the_option() {
        let own = layers(&[(0, None), (1, None)]);
        assert_eq!(SharingLayers::asked(false, &own, "Llama").unwrap(), None);
        let e = SharingLayers::asked(true, &own, "Llama").unwrap_err().to_string();
        let words = ["--kv-sharing-fast-prefill true", "not supported with Llama", "leave it out"];
        assert!(words.iter().all(|w| e.contains(w)), "{e}");
    }
}
