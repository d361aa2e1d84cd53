//! Which data file a version means.

use super::data::FILES;
use crate::{AttentionError, Result};

/// The version and its data file.
pub fn find(asked: &str) -> Result<(&'static str, &'static str)> {
    let wanted = asked.trim().trim_start_matches(['v', 'V']);
    FILES.iter().find(|(version, _)| *version == wanted).copied().ok_or_else(|| {
        let known: Vec<_> = FILES.iter().map(|(version, _)| *version).collect();
        AttentionError::CatalogVersion {
            asked: asked.to_owned(),
            nearest: nearest(wanted, &known).map(str::to_owned),
            known: known.join(", "),
        }
    })
}

/// The version whose numbers differ least, the first number counting most; `None` for no version at all.
fn nearest<'a>(asked: &str, known: &[&'a str]) -> Option<&'a str> {
    let numbers = |s: &str| -> Option<[i64; 3]> {
        let mut parts = s.split('.').map(|p| p.parse().ok());
        Some([parts.next()??, parts.next().unwrap_or(Some(0))?, parts.next().unwrap_or(Some(0))?])
    };
    let asked = numbers(asked)?;
    known.iter().copied().min_by_key(|k| {
        let k = numbers(k).unwrap_or([i64::MAX; 3]);
        [0, 1, 2].map(|i| k[i].abs_diff(asked[i]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_version() {
        let known = ["0.11.0", "0.12.1", "0.33.0"];
        assert_eq!(nearest("0.12.9", &known), Some("0.12.1"));
        assert_eq!(nearest("0.31", &known), Some("0.33.0"));
        assert_eq!(nearest("1.0.0", &known), Some("0.11.0"));
        assert_eq!(nearest("newest", &known), None);
    }

    #[test]
    fn an_unknown_version_names_those_there_are() {
        let e = find("0.34.0").unwrap_err().to_string();
        for part in ["0.34.0", "0.33.0", "nearest"] {
            assert!(e.contains(part), "{part} in {e}");
        }
        assert!(find("v0.33.0").is_ok());
    }
}
