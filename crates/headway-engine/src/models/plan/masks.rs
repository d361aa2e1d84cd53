//! What a model's attention sees besides what causality and windows say.

use super::{CausalLayers, MixerPlan, ModelPlan};

/// Masks of all attention layers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MaskPlan {
    /// Requests may name ranges of the prompt whose tokens see each other in both directions (PrefixLM: the tokens of
    /// an image), whatever a layer's window says. `is_mm_prefix_lm` in `config.json`.
    pub mm_prefix: bool,
    /// Layers without a window of their own see the prompt, and of the tokens after it the last so many, with the
    /// query's own (R-SWA, arXiv 2606.23050). `rswa_window` in `config.json`.
    pub rswa_window: Option<usize>,
    /// In which layers no token of a prompt is seen by an earlier one. In the others a prompt's tokens see each other in
    /// both directions, and each generated token what is before it. `is_causal` or `dflash_config` in `config.json`.
    pub causal: CausalLayers,
}

impl MaskPlan {
    /// Why a model can't have these masks: what is in the way, and what to do.
    pub fn refused(&self, plan: &ModelPlan) -> Option<(&'static str, &'static str)> {
        if *self == Self::default() {
            return None;
        }
        // An encoder's attention is what its architecture says.
        if plan.pooling.is_some() {
            return (self.mm_prefix || self.rswa_window.is_some()).then_some((
                "is_mm_prefix_lm or rswa_window in an encoder",
                "leave them out: every token sees every other",
            ));
        }
        let mut mixers = plan.mixers().map(|(_, m)| m);
        if !mixers.all(|m| matches!(m, MixerPlan::Attention(_))) {
            let what = "is_mm_prefix_lm, rswa_window, is_causal or dflash_config beside layers that are not softmax attention";
            return Some((what, "leave them out, or use a model of softmax attention alone"));
        }
        (self.rswa_window.is_some() && self.causal != CausalLayers::All).then_some((
            "rswa_window together with is_causal false or dflash_config",
            "leave one of them out: R-SWA sees its prompt causally",
        ))
    }
}
