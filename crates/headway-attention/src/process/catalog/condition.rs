//! Conditions over a layer's need, as data files write them.
//!
//! A condition is an object: every field that it names must pass its test. A test is a value (equal), `null` (not
//! known), a list (one of), or an object: `from` and `to` (both included), `multiple_of`, `not`. `any` takes a list
//! of conditions. A value that is not known passes `null` alone, so what isn't known refuses nothing.

use super::{
    super::rules::{CapabilityRange, ComputeCapability},
    field::{Field, Kind, Value},
};
use crate::LayerNeed;
use serde::Deserialize;
use serde_json::{Map, Value as Json};

/// What must hold of a layer's need.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(try_from = "Map<String, Json>")]
pub struct Condition {
    tests: Vec<(Field, Test)>,
    any: Option<Vec<Self>>,
}

impl Condition {
    /// Whether it holds.
    pub fn holds(&self, need: &LayerNeed) -> bool {
        self.tests.iter().all(|(field, test)| test.passes(field.of(need)))
            && self.any.as_ref().is_none_or(|any| any.iter().any(|c| c.holds(need)))
    }
}

impl TryFrom<Map<String, Json>> for Condition {
    type Error = String;

    fn try_from(object: Map<String, Json>) -> Result<Self, String> {
        let mut condition = Self::default();
        for (key, value) in object {
            if key == "any" {
                condition.any = Some(serde_json::from_value(value).map_err(|e| format!("any: {e}"))?);
                continue;
            }
            let field = serde_json::from_value::<Field>(key.clone().into())
                .map_err(|e| format!("condition on {key}: {e}"))?;
            let test =
                Test::parse(field.kind(), value).map_err(|why| format!("condition on {key}: {why}"))?;
            condition.tests.push((field, test));
        }
        Ok(condition)
    }
}

#[derive(Clone, Debug)]
enum Test {
    Unknown,
    Flag(bool),
    Number { from: usize, to: usize },
    MultipleOf(usize),
    Capability(CapabilityRange),
    Word(String),
    OneOf(Vec<Self>),
    Not(Box<Self>),
}

impl Test {
    fn passes(&self, value: Option<Value<'_>>) -> bool {
        let Some(value) = value else {
            return match self {
                Self::Unknown => true,
                Self::OneOf(tests) => tests.iter().any(|t| t.passes(None)),
                _ => false,
            };
        };
        match (self, value) {
            (Self::OneOf(tests), v) => tests.iter().any(|t| t.passes(Some(v))),
            (Self::Not(test), v) => !test.passes(Some(v)),
            (Self::Flag(a), Value::Flag(b)) => *a == b,
            (Self::Number { from, to }, Value::Number(n)) => (*from..=*to).contains(&n),
            (Self::MultipleOf(m), Value::Number(n)) => n.is_multiple_of(*m),
            (Self::Capability(range), Value::Capability(c)) => range.contains(c),
            (Self::Word(a), Value::Word(b)) => a == b,
            _ => false,
        }
    }

    fn parse(kind: Kind, value: Json) -> Result<Self, String> {
        match (kind, value) {
            (_, Json::Null) => Ok(Self::Unknown),
            (kind, Json::Array(tests)) => {
                Ok(Self::OneOf(tests.into_iter().map(|t| Self::parse(kind, t)).collect::<Result<_, _>>()?))
            }
            (kind, Json::Object(mut o)) if o.len() == 1 && o.contains_key("not") => {
                let inner = o.remove("not").unwrap_or_default();
                Ok(Self::Not(Box::new(Self::parse(kind, inner)?)))
            }
            (Kind::Flag, Json::Bool(b)) => Ok(Self::Flag(b)),
            (Kind::Number, Json::Number(n)) => {
                let n = n.as_u64().ok_or("a whole number is needed")? as usize;
                Ok(Self::Number { from: n, to: n })
            }
            (Kind::Number, Json::Object(o)) => numbers(o),
            (Kind::Capability, Json::String(s)) => {
                let c: ComputeCapability = s.parse()?;
                Ok(Self::Capability(CapabilityRange { from: Some(c), to: Some(c) }))
            }
            (Kind::Capability, o @ Json::Object(_)) => {
                serde_json::from_value(o).map(Self::Capability).map_err(|e| e.to_string())
            }
            (kind, Json::String(s)) if kind.knows(&s) => Ok(Self::Word(s)),
            (kind, other) => Err(format!("{other} is no test of a {kind:?}")),
        }
    }
}

