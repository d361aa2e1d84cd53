//! Lifetime: the program. What another engine's backends are, as data: vLLM's rule books, priorities and builder
//! facts, by version.
//!
//! A data file (`data/vllm-X.Y.Z.json`) holds every backend as a [`RuleBook`], what varies as overrides under
//! conditions on the layer ([`condition`]), the combinations that no field can say as conditions with their texts, and
//! the orders of preference. Adding a version is adding a file and its line in `data.rs`; code is only needed where
//! a version brings a new kind of condition. `tools/vllm_catalogue.py` makes a file out of two conformance tables.
//!
//! What bears on the answers of vLLM beside the layer's own shape: [`LayerNeed::model_head_size`] and
//! [`LayerNeed::latent`] (some rules read the model's config), [`LayerNeed::num_heads`] a rank,
//! [`LayerNeed::kv_cache_dtype`] as the user gave it (`auto` where not given), the head size of an MLA layer as
//! `kv_lora_rank + qk_rope_head_dim`, [`LayerNeed::state_space`] for the mixers.
//!
//! ```
//! use headway_attention::{LayerNeed, BackendRequest, catalog::Catalog, process::rules::ComputeCapability};
//! let catalog = Catalog::load("0.33.0")?;
//! let need = LayerNeed {
//!     platform: "cuda".into(),
//!     compute_capability: Some(ComputeCapability(9, 0)),
//!     ..LayerNeed::default()
//! };
//! let selection = catalog.select("layer 0", &need, &BackendRequest::default())?;
//! assert_eq!(selection.backend.name, "FLASH_ATTN");
//! # Ok::<(), headway_attention::AttentionError>(())
//! ```

mod backend;
pub mod condition;
mod data;
mod device;
mod facts;
pub mod field;
mod patched;
mod select;
mod text;
mod version;

pub use backend::CatalogBackend;
pub use data::RegistryKind;
pub use device::{device_capability, device_names};
pub use facts::{
    BuilderFacts, Declared, ImplFacts, NamedQueryLen, QueryLen, QueryLenSupport, SpecChange, Stride,
};
pub use select::{CatalogCandidate, CatalogSelection};

use super::registry::nearest;
use crate::{AttentionError, LayerNeed, Result, RuleBook, process::rules::ComputeCapability};
use std::collections::HashMap;

/// One version of another engine's backends.
#[derive(Debug)]
pub struct Catalog {
    engine: String,
    version: String,
    source: String,
    capabilities: Vec<ComputeCapability>,
    backends: Vec<CatalogBackend>,
    by_name: HashMap<String, usize>,
    without_rule_book: Vec<String>,
    assumptions: Vec<String>,
    platforms: Vec<data::Platform>,
    vision: Vec<data::Priorities>,
}

