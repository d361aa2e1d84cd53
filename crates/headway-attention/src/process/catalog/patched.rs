//! A value that varies: a base, and patches that conditions switch on.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value as Json};

/// More patches of one value would make its table too large.
const MOST_PATCHES: usize = 8;

/// Every combination of a base object with patches of single fields, parsed once. Later patches win.
#[derive(Debug)]
pub struct Patched<T>(Vec<T>);

impl<T: DeserializeOwned> Patched<T> {
    /// Parses `base` with every subset of `patches`.
    ///
    /// # Errors
    /// A field that `T` doesn't have or can't read, or more than eight patches.
    pub fn new(base: &Map<String, Json>, patches: &[Map<String, Json>]) -> Result<Self, String> {
        if patches.len() > MOST_PATCHES {
            return Err(format!(
                "{} overrides of one section; at most {MOST_PATCHES} are read",
                patches.len()
            ));
        }
        let parse = |mask: usize| {
            let mut object = base.clone();
            for (_, patch) in patches.iter().enumerate().filter(|(i, _)| mask & (1 << i) != 0) {
                object.extend(patch.clone());
            }
            serde_json::from_value(Json::Object(object)).map_err(|e| e.to_string())
        };
        (0..1 << patches.len()).map(parse).collect::<Result<_, _>>().map(Self)
    }

    /// The value where the patches hold that `holds` says, by index.
    pub fn at(&self, holds: impl Iterator<Item = bool>) -> &T {
        let mask = holds.enumerate().fold(0, |mask, (i, on)| mask | (usize::from(on) << i));
        &self.0[mask]
    }

    /// All values, possible combinations and others.
    pub fn all(&self) -> impl Iterator<Item = &T> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use serde_json::json;

    #[derive(Deserialize, Debug, PartialEq)]
    #[serde(deny_unknown_fields)]
    struct Pair {
        a: u32,
        b: u32,
    }

    fn object(value: Json) -> Map<String, Json> {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn later_patches_win() {
        let base = object(json!({"a": 1, "b": 2}));
        let patches = [object(json!({"a": 3})), object(json!({"a": 4, "b": 5}))];
        let p = Patched::<Pair>::new(&base, &patches).unwrap();
        let at = |first, second| p.at([first, second].into_iter());
        assert_eq!(*at(false, false), Pair { a: 1, b: 2 });
        assert_eq!(*at(true, false), Pair { a: 3, b: 2 });
        assert_eq!(*at(true, true), Pair { a: 4, b: 5 });
        assert_eq!(p.all().count(), 4);
    }

    #[test]
    fn wrong_patches_are_refused() {
        let base = object(json!({"a": 1, "b": 2}));
        assert!(Patched::<Pair>::new(&base, &[object(json!({"c": 3}))]).unwrap_err().contains("`c`"));
        assert!(Patched::<Pair>::new(&base, &[object(json!({"a": "x"}))]).is_err());
        let many = vec![object(json!({"a": 3})); 9];
        assert!(Patched::<Pair>::new(&base, &many).unwrap_err().contains("at most 8"));
    }
}
