//! Whose backends are asked: headway's own registry, or vLLM's catalogue.

use super::{ExplainError, described::Described};
use headway_attention::{
    AttentionError, BackendRequest, DynBackend, LayerNeed, Registry, Selection,
    catalog::Catalog,
    process::select::{Refused, reasons, select},
};
use std::sync::Arc;

/// The backends that layers could get.
pub enum Contenders {
    /// This build's, in order of preference.
    Own(Registry),
    /// Another engine's, as the catalogue describes them.
    Catalog(Arc<Catalog>),
}

impl Contenders {
    /// `--engine headway`, `vllm` or `vllm:VERSION`.
    ///
    /// # Errors
    /// An unknown engine or version.
    pub fn parse(engine: &str, registry: Registry) -> Result<Self, ExplainError> {
        let (name, version) = match engine.split_once(':') {
            Some((n, v)) => (n, Some(v)),
            None => (engine, None),
        };
        match (name.to_ascii_lowercase().as_str(), version) {
            ("headway", None) => Ok(Self::Own(registry)),
            ("headway", Some(v)) => Err(ExplainError::Option {
                option: "--engine",
                value: engine.into(),
                why: format!("this build has one version of headway; leave :{v} out"),
            }),
            ("vllm", None) => Ok(Self::Catalog(Arc::new(Catalog::latest()?))),
            ("vllm", Some(v)) => Ok(Self::Catalog(Arc::new(Catalog::load(v)?))),
            _ => {
                let versions = Catalog::versions().into_iter().map(|v| format!("vllm:{v}"));
                let known: Vec<String> =
                    ["headway".to_owned(), "vllm".to_owned()].into_iter().chain(versions).collect();
                Err(ExplainError::unknown("--engine", engine, &known))
            }
        }
    }

    /// The engine, with its version where there are several.
    pub fn engine(&self) -> String {
        match self {
            Self::Own(_) => "headway".into(),
            Self::Catalog(c) => format!("{} {}", c.engine(), c.version()),
        }
    }

    /// Chooses for a layer.
    ///
    /// # Errors
    /// As [`select`].
    pub fn select(
        &self,
        layer: &str,
        need: &LayerNeed,
        request: &BackendRequest,
    ) -> Result<Selection, AttentionError> {
        match self {
            Self::Own(registry) => select(registry, layer, need, request),
            Self::Catalog(catalog) => {
                let s = catalog.select(layer, need, request)?;
                let backend = Arc::new(Described::new(catalog.clone(), &s.backend.name, need)?);
                Ok(Selection { backend, refused: s.refused, warnings: s.warnings })
            }
        }
    }

    /// Every candidate with what is against it, for a layer that gets none.
    pub fn refused(&self, need: &LayerNeed, request: &BackendRequest) -> Vec<Refused> {
        let named = request.for_layer(need).map(|(n, _)| n);
        let of = |backend: &str, reasons: Vec<_>| Refused { backend: backend.to_owned(), reasons };
        let mut all: Vec<Refused> = match self {
            Self::Own(registry) => {
                let made = named.and_then(|n| registry.get_on(n, &need.platform).ok());
                // One made of two is in no list.
                let made = made.filter(|b| b.parts().is_some());
                registry.iter().chain(&made).map(|b| of(&b.rules().name, reasons(b, need))).collect()
            }
            Self::Catalog(catalog) => {
                let mut candidates = catalog.candidates(need).unwrap_or_default();
                let extra = named.and_then(|n| catalog.backend(n).ok());
                if let Some(extra) = extra.filter(|e| !candidates.iter().any(|c| c.backend.name == e.name)) {
                    candidates.extend(catalog.candidate(extra, need));
                }
                candidates.iter().map(|c| of(&c.backend.name, reasons(c, need))).collect()
            }
        };
        all.retain(|r| !r.reasons.is_empty());
        all
    }

    /// A backend's place in a layer's order of preference; the last for one that isn't in it.
    pub fn rank(&self, need: &LayerNeed, backend: &str) -> usize {
        let at = match self {
            Self::Own(registry) => {
                let here = |b: &&Arc<dyn DynBackend>| {
                    b.rules().kind == need.kind && b.rules().platform == need.platform
                };
                registry.iter().filter(here).position(|b| b.rules().name == backend)
            }
            Self::Catalog(catalog) => {
                catalog.priorities(need).ok().and_then(|p| p.iter().position(|n| n == backend))
            }
        };
        at.unwrap_or(usize::MAX - 1)
    }

    /// A backend's name as it is written, by any spelling.
    ///
    /// # Errors
    /// An unknown one, with those there are and the nearest by spelling.
    pub fn backend_name(&self, name: &str) -> Result<String, AttentionError> {
        Ok(match self {
            Self::Own(registry) => registry.get(name)?.rules().name.to_string(),
            Self::Catalog(catalog) => catalog.backend(name)?.name.clone(),
        })
    }

    /// Every KV cache dtype that a backend on this platform takes.
    pub fn kv_cache_dtypes(&self, need: &LayerNeed) -> Vec<String> {
        let mut names = vec![];
        let mut add = |list: &[headway_attention::process::rules::KvCacheDType]| {
            for d in list {
                if !names.contains(&d.0.to_string()) {
                    names.push(d.0.to_string());
                }
            }
        };
        match self {
            Self::Own(registry) => registry.iter().for_each(|b| add(&b.rules().kv_cache_dtypes)),
            Self::Catalog(catalog) => {
                catalog.backends().iter().for_each(|b| add(&b.rules(need).kv_cache_dtypes));
            }
        }
        names
    }
}
