//! Which layers see a prompt causally.

use serde_json::Value;

/// Which layers see a prompt causally; the others let its tokens see each other in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CausalLayers {
    /// All.
    #[default]
    All,
    /// Those with a sliding window: drafters that fill in a block at once over all tokens, and in order inside windows
    /// (DFlash, arXiv 2602.06036).
    Windowed,
    /// None.
    None,
}

impl CausalLayers {
    /// What a config says, with vLLM's precedence for its drafters: `is_causal` for all layers; where there is a
    /// `dflash_config`, its `causal` for all layers; otherwise each layer's entry in `layer_types`. `get` has the fields
    /// that are there and not null.
    ///
    /// # Errors
    /// A field of a wrong type, by name, and what is wrong with it.
    pub fn read<'a>(get: impl Fn(&str) -> Option<&'a Value>) -> Result<Self, (&'static str, String)> {
        let one = |field, v: &Value| match v.as_bool() {
            Some(true) => Ok(Self::All),
            Some(false) => Ok(Self::None),
            None => Err((field, format!("is {v}; true or false is needed"))),
        };
        if let Some(v) = get("is_causal") {
            return one("is_causal", v);
        }
        let Some(drafter) = get("dflash_config") else { return Ok(Self::All) };
        let Some(drafter) = drafter.as_object() else {
            return Err(("dflash_config", format!("is {drafter}; an object is needed")));
        };
        let given = |field| drafter.get(field).filter(|v| !v.is_null());
        if let Some(v) = given("causal") {
            return one("dflash_config.causal", v);
        }
        if given("use_swa").is_some_and(|v| v.as_bool() != Some(false)) {
            let why = "is not supported; list the layers with windows as sliding_attention in layer_types";
            return Err(("dflash_config.use_swa", why.into()));
        }
        if given("swa_window_size").is_some() {
            let why = "is not supported; give the window as sliding_window";
            return Err(("dflash_config.swa_window_size", why.into()));
        }
        Ok(if get("layer_types").is_some() { Self::Windowed } else { Self::None })
    }

    /// Whether a layer is one of them.
    pub fn holds(self, sliding_window: Option<usize>) -> bool {
        match self {
            Self::All => true,
            Self::Windowed => sliding_window.is_some(),
            Self::None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_first_that_says_so_decides() {
        let of = |config: Value| CausalLayers::read(|f| config.get(f).filter(|v| !v.is_null()));
        let types = json!(["sliding_attention", "full_attention"]);
        for (config, want) in [
            (json!({}), CausalLayers::All),
            (json!({"layer_types": types}), CausalLayers::All),
            (json!({"is_causal": false}), CausalLayers::None),
            (json!({"dflash_config": {}}), CausalLayers::None),
            (json!({"dflash_config": {"mask_token_id": 7}, "layer_types": types}), CausalLayers::Windowed),
            (json!({"dflash_config": {"causal": null}, "layer_types": types}), CausalLayers::Windowed),
            (json!({"dflash_config": {"causal": true}, "layer_types": types}), CausalLayers::All),
            (json!({"dflash_config": {"causal": false}, "layer_types": types}), CausalLayers::None),
            (json!({"is_causal": true, "dflash_config": {"causal": false}}), CausalLayers::All),
        ] {
            assert_eq!(of(config.clone()), Ok(want), "{config}");
        }
        for (config, field) in [
            (json!({"is_causal": "no"}), "is_causal"),
            (json!({"dflash_config": []}), "dflash_config"),
            (json!({"dflash_config": {"causal": 1}}), "dflash_config.causal"),
            (json!({"dflash_config": {"use_swa": true}}), "dflash_config.use_swa"),
            (json!({"dflash_config": {"swa_window_size": 8}}), "dflash_config.swa_window_size"),
        ] {
            assert_eq!(of(config).unwrap_err().0, field);
        }
        let holds = |c: CausalLayers| [c.holds(Some(8)), c.holds(None)];
        assert_eq!(holds(CausalLayers::Windowed), [true, false]);
        assert_eq!((holds(CausalLayers::All), holds(CausalLayers::None)), ([true; 2], [false; 2]));
    }
}
