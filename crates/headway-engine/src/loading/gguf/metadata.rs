//! The key-value part of a GGUF file, with typed access whose errors name the key and the file.
//!
//! `opt_…` returns `None` where the key is absent; the plain form makes that an error. A value of the
//! wrong kind is always an error. Integer and float widths are interchangeable as long as the value fits.
//!
//! Not for bounds on particular keys: see [`check`](super::check).

use super::value::{Array, Numbers, Strings, Value};
use crate::loading::LoadError;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// All metadata of a file, in its order.
#[derive(Debug, Clone, Default)]
pub struct Metadata {
    path: PathBuf,
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
}

impl Metadata {
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), ..Self::default() }
    }

    /// Adds an entry; `false` when the key is there already.
    pub(super) fn insert(&mut self, key: &str, value: Value) -> bool {
        if self.index.contains_key(key) {
            return false;
        }
        self.index.insert(key.to_owned(), self.entries.len());
        self.entries.push((key.to_owned(), value));
        true
    }

    /// The file, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All entries, in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> + '_ {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value at `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.index.get(key).and_then(|&i| self.entries.get(i)).map(|(_, value)| value)
    }

    /// Whether `key` is there.
    pub fn contains(&self, key: &str) -> bool {
        self.index.contains_key(key)
    }

    /// An error about `key`; `what` begins with a verb ("must be 1 to 512, is 0").
    pub fn bad(&self, key: &str, what: impl AsRef<str>) -> LoadError {
        LoadError::bad_key(&self.path, key, what)
    }

    fn missing(&self, key: &str) -> LoadError {
        LoadError::MissingKey { path: self.path.clone(), key: key.to_owned() }
    }

    /// The value at `key` through `convert`, which returns `None` for a value of the wrong kind.
    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => {
                let is = match value {
                    Value::Uint(v) => format!("is {v}"),
                    Value::Int(v) => format!("is {v}"),
                    other => format!("is {}", other.kind()),
                };
                Err(self.bad(key, format!("must be {expected}, {is}")))
            }
        }
    }
}

/// A pair of getters: one for an optional key, one for a required one.
macro_rules! getters {
    ($($doc:literal, $name:ident, $opt:ident, $out:ty, $expected:literal, $convert:expr;)*) => {
        impl Metadata {$(
            #[doc = concat!("The value at `key` as ", $doc, ", `None` where the key is absent.")]
            ///
            /// # Errors
            /// [`LoadError::BadKey`] for a value of another kind.
            pub fn $opt(&self, key: &str) -> Result<Option<$out>, LoadError> {
                self.typed(key, $expected, $convert)
            }

            #[doc = concat!("The value at `key` as ", $doc, ".")]
            ///
            /// # Errors
            /// [`LoadError::MissingKey`], or [`LoadError::BadKey`] for a value of another kind.
            pub fn $name(&self, key: &str) -> Result<$out, LoadError> {
                self.$opt(key)?.ok_or_else(|| self.missing(key))
            }
        )*}
    };
}

/// The numbers of an array value.
fn numbers(value: &Value) -> Option<&Numbers> {
    if let Value::Array(Array::Numbers(numbers)) = value { Some(numbers) } else { None }
}

getters! {
    "a size", usize, opt_usize, usize, "an integer from 0 up",
        |v| v.as_u64().and_then(|v| usize::try_from(v).ok());
    "a 32-bit unsigned integer", u32, opt_u32, u32, "an integer from 0 to 4294967295",
        |v| v.as_u64().and_then(|v| u32::try_from(v).ok());
    "a float", f32, opt_f32, f32, "a number", |v| match v {
        Value::Float(v) => Some(*v as f32),
        Value::Uint(v) => Some(*v as f32),
        Value::Int(v) => Some(*v as f32),
        _ => None,
    };
    "a boolean", bool, opt_bool, bool, "a boolean", |v| if let Value::Bool(v) = v { Some(*v) } else { None };
    "a string", text, opt_text, &str, "a string", |v| if let Value::Text(v) = v { Some(v.as_str()) } else { None };
    "an array of strings", strings, opt_strings, &Strings, "an array of strings",
        |v| if let Value::Array(Array::Strings(v)) = v { Some(v) } else { None };
    "an array of floats", f32s, opt_f32s, Vec<f32>, "an array of floats", |v| numbers(v)?.to_f32();
    "an array of 32-bit integers", i32s, opt_i32s, Vec<i32>, "an array of 32-bit integers", |v| numbers(v)?.to_i32();
    "an array of sizes", usizes, opt_usizes, Vec<usize>, "an array of integers from 0 up", |v| numbers(v)?.to_usize();
    "an array of booleans", bools, opt_bools, Vec<bool>, "an array of booleans", |v| numbers(v)?.to_bool();
}

impl Metadata {
    /// One size per layer: the array at `key`, or its single integer `layers` times; `None` where absent.
    ///
    /// # Errors
    /// [`LoadError::BadKey`] for another kind of value or an array of another length.
    pub fn opt_per_layer(&self, key: &str, layers: usize) -> Result<Option<Vec<usize>>, LoadError> {
        if let Some(Value::Array(_)) = self.get(key) {
            let values = self.usizes(key)?;
            if values.len() != layers {
                return Err(self.bad(key, format!("must have {layers} entries, has {}", values.len())));
            }
            return Ok(Some(values));
        }
        Ok(self.opt_usize(key)?.map(|value| vec![value; layers]))
    }
}
