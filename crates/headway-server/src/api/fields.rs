//! [`Fields`]: a request's JSON object, taken apart by name, so that every refusal names its parameter.

use crate::{ApiError, error::shown};
use axum::http::StatusCode;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// The most bytes of a name that may be a known one misspelt.
const MAX_MISSPELT: usize = 40;

/// A request's parameters that were not taken yet.
pub struct Fields {
    left: Map<String, Value>,
    known: Vec<&'static str>,
}

impl Fields {
    /// The parameters of a body.
    ///
    /// # Errors
    /// 400 for what is no JSON object.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(left)) => Ok(Self { left, known: vec![] }),
            Ok(_) => Err(ApiError::new(StatusCode::BAD_REQUEST, "the body must be a JSON object")),
            Err(e) => Err(ApiError::new(
                StatusCode::BAD_REQUEST,
                format!("the body is not valid JSON: {e}; send a JSON object"),
            )),
        }
    }

    /// A parameter, where it is given and not null.
    ///
    /// # Errors
    /// 400 for a value of another type, with the place in it.
    pub fn take<T: DeserializeOwned>(&mut self, name: &'static str) -> Result<Option<T>, ApiError> {
        self.known.push(name);
        match self.left.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_path_to_error::deserialize(whole(value)).map(Some).map_err(|e| {
                let path = match e.path().to_string() {
                    p if p == "." => name.to_owned(),
                    p if p.starts_with('[') => format!("{name}{p}"),
                    p => format!("{name}.{p}"),
                };
                let why = e.into_inner().to_string();
                ApiError::param(shown(&path), format!("{}: {}", shown(&path), words(&why)))
            }),
        }
    }

    /// Entries of a parameter that is an object.
    pub fn size(&self, name: &str) -> Option<usize> {
        self.left.get(name)?.as_object().map(Map::len)
    }

    /// A parameter that must be given.
    ///
    /// # Errors
    /// 400 where it is missing, null or of another type.
    pub fn need<T: DeserializeOwned>(&mut self, name: &'static str) -> Result<T, ApiError> {
        self.take(name)?.ok_or_else(|| ApiError::param(name, format!("{name} is missing; give it")))
    }

    /// A parameter of the API that does nothing here, and can do no harm: it is read and forgotten.
    pub fn ignore(&mut self, names: &[&'static str]) {
        for name in names {
            self.known.push(name);
            self.left.remove(*name);
        }
    }

    /// A parameter of the API that this server can't do: refused unless it says what is so anyway.
    ///
    /// # Errors
    /// 400 for any other value.
    pub fn refuse(&mut self, name: &'static str, neutral: &[Value], instead: &str) -> Result<(), ApiError> {
        self.known.push(name);
        match self.left.remove(name) {
            None | Some(Value::Null) => Ok(()),
            Some(v) if neutral.iter().any(|n| same(n, &v)) => Ok(()),
            Some(_) => Err(ApiError::param(name, format!("{name} is not supported; {instead}"))),
        }
    }

    /// # Errors
    /// 400 for a parameter that nobody took.
    pub fn finish(self) -> Result<(), ApiError> {
        let Some(name) = self.left.keys().next() else { return Ok(()) };
        // The distance to a long name takes long, and is large.
        let near = name.len() <= MAX_MISSPELT;
        let nearest = self
            .known
            .iter()
            .filter(|_| near)
            .map(|k| (strsim::damerau_levenshtein(k, name), *k))
            .min()
            .filter(|(distance, _)| *distance <= 3);
        let hint = match nearest {
            Some((_, k)) => format!("did you mean {k}?"),
            None => format!("known are {}", self.known.join(", ")),
        };
        let name = shown(name);
        Err(ApiError::param(name.clone(), format!("{name} is not a parameter of this endpoint; {hint}")))
    }
}

/// What the deserializer says, in JSON's words and without the middle of a long value: what is expected is said at the end.
fn words(why: &str) -> String {
    let why = match why.split_once(", expected ") {
        None => why.to_owned(),
        Some((found, expected)) => format!("{}, expected {}", shown(found), json_type(expected)),
    };
    match why.char_indices().nth(300) {
        None => why,
        Some(_) => shown(&why).into_owned(),
    }
}

/// A type of Rust's as JSON has it.
fn json_type(expected: &str) -> &str {
    match expected {
        "usize" | "u32" | "u64" => "an integer of at least 0",
        "i64" => "an integer",
        "f32" | "f64" => "a number",
        "a boolean" | "bool" => "true or false",
        "a sequence" => "a list",
        "a map" => "an object",
        e if e.starts_with("struct ") => "an object",
        e => e,
    }
}

/// A number without a fraction as an integer: some clients write 1 as 1.0.
fn whole(value: Value) -> Value {
    // Beyond it not every integer is a float.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match value.as_f64() {
        Some(n) if value.is_f64() && n.fract() == 0.0 && n.abs() <= EXACT => Value::from(n as i64),
        _ => value,
    }
}

/// Equal, numbers by value: 0 and 0.0 are the same.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}
