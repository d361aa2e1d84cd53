//! Selection out of the catalogue, by the same [`choose`] as headway's own.

use super::{
    Catalog, CatalogBackend,
    data::{Platform, Priorities},
};
use crate::{
    AttentionError, BackendRequest, LayerNeed, Refusal, Result, RuleBook,
    process::select::{Candidate, Refused, choose},
};

/// A backend of the catalogue in the question of one layer.
#[derive(Clone, Debug)]
pub struct CatalogCandidate<'a> {
    /// The backend.
    pub backend: &'a CatalogBackend,
    /// Its rule book for the layer.
    pub rules: &'a RuleBook,
    /// Why it can't be used whatever the layer: what only the machine knows, such as a package that is missing.
    pub unavailable: Option<Refusal>,
    picks_alone: bool,
    asks_cache: bool,
}

impl Candidate for CatalogCandidate<'_> {
    fn rules(&self) -> &RuleBook {
        self.rules
    }
    fn refusals(&self, need: &LayerNeed) -> Vec<Refusal> {
        if self.picks_alone {
            return vec![];
        }
        if self.asks_cache && !need.has_cache {
            return self.rules.refusals(&LayerNeed { has_cache: true, ..need.clone() });
        }
        self.rules.refusals(need)
    }
    fn combination(&self, need: &LayerNeed) -> Option<Refusal> {
        self.backend.combination(need)
    }
    fn unavailable(&self) -> Option<Refusal> {
        self.unavailable.clone()
    }
}

/// The catalogue's answer for a layer.
#[derive(Clone, Debug)]
pub struct CatalogSelection<'a> {
    /// The backend that the layer gets.
    pub backend: &'a CatalogBackend,
    /// Its rule book for the layer.
    pub rules: &'a RuleBook,
    /// Backends that don't fit, in priority order.
    pub refused: Vec<Refused>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

impl Catalog {
    /// The order of preference for a layer.
    ///
    /// # Errors
    /// [`AttentionError::Selection`] for a platform without priorities, or a layer that no list is for.
    pub fn priorities(&self, need: &LayerNeed) -> Result<&[String]> {
        Ok(&self.list(need)?.backends)
    }

    /// The candidates for a layer, most preferred first. [`CatalogCandidate::unavailable`] may be set before
    /// [`Self::select_among`].
    ///
    /// # Errors
    /// As [`Self::priorities`].
    pub fn candidates(&self, need: &LayerNeed) -> Result<Vec<CatalogCandidate<'_>>> {
        self.priorities(need)?.iter().map(|name| self.candidate(self.backend(name)?, need)).collect()
    }

    /// A backend as a candidate, whether it stands in the layer's list or not.
    ///
    /// # Errors
    /// As [`Self::priorities`].
    pub fn candidate<'a>(
        &'a self,
        backend: &'a CatalogBackend,
        need: &LayerNeed,
    ) -> Result<CatalogCandidate<'a>> {
        Ok(CatalogCandidate {
            backend,
            rules: backend.rules(need),
            unavailable: None,
            picks_alone: self.list(need)?.picks_alone,
            asks_cache: self.platform(need)?.asks_cache_of_every_layer,
        })
    }

    /// Chooses a backend for a layer. `layer` names it in errors.
    ///
    /// # Errors
    /// As [`select`](crate::select), and [`Self::priorities`].
    pub fn select(
        &self,
        layer: &str,
        need: &LayerNeed,
        request: &BackendRequest,
    ) -> Result<CatalogSelection<'_>> {
        self.select_among(self.candidates(need)?, layer, need, request)
    }

    /// Chooses among candidates. A requested backend that isn't among them is asked too.
    ///
    /// # Errors
    /// As [`Self::select`].
    pub fn select_among<'a>(
        &'a self,
        mut candidates: Vec<CatalogCandidate<'a>>,
        layer: &str,
        need: &LayerNeed,
        request: &BackendRequest,
    ) -> Result<CatalogSelection<'a>> {
        let mut ignored = None;
        let mut named = None;
        if let Some((name, option)) = request.for_layer(need) {
            let backend = self.backend(name)?;
            if self.list(need)?.picks_alone {
                ignored = Some(format!(
                    "{option} {} counts for nothing for {} on {}: {} {} picks by itself there",
                    backend.name,
                    need.kind.name(),
                    need.platform,
                    self.engine,
                    self.version
                ));
            } else {
                let at = candidates.iter().position(|c| c.backend.name == backend.name);
                let at = at.unwrap_or(candidates.len());
                if at == candidates.len() {
                    candidates.push(self.candidate(backend, need)?);
                }
                named = Some((at, option));
            }
        }
        let choice = choose(&candidates, layer, need, named)?;
        let CatalogCandidate { backend, rules, .. } = candidates[choice.chosen].clone();
        let warnings = ignored.into_iter().chain(choice.warnings).collect();
        Ok(CatalogSelection { backend, rules, refused: choice.refused, warnings })
    }

    fn list(&self, need: &LayerNeed) -> Result<&Priorities> {
        self.platform(need)?.priorities.iter().find(|p| p.when.holds(need)).ok_or_else(|| {
            AttentionError::Selection(format!(
                "{} {} has no backends for {}; say which mixer a state-space layer has",
                self.engine,
                self.version,
                need.summary()
            ))
        })
    }

    fn platform(&self, need: &LayerNeed) -> Result<&Platform> {
        self.platforms.iter().find(|p| p.platform == need.platform).ok_or_else(|| {
            let known: Vec<_> = self.platforms.iter().map(|p| p.platform.as_str()).collect();
            AttentionError::Selection(format!(
                "the catalogue of {} {} has no priorities for {}; it has them for: {}",
                self.engine,
                self.version,
                need.platform,
                known.join(", ")
            ))
        })
    }
}
