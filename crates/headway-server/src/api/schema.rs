//! What a schema may have: compiling one takes time and memory that its size says little about, so it is looked at first.

use serde_json::{Map, Value};
use std::collections::HashMap;

/// The most bytes of a schema, as compact JSON.
const MAX_BYTES: usize = 256 << 10;
/// The most `pattern`s and `format`s that one string must meet together. Each multiplies the states of the others.
const MAX_CONJOINED: usize = 4;
/// The most bytes of a pattern.
const MAX_PATTERN_BYTES: usize = 4 << 10;
/// The most `pattern`s, `format`s and keys of `patternProperties`.
const MAX_PATTERNS: usize = 512;
/// The most keys of one `patternProperties`: each pair of them is compared.
const MAX_PATTERN_PROPERTIES: usize = 16;
/// The most values of all `enum`s.
const MAX_ENUM_VALUES: usize = 10_000;
/// The most members of one `anyOf`, `oneOf` or `allOf`.
const MAX_BRANCHES: usize = 256;
/// The most members of all of them.
const MAX_ALL_BRANCHES: usize = 2_048;
/// The most schemas inside one another, through references too.
const MAX_DEPTH: usize = 128;
/// The most times that a schema is walked until what its references mean is known, which a circle takes two of.
const MAX_ROUNDS: usize = 16;

/// Keywords whose values are literal, and so hold no schema.
const LITERAL: [&str; 4] = ["const", "enum", "default", "examples"];

/// Whether a schema is small enough to be compiled.
///
/// # Errors
/// What it has too much of, and how much it may have.
pub fn check(schema: &Value) -> Result<(), String> {
    let bytes = schema.to_string().len();
    most(bytes, MAX_BYTES, "bytes", "the schema")?;
    let mut counts = Counts::default();
    counts.add(schema)?;
    conjoined(schema, counts.patterns)
}

/// Whether few patterns hold together, of `patterns` in all.
fn conjoined(schema: &Value, patterns: usize) -> Result<(), String> {
    let mut before = HashMap::new();
    for _ in 0..MAX_ROUNDS {
        let mut walk = Walk { root: schema, patterns, before, known: HashMap::new() };
        let found = walk.conjoined(schema, 0)?;
        most(found, MAX_CONJOINED, "patterns and formats that hold together (allOf, $ref)", "a value")?;
        if walk.known == walk.before {
            return Ok(());
        }
        before = walk.known;
    }
    Err("the schema's references go round in too many ways; make them simpler".into())
}

fn most(number: usize, limit: usize, what: &str, of: &str) -> Result<(), String> {
    match number <= limit {
        true => Ok(()),
        false => Err(format!("{of} has {number} {what}; at most {limit} are taken")),
    }
}

/// What all of a schema has, wherever it stands.
#[derive(Default)]
struct Counts {
    patterns: usize,
    enum_values: usize,
    branches: usize,
}

impl Counts {
    fn add(&mut self, value: &Value) -> Result<(), String> {
        match value {
            Value::Array(list) => list.iter().try_for_each(|v| self.add(v)),
            Value::Object(map) => map.iter().try_for_each(|(k, v)| self.keyword(k, v)),
            _ => Ok(()),
        }
    }

    fn keyword(&mut self, name: &str, value: &Value) -> Result<(), String> {
        match (name, value) {
            ("pattern" | "format", Value::String(text)) => self.pattern(text)?,
            ("patternProperties", Value::Object(map)) => {
                most(map.len(), MAX_PATTERN_PROPERTIES, "keys", "patternProperties")?;
                map.keys().try_for_each(|k| self.pattern(k))?;
            }
            ("enum", Value::Array(list)) => {
                self.enum_values += list.len();
                most(self.enum_values, MAX_ENUM_VALUES, "values in all", "enum")?;
            }
            ("anyOf" | "oneOf" | "allOf", Value::Array(list)) => {
                most(list.len(), MAX_BRANCHES, "members", name)?;
                self.branches += list.len();
                most(self.branches, MAX_ALL_BRANCHES, "members of anyOf, oneOf and allOf", "the schema")?;
            }
            _ => {}
        }
        self.add(value)
    }

