//! Methods that templates call on Python's strings, lists and dicts, where `minijinja-contrib` lacks them or differs.

use minijinja::value::{ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Longest result of padding, in characters.
const MAX_WIDTH: usize = 10_000;

/// Called for methods that a value does not have itself.
pub(super) fn call(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match (value.kind(), value.as_str()) {
        (_, Some(text)) => match string(text, method, args) {
            Some(result) => result,
            None => unknown_method_callback(state, value, method, args),
        },
        (ValueKind::Seq | ValueKind::Iterable, _) => match list(value, method, args) {
            Some(result) => result,
            None => unknown_method_callback(state, value, method, args),
        },
        _ => unknown_method_callback(state, value, method, args),
    }
}

fn invalid(detail: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, detail.into())
}

fn string(text: &str, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    Some(match method {
        "removeprefix" => one(args).map(|a| Value::from(text.strip_prefix(a).unwrap_or(text))),
        "removesuffix" => one(args).map(|a| Value::from(text.strip_suffix(a).unwrap_or(text))),
        "partition" => one(args).map(|a| parts(text.split_once(a), a, [text, "", ""])),
        "rpartition" => one(args).map(|a| parts(text.rsplit_once(a), a, ["", "", text])),
        "rsplit" => rsplit(text, args),
        "split" => match from_args::<(Option<&str>, Option<i64>)>(args) {
            Ok((Some(""), _)) => Err(invalid("empty separator")),
            _ => return None,
        },
        "index" => one(args).and_then(|a| {
            let at = text.find(a).ok_or_else(|| invalid("substring not found"))?;
            Ok(Value::from(text[..at].chars().count()))
        }),
        "casefold" => none(args).map(|()| Value::from(text.to_lowercase())),
        "zfill" => width(args).map(|n| zfill(text, n)),
        "ljust" => width(args).map(|n| Value::from(format!("{text:<n$}"))),
        "rjust" => width(args).map(|n| Value::from(format!("{text:>n$}"))),
        "center" => width(args).map(|n| Value::from(format!("{text:^n$}"))),
        "isupper" => none(args).map(|()| Value::from(cased(text, char::is_uppercase, char::is_lowercase))),
        "islower" => none(args).map(|()| Value::from(cased(text, char::is_lowercase, char::is_uppercase))),
        "isspace" | "isdigit" | "isnumeric" | "isalnum" | "isalpha" if text.is_empty() => {
            none(args).map(|()| Value::from(false))
        }
        "format" => match super::filters::check_str_format(text) {
            Ok(()) => return None,
            Err(error) => Err(error),
        },
        _ => return None,
    })
}

fn list(value: &Value, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    match method {
        "index" => Some(from_args::<(Value,)>(args).and_then(|(what,)| {
            let at = value.try_iter()?.position(|x| x == what);
            at.map(Value::from).ok_or_else(|| invalid("value is not in list"))
        })),
        "copy" => Some(none(args).map(|()| value.clone())),
        _ => None,
    }
}

fn one(args: &[Value]) -> Result<&str, Error> {
    from_args::<(&str,)>(args).map(|(a,)| a)
}

fn none(args: &[Value]) -> Result<(), Error> {
    from_args::<()>(args)
}

fn width(args: &[Value]) -> Result<usize, Error> {
    let (n,) = from_args::<(i64,)>(args)?;
    let n = usize::try_from(n).unwrap_or(0);
    if n > MAX_WIDTH {
        return Err(invalid(format!("a width of {n} is more than {MAX_WIDTH}")));
    }
    Ok(n)
}

fn parts(split: Option<(&str, &str)>, separator: &str, whole: [&str; 3]) -> Value {
    match split {
        Some((left, right)) => [left, separator, right].into_iter().map(Value::from).collect(),
        None => whole.into_iter().map(Value::from).collect(),
    }
}

fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, limit) = from_args::<(Option<&str>, Option<i64>)>(args)?;
    let limit = limit.and_then(|n| usize::try_from(n).ok()).map_or(usize::MAX, |n| n.saturating_add(1));
    let mut found: Vec<&str> = match separator {
        Some("") => return Err(invalid("empty separator")),
        Some(separator) => text.rsplitn(limit, separator).collect(),
        None => split_whitespace_from_end(text, limit),
    };
    found.reverse();
    Ok(found.into_iter().map(Value::from).collect())
}

fn split_whitespace_from_end(text: &str, limit: usize) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = text.trim_end();
    while !rest.is_empty() {
        if found.len() + 1 >= limit {
            found.push(rest);
            break;
        }
        match rest.rfind(char::is_whitespace) {
            Some(at) => {
                let after = at + rest[at..].chars().next().map_or(1, char::len_utf8);
                found.push(&rest[after..]);
                rest = rest[..at].trim_end();
            }
            None => {
                found.push(rest);
                break;
            }
        }
    }
    found
}

fn zfill(text: &str, n: usize) -> Value {
    let (sign, digits) = match text.strip_prefix(['-', '+']) {
        Some(rest) => text.split_at(text.len() - rest.len()),
        None => ("", text),
    };
    let n = n.saturating_sub(sign.len());
    Value::from(format!("{sign}{digits:0>n$}"))
}

/// Whether some character is of one case and none of the other.
fn cased(text: &str, yes: fn(char) -> bool, no: fn(char) -> bool) -> bool {
    text.chars().any(yes) && !text.chars().any(no)
}
