//! Names of compositions: `A+B`.

use crate::{AttentionError, Result, RuleBook};

/// What stands between the names of the parts.
pub(in crate::process) const BETWEEN: char = '+';

/// The name of two as one.
pub(super) fn of(decode: &RuleBook, prefill: &RuleBook) -> String {
    format!("{}{BETWEEN}{}", decode.name, prefill.name)
}

/// The names of the parts, for decodes and for prefills; `None`: a backend's own name.
///
/// # Errors
/// Another number of parts than two, or one of them twice.
pub(in crate::process) fn parts_of(name: &str) -> Result<Option<[&str; 2]>> {
    let parts: Vec<&str> = name.split(BETWEEN).map(str::trim).collect();
    let refuse = |why: String| Err(AttentionError::Composition { name: name.to_owned(), why });
    match *parts {
        [_] => Ok(None),
        [d, p] if !d.is_empty() && d.eq_ignore_ascii_case(p) => {
            refuse(format!("both parts are {d}; leave +{p} out"))
        }
        [d, p] if !d.is_empty() && !p.is_empty() => Ok(Some([d, p])),
        _ => {
            let count = parts.iter().filter(|p| !p.is_empty()).count();
            refuse(format!("it names {count} backends; write DECODE+PREFILL, one for each"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_names_are_a_composition_and_other_numbers_are_none() {
        let of = |name| parts_of(name).map_err(|e| e.to_string());
        assert_eq!(of("FLASH_ATTN"), Ok(None));
        assert_eq!(of("A + b"), Ok(Some(["A", "b"])));
        assert_eq!(of("A+a"), Err("backend A+a: both parts are A; leave +a out".into()));
        for (name, count) in [("A+B+C", 3), ("A+", 1), ("+B", 1), ("+", 0), ("A++B", 2)] {
            let says = format!("backend {name}: it names {count} backends; write DECODE+PREFILL");
            assert!(of(name).is_err_and(|e| e.starts_with(&says)), "{name}: {:?}", of(name));
        }
    }
}