fn numbers(object: Map<String, Json>) -> Result<Test, String> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Numbers {
        from: Option<usize>,
        to: Option<usize>,
        multiple_of: Option<usize>,
    }
    match serde_json::from_value(Json::Object(object)).map_err(|e| e.to_string())? {
        Numbers { from: None, to: None, multiple_of: Some(m) } if m > 0 => Ok(Test::MultipleOf(m)),
        Numbers { from, to, multiple_of: None } if from.is_some() || to.is_some() => {
            Ok(Test::Number { from: from.unwrap_or(0), to: to.unwrap_or(usize::MAX) })
        }
        _ => Err("give from and to, or a multiple_of above 0".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn holds(condition: Json, need: &LayerNeed) -> bool {
        serde_json::from_value::<Condition>(condition).unwrap().holds(need)
    }

    #[test]
    fn the_language() {
        let need = LayerNeed {
            head_size: 192,
            compute_capability: Some(ComputeCapability(10, 3)),
            kv_cache_dtype: Some("fp8".into()),
            has_sinks: true,
            ..LayerNeed::default()
        };
        for (condition, expected) in [
            (json!({}), true),
            (json!({"head_size": 192, "has_sinks": true}), true),
            (json!({"head_size": 192, "has_sinks": false}), false),
            (json!({"head_size": [64, {"from": 128, "to": 192}]}), true),
            (json!({"head_size": {"not": {"multiple_of": 64}}}), false),
            (json!({"compute_capability": {"from": "10.0", "to": "10.9"}}), true),
            (json!({"compute_capability": {"not": ["9.0", {"from": "11.0"}]}}), true),
            (json!({"kv_cache_dtype": {"not": ["auto", "bfloat16"]}}), true),
            (json!({"any": [{"head_size": 64}, {"attn_type": "decoder"}]}), true),
            (json!({"any": [{"head_size": 64}], "has_sinks": true}), false),
        ] {
            assert_eq!(holds(condition.clone(), &need), expected, "{condition}");
        }
    }

    #[test]
    fn what_is_not_known_passes_null_alone() {
        let need = LayerNeed::default();
        assert!(need.kv_cache_dtype.is_none());
        assert!(holds(json!({"kv_cache_dtype": null}), &need));
        assert!(holds(json!({"kv_cache_dtype": [null, "auto"]}), &need));
        assert!(!holds(json!({"kv_cache_dtype": "auto"}), &need));
        assert!(!holds(json!({"kv_cache_dtype": {"not": "auto"}}), &need));
        assert!(!holds(json!({"index_topk": {"not": {"multiple_of": 128}}}), &need));
    }

    #[test]
    fn mistakes_are_refused() {
        for (condition, part) in [
            (json!({"head_sise": 64}), "head_sise"),
            (json!({"head_size": "64"}), "Number"),
            (json!({"head_size": {"form": 64}}), "form"),
            (json!({"head_size": {"multiple_of": 0}}), "multiple_of"),
            (json!({"has_sinks": 1}), "Flag"),
            (json!({"kind": "latent"}), "LayerKind"),
            (json!({"dtype": "bf16"}), "Dtype"),
            (json!({"compute_capability": "sm90"}), "9.0"),
            (json!({"any": [{"nothing": 1}]}), "nothing"),
        ] {
            let e = serde_json::from_value::<Condition>(condition).unwrap_err().to_string();
            assert!(e.contains(part), "{part} in {e}");
        }
    }
}
