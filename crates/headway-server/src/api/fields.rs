//! [`Fields`]: a request's JSON object, taken apart by name, so that every refusal names its parameter.

use crate::ApiError;
use axum::http::StatusCode;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

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
            Some(value) => serde_path_to_error::deserialize(value).map(Some).map_err(|e| {
                let path = match e.path().to_string() {
                    p if p == "." => name.to_owned(),
                    p if p.starts_with('[') => format!("{name}{p}"),
                    p => format!("{name}.{p}"),
                };
                let why = e.into_inner();
                ApiError::param(path.clone(), format!("{path}: {why}"))
            }),
        }
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
        let nearest = self
            .known
            .iter()
            .map(|k| (strsim::damerau_levenshtein(k, name), *k))
            .min()
            .filter(|(distance, _)| *distance <= 3);
        let hint = match nearest {
            Some((_, k)) => format!("did you mean {k}?"),
            None => format!("known are {}", self.known.join(", ")),
        };
        Err(ApiError::param(name, format!("{name} is not a parameter of this endpoint; {hint}")))
    }
}

/// Equal, numbers by value: 0 and 0.0 are the same.
fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}
