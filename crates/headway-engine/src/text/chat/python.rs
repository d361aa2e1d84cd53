//! Values as Python shows them: printing (`True`, `None`, `['a']`), `repr`, numbers and `json.dumps`.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Output, State, Value};
use std::fmt::Write;

/// Deeper values are refused.
const MAX_DEPTH: usize = 128;

/// Longer results are refused: a value that contains another twice, and so on, is small in memory and endless in print.
const MAX_BYTES: usize = 64 << 20;

/// What `{{ value }}` writes.
pub(super) fn format(out: &mut Output<'_>, _state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    if let Some(text) = value.as_str() {
        return out.write_str(text).map_err(Error::from);
    }
    let text = display(value)?;
    out.write_str(&text).map_err(Error::from)
}

/// `str(value)`.
pub(super) fn display(value: &Value) -> Result<String, Error> {
    let mut text = String::new();
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::String => text.push_str(value.as_str().unwrap_or_default()),
        _ => repr(value, &mut text, 0)?,
    }
    Ok(text)
}

fn repr(value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
    too_large(depth, out)?;
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => quote(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (i, item) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(&item, out, depth + 1)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(&key, out, depth + 1)?;
                out.push_str(": ");
                repr(&value.get_item(&key)?, out, depth + 1)?;
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

fn too_large(depth: usize, out: &str) -> Result<(), Error> {
    let refuse = |what: String| Err(Error::new(ErrorKind::InvalidOperation, what));
    if depth > MAX_DEPTH {
        return refuse(format!("a value nests deeper than {MAX_DEPTH}"));
    }
    if out.len() > MAX_BYTES {
        return refuse(format!("a value takes more than {MAX_BYTES} bytes in print"));
    }
    Ok(())
}

/// A string literal as `repr` picks its quotes.
fn quote(text: &str, out: &mut String) {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(mark);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == mark => out.extend(['\\', c]),
            c if c.is_ascii_control() => {
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push(mark);
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(x) => float(x),
        Err(_) => value.to_string(),
    }
}

/// `repr(float)`: shortest digits, an exponent of at least two digits with its sign.
pub(super) fn float(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let text = format!("{x:?}");
    let Some((digits, exponent)) = text.split_once('e') else { return text };
    let digits = digits.strip_suffix(".0").unwrap_or(digits);
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(rest) => ('-', rest),
        None => ('+', exponent),
    };
    format!("{digits}e{sign}{exponent:0>2}")
}

/// How `json.dumps` is asked to write.
pub(super) struct Json {
    pub(super) ensure_ascii: bool,
    pub(super) sort_keys: bool,
    pub(super) indent: Option<String>,
    pub(super) item: String,
    pub(super) key: String,
}

impl Json {
    /// Writes a value.
    pub(super) fn write(&self, value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
        too_large(depth, out)?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(match number(value).as_str() {
                "nan" => "NaN",
                "inf" => "Infinity",
                "-inf" => "-Infinity",
                other => other,
            }),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => self.list(value, out, depth)?,
            ValueKind::Map => self.map(value, out, depth)?,
            kind => {
                return Err(Error::new(
                    ErrorKind::BadSerialization,
                    format!("{kind} cannot be written as JSON"),
                ));
            }
        }
        Ok(())
    }

    fn list(&self, value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
        out.push('[');
        let mut any = false;
        for item in value.try_iter()? {
            out.push_str(if any { &self.item } else { "" });
            any = true;
            self.line(out, depth + 1);
            self.write(&item, out, depth + 1)?;
        }
        if any {
            self.line(out, depth);
        }
        out.push(']');
        Ok(())
    }

    fn map(&self, value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.sort_keys {
            keys.sort();
        }
        out.push('{');
        for (i, key) in keys.iter().enumerate() {
            out.push_str(if i > 0 { &self.item } else { "" });
            self.line(out, depth + 1);
            match key.as_str() {
                Some(text) => self.string(text, out),
                None => {
                    let mut text = String::new();
                    self.write(key, &mut text, MAX_DEPTH)?;
                    self.string(&text, out);
                }
            }
            out.push_str(&self.key);
            self.write(&value.get_item(key)?, out, depth + 1)?;
        }
        if !keys.is_empty() {
            self.line(out, depth);
        }
        out.push('}');
        Ok(())
    }

    fn line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ensure_ascii && (c as u32) >= 0x7f && c != '\u{7f}') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_python_s() {
        let cases = [
            (1.0, "1.0"),
            (1e16, "1e+16"),
            (1.5e-7, "1.5e-07"),
            (0.0001, "0.0001"),
            (1e22, "1e+22"),
            (0.1, "0.1"),
        ];
        for (x, text) in cases {
            assert_eq!(float(x), text);
        }
        assert_eq!(float(f64::NEG_INFINITY), "-inf");
    }

    #[test]
    fn values_print_as_in_python() {
        let value = Value::from(minijinja::value::Serde(
            serde_json::json!({"a": [1, 2.0, true, null, "it's"], "b": "x\n"}),
        ));
        assert_eq!(display(&value).unwrap(), r#"{'a': [1, 2.0, True, None, "it's"], 'b': 'x\n'}"#);
        assert_eq!(display(&Value::UNDEFINED).unwrap(), "");
    }
}
