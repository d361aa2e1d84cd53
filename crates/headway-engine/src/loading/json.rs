//! JSON as model repositories write it: with bare `Infinity`, `-Infinity` and `NaN`.
//!
//! Python's `json` writes these tokens and strict readers refuse them; newer transformers releases write
//! `{"__float__": "Infinity"}`. Both become the JSON strings `"Infinity"`, `"-Infinity"`, `"NaN"`, and
//! [`float`] reads a number or such a string.
//!
//! Not for requests from the network: those are strict JSON.

use super::LoadError;
use super::error::one_line;
use serde_json::Value;
use std::path::Path;

/// Configuration files beyond this size are refused: the largest tokenizers have a tenth of it.
const LARGEST: u64 = 256 << 20;
const TOKENS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// Reads and parses the JSON file at `path`.
///
/// # Errors
/// [`LoadError::Io`] or [`LoadError::Json`].
pub fn read(path: &Path) -> Result<Value, LoadError> {
    let text = read_text(path)?;
    parse(&text).map_err(|e| LoadError::Json { path: path.to_owned(), what: one_line(&e.to_string()) })
}

/// [`read`], and `None` where there is no such file.
///
/// # Errors
/// As [`read`].
pub fn read_optional(path: &Path) -> Result<Option<Value>, LoadError> {
    if path.is_file() { read(path).map(Some) } else { Ok(None) }
}

/// Reads a UTF-8 text file of bounded size.
///
/// # Errors
/// [`LoadError::Io`], also for text that is not UTF-8 and for files over 256 MiB.
pub fn read_text(path: &Path) -> Result<String, LoadError> {
    let io = |source| LoadError::Io { path: path.to_owned(), doing: "read", source };
    if std::fs::metadata(path).map_err(io)?.len() > LARGEST {
        return Err(io(std::io::Error::new(std::io::ErrorKind::InvalidData, "larger than 256 MiB")));
    }
    std::fs::read_to_string(path).map_err(io)
}

/// Parses JSON that may contain the non-finite tokens.
///
/// # Errors
/// What `serde_json` says about the text with these tokens replaced.
pub fn parse(text: &str) -> Result<Value, serde_json::Error> {
    let mut value = serde_json::from_str(&quote_non_finite(text))?;
    unwrap_floats(&mut value);
    Ok(value)
}

/// A number, or one of the three non-finite words, as `f64`.
pub fn float(value: &Value) -> Option<f64> {
    match value {
        Value::Number(number) => number.as_f64(),
        Value::String(word) => match word.as_str() {
            "Infinity" => Some(f64::INFINITY),
            "-Infinity" => Some(f64::NEG_INFINITY),
            "NaN" => Some(f64::NAN),
            _ => None,
        },
        _ => None,
    }
}

/// Puts quotes around non-finite tokens outside strings.
fn quote_non_finite(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    let (mut rest, mut in_string) = (text, false);
    while let Some(c) = rest.chars().next() {
        let token = TOKENS.iter().find(|t| !in_string && rest.starts_with(**t));
        let step = if let Some(token) = token {
            out.extend(["\"", token, "\""]);
            token.len()
        } else if in_string && c == '\\' {
            let escaped = rest.chars().nth(1).map_or(0, char::len_utf8);
            out.push_str(&rest[..1 + escaped]);
            1 + escaped
        } else {
            in_string ^= c == '"';
            out.push(c);
            c.len_utf8()
        };
        rest = &rest[step..];
    }
    out
}

/// `{"__float__": "Infinity"}` becomes `"Infinity"`, at any depth (the parser bounds it).
fn unwrap_floats(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(unwrap_floats),
        Value::Object(fields) => {
            let word = match fields.get("__float__") {
                Some(word @ Value::String(_)) if fields.len() == 1 => Some(word.clone()),
                _ => None,
            };
            match word {
                Some(word) => *value = word,
                None => fields.values_mut().for_each(unwrap_floats),
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_of_infinity_load() {
        for text in [r#"{"limit": [0.0, Infinity]}"#, r#"{"limit": [0.0, {"__float__": "Infinity"}]}"#] {
            let limit = &parse(text).unwrap()["limit"];
            assert_eq!(float(&limit[0]), Some(0.0));
            assert_eq!(float(&limit[1]), Some(f64::INFINITY));
        }
        assert_eq!(float(&parse("-Infinity").unwrap()), Some(f64::NEG_INFINITY));
        assert!(float(&parse("NaN").unwrap()).unwrap().is_nan());
        assert_eq!(float(&Value::Bool(true)), None);
    }

    #[test]
    fn strings_are_left_alone() {
        let text = r#"{"a": "Infinity and \"NaN\" \\", "NaN": 1, "ü": "\u00fc"}"#;
        let value = parse(text).unwrap();
        assert_eq!(value, serde_json::from_str::<Value>(text).unwrap());
        assert!(parse("{\"a\": Infinit}").is_err());
        assert!(parse("\"\\").is_err());
    }

    #[test]
    fn errors_name_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, "{\n").unwrap();
        let message = read(&path).unwrap_err().to_string();
        assert!(message.contains("config.json: not valid JSON") && !message.contains('\n'), "{message}");
        std::fs::write(&path, [0xff, 0xfe]).unwrap();
        assert!(matches!(read(&path), Err(LoadError::Io { .. })));
        assert!(read_optional(&dir.path().join("none.json")).unwrap().is_none());
    }
}
