//! Filters that transformers changes, and a bound on format strings that the engine does not count.

use super::python::{self, Json};
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value};

/// Largest indent that a template may ask for.
const MAX_INDENT: usize = 10_000;

/// Adds everything of this file to an environment.
pub(super) fn add(env: &mut Environment<'static>) {
    env.add_filter("tojson", tojson);
    env.add_filter("string", |value: &Value| python::display(value));
}

fn invalid(detail: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail.into())
}

fn bounded(count: usize) -> Result<(), Error> {
    if count > MAX_INDENT {
        return Err(invalid(format!("{count} is more than {MAX_INDENT}")));
    }
    Ok(())
}

/// `json.dumps(value, ensure_ascii, indent, separators, sort_keys)`, as transformers has it: non-ASCII stays as it is.
fn tojson(value: &Value, ensure_ascii: Option<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let ensure = match ensure_ascii {
        Some(value) => Some(value),
        None => kwargs.get::<Option<Value>>("ensure_ascii")?,
    };
    let indent = match kwargs.get::<Option<Value>>("indent")? {
        None => None,
        Some(value) if value.is_none() => None,
        Some(value) => Some(json_indent(&value)?),
    };
    let item = if indent.is_some() { "," } else { ", " };
    let (item, key) = match kwargs.get::<Option<Value>>("separators")?.filter(|v| !v.is_none()) {
        None => (item.to_string(), ": ".to_string()),
        Some(pair) => {
            let pair: Vec<Value> = pair.try_iter()?.collect();
            match pair.as_slice() {
                [item, key] => (item.to_string(), key.to_string()),
                _ => return Err(invalid("separators are a pair of strings")),
            }
        }
    };
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let json = Json { ensure_ascii: ensure.is_some_and(|v| v.is_true()), sort_keys, indent, item, key };
    let mut out = String::new();
    json.write(value, &mut out, 0)?;
    Ok(out)
}

fn json_indent(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        bounded(text.len())?;
        return Ok(text.to_string());
    }
    let count = usize::try_from(i64::try_from(value.clone())?.max(0)).unwrap_or(usize::MAX);
    bounded(count)?;
    Ok(" ".repeat(count))
}

/// Refuses `str.format` strings that ask for widths or precisions of more than four digits, or take them from their
/// arguments (`{:{}}`).
pub(super) fn check_str_format(text: &str) -> Result<(), Error> {
    let (mut open, mut digits) = (false, 0);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        digits = if c.is_ascii_digit() { digits + 1 } else { 0 };
        if open && digits > 4 {
            return Err(invalid("a number of more than four digits in a format field"));
        }
        match c {
            '{' if !open && chars.next_if_eq(&'{').is_some() => {}
            '{' if open => return Err(invalid("a field inside a field of a format string")),
            '{' => open = true,
            '}' => open = false,
            _ => {}
        }
    }
    Ok(())
}