impl Catalog {
    /// The versions there are, oldest first.
    pub fn versions() -> Vec<&'static str> {
        data::FILES.iter().map(|(version, _)| *version).collect()
    }

    /// The catalogue of a version (`0.33.0`; a leading `v` counts for nothing).
    ///
    /// # Errors
    /// [`AttentionError::CatalogVersion`] for a version that isn't there, with those that are and the nearest;
    /// [`AttentionError::Catalog`] for a data file that doesn't parse.
    pub fn load(version: &str) -> Result<Self> {
        let (version, text) = version::find(version)?;
        Self::parse(text)
            .map_err(|why| AttentionError::Catalog(format!("the catalogue of vLLM {version}: {why}")))
    }

    /// The newest version's catalogue.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn latest() -> Result<Self> {
        Self::load(data::FILES.last().map_or("", |(version, _)| version))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let file: data::File = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let mut backends = vec![];
        let mut by_name = HashMap::new();
        for entry in file.backends {
            let name = entry.name.clone();
            let backend =
                CatalogBackend::new(entry, &file.defaults).map_err(|why| format!("backend {name}: {why}"))?;
            if by_name.insert(name.clone(), backends.len()).is_some() {
                return Err(format!("backend {name} stands there twice"));
            }
            backends.push(backend);
        }
        let listed = file.platforms.iter().flat_map(|p| &p.priorities).flat_map(|p| &p.backends);
        if let Some(name) = listed.into_iter().find(|n| !by_name.contains_key(n.as_str())) {
            return Err(format!("a priority list names {name}, which has no rule book"));
        }
        Ok(Self {
            engine: file.engine,
            version: file.version,
            source: file.source,
            capabilities: file.capabilities,
            backends,
            by_name,
            without_rule_book: file.without_rule_book,
            assumptions: file.assumptions,
            platforms: file.platforms,
            vision: file.vision,
        })
    }

    /// The engine that it describes (`vllm`).
    pub fn engine(&self) -> &str {
        &self.engine
    }

    /// The engine's version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Where the facts come from.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The compute capabilities that the facts were asked for. Answers for others follow the data's ranges, and
    /// nobody checked them.
    pub fn capabilities(&self) -> &[ComputeCapability] {
        &self.capabilities
    }

    /// All backends.
    pub fn backends(&self) -> &[CatalogBackend] {
        &self.backends
    }

    /// The backend that users select by this name (case counts for nothing).
    ///
    /// # Errors
    /// [`AttentionError::Unknown`], with the names there are and the nearest by spelling.
    pub fn backend(&self, name: &str) -> Result<&CatalogBackend> {
        self.by_name.get(&name.to_ascii_uppercase()).map(|&i| &self.backends[i]).ok_or_else(|| {
            let names: Vec<_> = self.backends.iter().map(|b| b.name.as_str()).collect();
            AttentionError::Unknown {
                name: name.to_owned(),
                nearest: nearest(name, names.iter().copied()),
                known: names.join(", "),
            }
        })
    }

    /// Names that users can give which stand for no class, so that nothing is known of them.
    pub fn without_rule_book(&self) -> &[String] {
        &self.without_rule_book
    }

    /// What its answers take for granted: what only the machine knows.
    pub fn assumptions(&self) -> &[String] {
        &self.assumptions
    }

    /// The rule book of a backend on a device, for a plain layer.
    ///
    /// # Errors
    /// As [`Self::backend`].
    pub fn rules(&self, backend: &str, capability: Option<ComputeCapability>) -> Result<&RuleBook> {
        Ok(self.backend(backend)?.rules_on(capability))
    }

    /// The backends of a vision encoder on a device, most preferred first; some have no rule book.
    pub fn vision_priorities(&self, capability: ComputeCapability) -> &[String] {
        let need = LayerNeed { compute_capability: Some(capability), ..LayerNeed::default() };
        self.vision.iter().find(|p| p.when.holds(&need)).map_or(&[], |p| &p.backends)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn text() -> &'static str {
        data::FILES[0].1
    }

    fn parse(change: impl FnOnce(&mut Value)) -> Result<Catalog, String> {
        let mut file: Value = serde_json::from_str(text()).unwrap();
        change(&mut file);
        Catalog::parse(&file.to_string())
    }

    #[test]
    fn every_file_parses_under_its_own_version() {
        for (version, text) in data::FILES {
            let catalog = Catalog::parse(text).unwrap();
            assert_eq!(catalog.version(), *version);
            assert!(!catalog.backends().is_empty() && !catalog.capabilities().is_empty());
        }
    }

    #[test]
    fn unknown_fields_are_refused_everywhere() {
        for place in [
            "",
            "/defaults",
            "/defaults/rules",
            "/defaults/builder",
            "/defaults/impl",
            "/backends/0",
            "/backends/0/rules",
            "/backends/0/builder",
            "/backends/0/impl",
            "/backends/0/declared",
            "/backends/0/overrides/0",
            "/backends/0/overrides/0/when",
            "/backends/0/overrides/0/rules",
            "/backends/0/refuses/0",
            "/platforms/0",
            "/platforms/0/priorities/0",
            "/vision/0",
        ] {
            let e = parse(|file| file.pointer_mut(place).unwrap()["not_a_field"] = json!(1)).unwrap_err();
            assert!(e.contains("not_a_field"), "{place}: {e}");
        }
    }

    #[test]
    fn contradictions_are_refused() {
        let e = parse(|f| f["backends"][1]["name"] = json!("FLASH_ATTN")).unwrap_err();
        assert!(e.contains("FLASH_ATTN stands there twice"), "{e}");
        let e =
            parse(|f| f["platforms"][0]["priorities"][0]["backends"][0] = json!("FLASH_ATN")).unwrap_err();
        assert!(e.contains("FLASH_ATN, which has no rule book"), "{e}");
    }
}
