//! Reads tables, and values in them.

use crate::Outcome;
use serde_json::Value;
use std::{fs, io::Read, path::Path};

/// A table file.
pub struct Table(Value);

impl Table {
    /// Reads `name.json` or `name.json.gz` of a directory; `None` where there is neither.
    pub fn read(dir: &Path, name: &str) -> Option<Self> {
        if let Ok(text) = fs::read(dir.join(format!("{name}.json"))) {
            return Some(Self(serde_json::from_slice(&text).expect("a table is JSON")));
        }
        let packed = fs::read(dir.join(format!("{name}.json.gz"))).ok()?;
        let mut text = vec![];
        flate2::read::GzDecoder::new(&packed[..]).read_to_end(&mut text).expect("a table unpacks");
        Some(Self(serde_json::from_slice(&text).expect("a table is JSON")))
    }

    /// The cases.
    pub fn cases(&self) -> &[Value] {
        self.0["cases"].as_array().map_or(&[], Vec::as_slice)
    }

    /// A field of the header.
    #[allow(dead_code, reason = "not every table has header fields")]
    pub fn header(&self, name: &str) -> &Value {
        &self.0[name]
    }
}

/// A number; 0 where it is something else.
pub fn num(v: &Value) -> usize {
    v.as_u64().unwrap_or(0) as usize
}

/// A number, where it is one.
pub fn opt(v: &Value) -> Option<usize> {
    v.as_u64().map(|n| n as usize)
}

/// A list of numbers.
pub fn nums(v: &Value) -> Vec<usize> {
    v.as_array().map_or(vec![], |a| a.iter().map(num).collect())
}

/// A flag.
pub fn flag(v: &Value) -> bool {
    v.as_bool().unwrap_or(false)
}

/// A text.
pub fn text(v: &Value) -> &str {
    v.as_str().unwrap_or("")
}

/// Compares, and says both where they differ.
pub fn same<T: PartialEq + std::fmt::Debug>(what: &str, ours: T, theirs: T) -> Outcome {
    if ours == theirs {
        Outcome::Same
    } else {
        Outcome::Differs(format!("{what}: {ours:?}, expected {theirs:?}"))
    }
}

/// The first of several outcomes that isn't equality.
pub fn all(outcomes: impl IntoIterator<Item = Outcome>) -> Outcome {
    let mut worst = Outcome::Same;
    for o in outcomes {
        match o {
            Outcome::Same => {}
            Outcome::Deliberate(_) => worst = o,
            Outcome::Differs(_) | Outcome::NotUnderstood(_) => return o,
        }
    }
    worst
}

/// Whether both failed or neither did.
pub fn same_failure<T>(ours: &headway_attention::Result<T>, expected: &Value) -> Outcome {
    match (ours, expected.is_null()) {
        (Ok(_), false) => Outcome::Differs(format!("no error, expected {expected}")),
        (Err(e), true) => Outcome::Differs(format!("error {e}, expected none")),
        _ => Outcome::Same,
    }
}
