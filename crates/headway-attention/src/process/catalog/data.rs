//! The shape of a data file. Unknown fields are refused.

use super::{
    condition::Condition,
    facts::{Declared, SpecChange},
    text::Text,
};
use crate::process::rules::ComputeCapability;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A JSON object.
pub type Object = Map<String, Value>;

/// The embedded data files, by version, oldest first. Adding a version is adding a line.
pub const FILES: &[(&str, &str)] = &[("0.33.0", include_str!("data/vllm-0.33.0.json"))];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    pub engine: String,
    pub version: String,
    /// Where the facts come from.
    pub source: String,
    /// The compute capabilities that the facts were asked for.
    pub capabilities: Vec<ComputeCapability>,
    /// What a backend says that says nothing else.
    pub defaults: Defaults,
    pub backends: Vec<Entry>,
    /// Names that users can give which stand for no class.
    pub without_rule_book: Vec<String>,
    /// What the facts take for granted, since no table can know it.
    pub assumptions: Vec<String>,
    pub platforms: Vec<Platform>,
    /// Backends of vision encoders.
    pub vision: Vec<Priorities>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Defaults {
    pub rules: Object,
    pub builder: Object,
    #[serde(rename = "impl")]
    pub implementation: Object,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The name that users select.
    pub name: String,
    /// The class's own name, where it is another.
    pub own_name: Option<String>,
    pub registry: RegistryKind,
    pub class: String,
    pub module: String,
    pub rules: Object,
    pub builder: Object,
    /// `null`: the class offers no impl.
    #[serde(rename = "impl")]
    pub implementation: Option<Object>,
    pub declared: Declared,
    /// Absent: specs stay as they are.
    pub spec: Option<SpecChange>,
    #[serde(default)]
    pub offers_kv_cache_shape: bool,
    #[serde(default)]
    pub overrides: Vec<Override>,
    #[serde(default)]
    pub refuses: Vec<Refusal>,
}

/// vLLM's two registries of backends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RegistryKind {
    /// Attention backends.
    Attention,
    /// Backends of state-space mixers.
    Mamba,
}

/// Fields that are otherwise where a condition holds.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Override {
    pub when: Condition,
    pub rules: Option<Object>,
    pub builder: Option<Object>,
}

/// A combination that no field of the rule book can say.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Refusal {
    pub when: Condition,
    pub because: Text,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Platform {
    pub platform: String,
    /// Rules that concern the cache are asked of a layer without one too.
    pub asks_cache_of_every_layer: bool,
    /// The first whose condition holds is the order of preference.
    pub priorities: Vec<Priorities>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Priorities {
    pub when: Condition,
    pub backends: Vec<String>,
    /// The engine picks by itself: it asks neither the user nor the rule books, only the refusals.
    #[serde(default)]
    pub picks_alone: bool,
}