    fn pattern(&mut self, text: &str) -> Result<(), String> {
        most(text.len(), MAX_PATTERN_BYTES, "bytes", "a pattern")?;
        self.patterns += 1;
        most(self.patterns, MAX_PATTERNS, "patterns and formats in all", "the schema")
    }
}

/// Follows what holds together.
struct Walk<'a> {
    root: &'a Value,
    /// Of the whole schema.
    patterns: usize,
    /// Of references, as the walk before found it: what one that is being followed counts as.
    before: HashMap<&'a str, usize>,
    /// Of references that were followed.
    known: HashMap<&'a str, usize>,
}

impl<'a> Walk<'a> {
    /// The most patterns that may come to hold together for a value or one inside it. Objects that hold together have
    /// their properties in common, whichever those are, so it is an upper bound.
    fn conjoined(&mut self, schema: &'a Value, depth: usize) -> Result<usize, String> {
        let Value::Object(map) = schema else { return Ok(0) };
        if depth > MAX_DEPTH {
            return Err(format!(
                "the schema is more than {MAX_DEPTH} deep, through references; make it flatter"
            ));
        }
        let own = usize::from(map.contains_key("pattern")) + usize::from(map.contains_key("format"));
        let mut inside = 0;
        for value in inner(map) {
            inside = inside.max(self.conjoined(value, depth + 1)?);
        }
        let mut together = own.max(inside);
        for name in ["allOf", "anyOf", "oneOf"] {
            let (mut sum, mut largest) = (0, 0);
            for member in map.get(name).and_then(Value::as_array).into_iter().flatten() {
                let n = self.conjoined(member, depth + 1)?;
                (sum, largest) = (sum + n, largest.max(n));
            }
            together += if name == "allOf" { sum } else { largest };
        }
        if let Some(Value::String(to)) = map.get("$ref") {
            together += self.followed(to, depth)?;
        }
        Ok(together)
    }

    /// Of what a reference means. One that isn't understood here may mean anything in the schema.
    fn followed(&mut self, to: &'a str, depth: usize) -> Result<usize, String> {
        if let Some(n) = self.known.get(to) {
            return Ok(*n);
        }
        let Some(target) = to.strip_prefix('#').and_then(|path| self.root.pointer(path)) else {
            return Ok(self.patterns);
        };
        self.known.insert(to, self.before.get(to).copied().unwrap_or(0));
        let n = self.conjoined(target, depth + 1)?;
        self.known.insert(to, n);
        Ok(n)
    }
}

