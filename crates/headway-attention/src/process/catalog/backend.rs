//! A backend of the catalogue: its rule book and builder as they are for a layer, its refusals.

use super::{
    condition::Condition,
    data::{self, RegistryKind},
    facts::{BuilderFacts, Declared, ImplFacts, SpecChange},
    patched::Patched,
};
use crate::{
    BuilderPlan, GraphSupport, KvCacheSpec, LayerNeed, Refusal, RuleBook, process::rules::ComputeCapability,
};
use serde_json::Value;

/// What the catalogue says of one backend.
#[derive(Debug)]
pub struct CatalogBackend {
    /// The name that users select; [`RuleBook::name`].
    pub name: String,
    /// The class's own name.
    pub own_name: String,
    /// The registry that it stands in.
    pub registry: RegistryKind,
    /// The class.
    pub class: String,
    /// The module of the class.
    pub module: String,
    /// The impl; `None`: the class offers none.
    pub implementation: Option<ImplFacts>,
    /// What the class declares.
    pub declared: Declared,
    /// What it makes of a cache spec; `None`: nothing.
    pub spec_change: Option<SpecChange>,
    /// It still offers a KV cache shape of its own.
    pub offers_kv_cache_shape: bool,
    rules: Varying<RuleBook>,
    builder: Varying<BuilderFacts>,
    refuses: Vec<data::Refusal>,
}

/// A section of the entry with the conditions of its overrides.
#[derive(Debug)]
struct Varying<T> {
    when: Vec<Condition>,
    values: Patched<T>,
}

impl<T> Varying<T>
where
    T: serde::de::DeserializeOwned,
{
    fn new(
        base: data::Object,
        overrides: &[data::Override],
        section: fn(&data::Override) -> &Option<data::Object>,
    ) -> Result<Self, String> {
        let (when, patches): (Vec<_>, Vec<_>) =
            overrides.iter().filter_map(|o| Some((o.when.clone(), section(o).clone()?))).unzip();
        Ok(Self { when, values: Patched::new(&base, &patches)? })
    }

    fn at(&self, need: &LayerNeed) -> &T {
        self.values.at(self.when.iter().map(|c| c.holds(need)))
    }
}

impl CatalogBackend {
    pub(super) fn new(entry: data::Entry, defaults: &data::Defaults) -> Result<Self, String> {
        let with = |base: &data::Object, own: data::Object| {
            let mut all = base.clone();
            all.extend(own);
            all
        };
        let builder =
            Varying::<BuilderFacts>::new(with(&defaults.builder, entry.builder), &entry.overrides, |o| {
                &o.builder
            })?;
        let mut rules = with(&defaults.rules, entry.rules);
        rules.insert("name".into(), Value::String(entry.name.clone()));
        // A rule book states the least of its builder, and what it does without speculation.
        let weakest = builder.values.all().map(|b| b.graph_support).min().unwrap_or(GraphSupport::Never);
        let plain = builder.at(&LayerNeed::default());
        let tokens = |len: Option<super::QueryLen>| Value::from(len.map(|l| l.tokens(0)));
        rules.insert("graph_support".into(), Value::String(weakest.name().into()));
        rules.insert("varlen_graph_max_query_len".into(), tokens(plain.varlen_graph_max_query_len));
        rules.insert("reorder_batch_threshold".into(), tokens(plain.reorder_batch_threshold));
        let implementation = entry
            .implementation
            .map(|own| serde_json::from_value(Value::Object(with(&defaults.implementation, own))))
            .transpose()
            .map_err(|e| format!("impl: {e}"))?;
        Ok(Self {
            own_name: entry.own_name.unwrap_or_else(|| entry.name.clone()),
            rules: Varying::new(rules, &entry.overrides, |o| &o.rules)?,
            name: entry.name,
            registry: entry.registry,
            class: entry.class,
            module: entry.module,
            implementation,
            declared: entry.declared,
            spec_change: entry.spec,
            offers_kv_cache_shape: entry.offers_kv_cache_shape,
            builder,
            refuses: entry.refuses,
        })
    }

    /// The rule book as it answers for this layer: kernel block sizes, layouts and the rest.
    pub fn rules(&self, need: &LayerNeed) -> &RuleBook {
        self.rules.at(need)
    }

    /// The rule book on a device, for a plain layer.
    pub fn rules_on(&self, capability: Option<ComputeCapability>) -> &RuleBook {
        self.rules(&LayerNeed { compute_capability: capability, ..LayerNeed::default() })
    }

    /// The builder as it is for this layer's configuration: capability, head size, speculation, context
    /// parallelism.
    pub fn builder(&self, need: &LayerNeed) -> &BuilderFacts {
        self.builder.at(need)
    }

    /// What the builder answers at start-up. Its buffers' sizes are not known: they read 0.
    pub fn plan(&self, need: &LayerNeed) -> BuilderPlan {
        let facts = self.builder(need);
        BuilderPlan {
            graph_support: facts.graph_support,
            reorder_batch_threshold: facts
                .reorder_batch_threshold
                .map(|l| l.tokens(need.num_speculative_tokens)),
            persistent_bytes: 0,
            workspace_bytes: 0,
        }
    }

    /// Most new tokens of a request in a full graph of decodes of mixed lengths; `None`: no such graph.
    pub fn varlen_graph_max_query_len(&self, need: &LayerNeed) -> Option<usize> {
        self.builder(need).varlen_graph_max_query_len.map(|l| l.tokens(need.num_speculative_tokens))
    }

    /// What the backend makes of a layer's cache.
    pub fn customize_spec(&self, spec: KvCacheSpec) -> KvCacheSpec {
        match self.spec_change {
            Some(change) => change.apply(spec),
            None => spec,
        }
    }

    /// The combination that refuses the layer, the first of several.
    pub fn combination(&self, need: &LayerNeed) -> Option<Refusal> {
        let first = self.refuses.iter().find(|r| r.when.holds(need))?;
        Some(first.because.of(need).into())
    }
}
