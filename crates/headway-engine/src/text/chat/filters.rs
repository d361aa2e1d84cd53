//! Filters and tests that transformers changes, or that need a bound on untrusted arguments.

use super::python::{self, Json};
use minijinja::value::{Kwargs, Rest, StringInput};
use minijinja::{Environment, Error, ErrorKind, FormatStyle, State, Value, format_filter};

/// Largest width, count or indent that a template may ask for.
const MAX_COUNT: usize = 10_000;

/// Adds everything of this file to an environment.
pub(super) fn add(env: &mut Environment<'static>) {
    env.add_filter("tojson", tojson);
    env.add_filter("string", |value: &Value| python::display(value));
    env.add_filter("indent", indent);
    env.add_filter("format", format);
    env.add_filter("batch", batch);
    env.add_filter("slice", slice);
}

fn invalid(detail: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail.into())
}

fn bounded(count: usize) -> Result<(), Error> {
    if count > MAX_COUNT {
        return Err(invalid(format!("{count} is more than {MAX_COUNT}")));
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

fn batch(state: &State<'_, '_>, value: Value, count: usize, fill: Option<Value>) -> Result<Value, Error> {
    bounded(count)?;
    minijinja::filters::batch(state, value, count, fill)
}

fn slice(state: &State<'_, '_>, value: Value, count: usize, fill: Option<Value>) -> Result<Value, Error> {
    bounded(count)?;
    minijinja::filters::slice(state, value, count, fill)
}

fn indent(
    value: StringInput<'_>,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    bounded(width.unwrap_or(0))?;
    bounded(kwargs.peek::<Option<usize>>("width")?.unwrap_or(0))?;
    minijinja::filters::indent(value, width, first, blank, kwargs)
}

/// `text % args`.
fn format(text: &str, args: Rest<Value>) -> Result<String, Error> {
    check_format_widths(text)?;
    if text.contains('*') && args.iter().any(|a| a.as_usize().is_some_and(|n| n > MAX_COUNT)) {
        return Err(invalid(format!("a width of more than {MAX_COUNT} in a format string")));
    }
    format_filter(FormatStyle::Printf, text, &args)
}

/// Refuses format strings that ask for widths or precisions of more than four digits.
pub(super) fn check_format_widths(text: &str) -> Result<(), Error> {
    let mut digits = 0;
    for byte in text.bytes() {
        digits = if byte.is_ascii_digit() { digits + 1 } else { 0 };
        if digits > 4 {
            return Err(invalid("a number of more than four digits in a format string"));
        }
    }
    Ok(())
}

/// As [`check_format_widths`], and no widths out of the arguments (`{:{}}`).
pub(super) fn check_str_format(text: &str) -> Result<(), Error> {
    check_format_widths(text)?;
    let mut open = false;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
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