/// Schemas of what is inside a value.
fn inner(map: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    let in_place = ["allOf", "anyOf", "oneOf", "$defs", "definitions"];
    let other =
        map.iter().filter(move |(k, _)| !in_place.contains(&k.as_str()) && !LITERAL.contains(&k.as_str()));
    other.flat_map(|(k, v)| -> Box<dyn Iterator<Item = &Value>> {
        match v {
            Value::Array(list) => Box::new(list.iter()),
            Value::Object(named) if matches!(k.as_str(), "properties" | "patternProperties") => {
                Box::new(named.values())
            }
            one => Box::new(std::iter::once(one)),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn patterns(n: usize) -> Vec<Value> {
        (0..n).map(|i| json!({"type": "string", "pattern": format!("(.*{i}){{3}}")})).collect()
    }

    #[test]
    fn what_schemas_usually_have_is_taken() {
        let person = json!({"type": "object", "required": ["name"], "properties": {
            "name": {"type": "string", "pattern": "^[A-Z]", "minLength": 1, "maxLength": 40},
            "mail": {"anyOf": [{"type": "string", "format": "email"}, {"type": "null"}]},
            "friends": {"type": "array", "items": {"$ref": "#"}},
            "pattern": {"type": "string"},
        }});
        let choice = json!({"anyOf": patterns(200)});
        let base = json!({"$defs": {"base": person.clone()}, "allOf": [{"$ref": "#/$defs/base"}, {"type": "object"}]});
        let values = json!({"enum": (0..10_000).collect::<Vec<_>>()});
        let tree =
            json!({"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}});
        for schema in [person, choice, base, values, tree, json!(true), json!({"$ref": "#"})] {
            assert_eq!(check(&schema), Ok(()), "{schema}");
        }
    }

    /// However they come together.
    #[test]
    fn patterns_that_hold_together_are_few() {
        let defs = |with: fn(Value) -> Value| -> Value {
            (0..8).map(|i| (format!("a{i}"), with(patterns(8).swap_remove(i)))).collect::<Map<_, _>>().into()
        };
        let refs: Vec<Value> = (0..8).map(|i| json!({"$ref": format!("#/$defs/a{i}")})).collect();
        let nested = patterns(8).into_iter().reduce(|a, b| json!({"allOf": [a, b]})).unwrap();
        let siblings =
            (0..8).rev().fold(json!({}), |inner, i| json!({"pattern": format!("{i}"), "allOf": [inner]}));
        let chain: Map<_, _> = (0..8)
            .map(|i| {
                (format!("a{i}"), json!({"format": "date", "$ref": format!("#/$defs/a{}", (i + 1) % 8)}))
            })
            .collect();
        let inside: Vec<Value> = patterns(8).into_iter().map(|p| json!({"properties": {"x": p}})).collect();
        let items: Vec<Value> = patterns(8).into_iter().map(|p| json!({"items": p})).collect();
        let choices: Vec<Value> =
            patterns(8).into_iter().map(|p| json!({"anyOf": [p, {"type": "null"}]})).collect();
        let mut anchored =
            json!({"allOf": [{"$ref": "#all"}], "$defs": {"a": {"$anchor": "all", "allOf": patterns(8)}}});
        anchored["type"] = json!("string");
        // Two circles of two; what is followed last is known best, and the conjunction asks for the other.
        let circle = |a: &str, b: &str| -> [(String, Value); 2] {
            [
                (a.into(), json!({"properties": {"next": {"$ref": format!("#/$defs/{b}")}}})),
                (
                    b.into(),
                    json!({"properties": {"next": {"$ref": format!("#/$defs/{a}")}, "x": {"allOf": patterns(3)}}}),
                ),
            ]
        };
        let circles: Map<_, _> = circle("a", "b").into_iter().chain(circle("c", "d")).collect();
        let circles = json!({"$defs": circles, "properties": {"p": {"$ref": "#/$defs/b"}, "q": {"$ref": "#/$defs/d"},
            "r": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/c"}]}}});
        for schema in [
            json!({"allOf": patterns(5)}),
            json!({"allOf": refs, "$defs": defs(|p| p)}),
            json!({"allOf": refs, "$defs": defs(|p| json!({"properties": {"next": {"properties": {"x": p}}}}))}),
            json!({"items": nested}),
            siblings,
            json!({"$ref": "#/$defs/a0", "$defs": chain}),
            json!({"allOf": inside}),
            json!({"properties": {"a": {"allOf": items}}}),
            json!({"allOf": choices}),
            anchored,
            circles,
        ] {
            let why = check(&schema).expect_err(&schema.to_string());
            assert!(why.contains("hold together") && why.contains("at most 4"), "{why}");
        }
    }

    #[test]
    fn everything_has_a_bound() {
        let deep: Map<_, _> = (0..500)
            .map(|i| (format!("a{i}"), json!({"items": {"$ref": format!("#/$defs/a{}", i + 1)}})))
            .collect();
        let keys: Map<_, _> = (0..17).map(|i| (format!("^{i}$"), json!(true))).collect();
        let many: Map<_, _> = (0..600).map(|i| (format!("p{i}"), patterns(1).remove(0))).collect();
        let some = |n: usize| vec![json!({"type": "null"}); n];
        for (schema, words) in [
            (json!({"const": "a".repeat(300_000)}), "262144"),
            (json!({"pattern": "a".repeat(5000)}), "4096"),
            (json!({"patternProperties": {"a".repeat(5000): true}}), "4096"),
            (json!({"patternProperties": keys}), "at most 16"),
            (json!({"properties": many}), "at most 512"),
            (json!({"enum": (0..10_001).collect::<Vec<_>>()}), "at most 10000"),
            (json!({"items": {"oneOf": some(257)}}), "at most 256"),
            (json!({"items": vec![json!({"anyOf": some(200)}); 11]}), "at most 2048"),
            (json!({"$ref": "#/$defs/a0", "$defs": deep}), "128 deep"),
        ] {
            let why = check(&schema).unwrap_err();
            assert!(why.contains(words), "{words}: {why}");
        }
    }
}
