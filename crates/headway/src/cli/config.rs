//! `--config FILE`: TOML with one `[backend.NAME]` table a backend.

use super::CliError;
use headway_attention::Registry;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::Path;

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct File {
    backend: Map<String, Value>,
}

/// The tables under the backends' own names; none without a file. A table of a backend that isn't there
/// is refused, and so is one that its backend doesn't understand.
pub fn backend_tables(path: Option<&Path>, registry: &Registry) -> Result<Map<String, Value>, CliError> {
    let Some(path) = path else { return Ok(Map::new()) };
    let bad = |why: String| CliError::File { path: path.into(), why };
    let text = std::fs::read_to_string(path)
        .map_err(|e| bad(format!("cannot be read: {e}; --config takes a TOML file")))?;
    let file: File = toml::from_str(&text).map_err(|e| bad(in_line(&text, &e)))?;
    // JSON, which backends take, has no such numbers.
    let all: toml::Table = toml::from_str(&text).map_err(|e| bad(in_line(&text, &e)))?;
    if let Some((at, number)) = not_finite(&toml::Value::Table(all)) {
        return Err(bad(format!("{} is {number}; a finite number is needed", at.join("."))));
    }
    let mut tables = Map::new();
    for (name, table) in file.backend {
        let backend = registry.get(&name).map_err(|e| bad(format!("[backend.{name}]: {e}")))?;
        backend.parse_config(Some(&table)).map_err(|e| bad(e.to_string()))?;
        if tables.insert(backend.rules().name.to_string(), table).is_some() {
            return Err(bad(format!("[backend.{name}] is there twice; names differ only in case")));
        }
    }
    Ok(tables)
}

/// A number that is none, and the way to it.
fn not_finite(v: &toml::Value) -> Option<(Vec<String>, f64)> {
    let inside = |name: String, v: &toml::Value| {
        let (mut at, number) = not_finite(v)?;
        at.insert(0, name);
        Some((at, number))
    };
    match v {
        toml::Value::Float(x) => (!x.is_finite()).then(|| (vec![], *x)),
        toml::Value::Table(t) => t.iter().find_map(|(name, v)| inside(name.clone(), v)),
        toml::Value::Array(a) => a.iter().enumerate().find_map(|(i, v)| inside(i.to_string(), v)),
        _ => None,
    }
}

fn in_line(text: &str, e: &toml::de::Error) -> String {
    let what = e.message().replace('\n', " ");
    match e.span().and_then(|s| text.get(..s.start)) {
        Some(before) => format!("line {}: {what}", before.matches('\n').count() + 1),
        None => what,
    }
}
