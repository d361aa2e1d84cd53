//! An object of a table, of which every field must be asked for.

use crate::{Outcome, read::all};
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// An object's fields, and what comparing them gave.
pub struct Fields<'a> {
    object: &'a Map<String, Value>,
    at: String,
    left: BTreeSet<&'a str>,
    outcomes: Vec<Outcome>,
}

impl<'a> Fields<'a> {
    /// The fields of an object; `at` names it in messages.
    pub fn of(at: &str, v: &'a Value) -> Option<Self> {
        let object = v.as_object()?;
        let left = object.keys().map(String::as_str).collect();
        Some(Self { object, at: at.into(), left, outcomes: vec![] })
    }

    /// The value of a field, which counts as asked for; null where there is none.
    pub fn take(&mut self, name: &str) -> &'a Value {
        self.left.remove(name);
        self.object.get(name).unwrap_or(&Value::Null)
    }

    /// Compares a field, which must be there.
    pub fn is(&mut self, name: &str, ours: impl Into<Value>) {
        let ours = ours.into();
        let there = self.object.contains_key(name);
        let theirs = self.take(name);
        if !there || ours != *theirs {
            let theirs = if there { theirs.to_string() } else { "no such field".into() };
            self.outcomes.push(Outcome::Differs(format!("{}{name}: {ours}, expected {theirs}", self.at)));
        }
    }

    /// A list that a table may leave out for its length, keeping shape and type.
    pub fn is_list(&mut self, name: &str, ours: Vec<i32>) {
        if self.object.get(name).is_some_and(|v| v["values_omitted"] == true) {
            self.is(name, omitted(&[ours.len()], "int32"));
        } else {
            self.is(name, ours);
        }
    }

    /// A field that says nothing of what is computed here, and is always the same.
    pub fn constant(&mut self, name: &str, known: impl Into<Value>) {
        let (known, v) = (known.into(), self.take(name));
        if known != *v {
            self.outcomes.push(Outcome::NotUnderstood(format!("{}{name}: {v}", self.at)));
        }
    }

    /// An object inside; `None` where it is null. Something else isn't understood.
    pub fn inner(&mut self, name: &str) -> Option<Fields<'a>> {
        let at = format!("{}{name}.", self.at);
        let there = self.object.contains_key(name);
        let v = self.take(name);
        let fields = Fields::of(&at, v);
        if !there || (fields.is_none() && !v.is_null()) {
            self.outcomes.push(Outcome::NotUnderstood(format!("{}{name}: {v}", self.at)));
        }
        fields
    }

    /// A list inside. Something else isn't understood.
    pub fn list(&mut self, name: &str) -> &'a [Value] {
        let v = self.take(name);
        if !v.is_array() {
            self.outcomes.push(Outcome::NotUnderstood(format!("{}{name}: {v}", self.at)));
        }
        v.as_array().map_or(&[], Vec::as_slice)
    }

    /// Adds what comparing something inside gave.
    pub fn add(&mut self, outcome: Outcome) {
        self.outcomes.push(outcome);
    }

    /// The worst outcome; fields that nobody asked for aren't understood.
    pub fn done(mut self) -> Outcome {
        if !self.left.is_empty() {
            self.outcomes.push(Outcome::NotUnderstood(format!("{}: fields {:?}", self.at, self.left)));
        }
        all(self.outcomes)
    }
}

/// How a table writes a tensor whose values it leaves out.
pub fn omitted(shape: &[usize], dtype: &str) -> Value {
    serde_json::json!({"shape": shape, "dtype": dtype, "values_omitted": true})
}

/// Rows of a matrix; of a width of 0 there are none.
pub fn rows<T: Clone + Into<Value>>(values: &[T], width: usize) -> Vec<Vec<T>> {
    values.chunks(width.max(1)).map(<[T]>::to_vec).collect()
}
