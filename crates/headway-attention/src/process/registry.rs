//! Lifetime: process. The backends by name. A name and a platform are the identity: any number of plugins can
//! register, and a second backend of one name on one platform is an error.

use super::erased::{DynBackend, Erased};
use crate::{AttentionBackend, AttentionError, CONTRACT_VERSION, PickArgs, Result};
use std::sync::Arc;

/// All backends of this program, in order of registration, which is also the order of preference
/// among those that a layer could have.
#[derive(Default, Clone)]
pub struct Registry {
    backends: Vec<Arc<dyn DynBackend>>,
}

impl Registry {
    /// Adds a backend.
    ///
    /// # Errors
    /// [`AttentionError::Contract`] for another contract version, [`AttentionError::Duplicate`] for a
    /// name that is taken on its platform.
    pub fn register<B: AttentionBackend<Kind: PickArgs>>(&mut self) -> Result<()> {
        let backend = Erased::<B>::new();
        let name = backend.rules().name.to_string();
        if B::CONTRACT != CONTRACT_VERSION {
            return Err(AttentionError::Contract { backend: name, built: B::CONTRACT });
        }
        let rules = backend.rules();
        if self.backends.iter().any(|b| b.rules().name == name && b.rules().platform == rules.platform) {
            return Err(AttentionError::Duplicate(name));
        }
        self.backends.push(Arc::new(backend));
        Ok(())
    }

    /// The backend of that name (case counts for nothing); the first of several, each on its platform.
    ///
    /// # Errors
    /// [`AttentionError::Unknown`], with the names there are and the nearest by spelling.
    pub fn get(&self, name: &str) -> Result<&Arc<dyn DynBackend>> {
        self.backends.iter().find(|b| b.rules().name.eq_ignore_ascii_case(name)).ok_or_else(|| {
            let mut names: Vec<String> = vec![];
            for b in &self.backends {
                let name = b.rules().name.to_string();
                if !names.contains(&name) {
                    names.push(name);
                }
            }
            AttentionError::Unknown {
                name: name.to_owned(),
                nearest: nearest(name, names.iter().map(String::as_str)),
                known: names.join(", "),
            }
        })
    }

    /// The backend of that name on a platform; where it has none there, the one that [`Registry::get`] gives, whose
    /// rules then refuse by the platform.
    ///
    /// # Errors
    /// As [`Registry::get`].
    pub fn get_on(&self, name: &str, platform: &str) -> Result<&Arc<dyn DynBackend>> {
        let on = |b: &&Arc<dyn DynBackend>| {
            b.rules().name.eq_ignore_ascii_case(name) && b.rules().platform == platform
        };
        self.backends.iter().find(on).map_or_else(|| self.get(name), Ok)
    }

    /// All backends, most preferred first.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn DynBackend>> {
        self.backends.iter()
    }
}

/// The candidate nearest to `asked` by edit distance, where one is near at all.
pub fn nearest<'a>(asked: &str, candidates: impl Iterator<Item = &'a str>) -> Option<String> {
    let asked = asked.to_ascii_lowercase();
    let limit = 1 + asked.chars().count() / 3;
    candidates
        .map(|c| (edit_distance(&asked, &c.to_ascii_lowercase()), c))
        .min()
        .filter(|(d, _)| *d <= limit)
        .map(|(_, c)| c.to_owned())
}

fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spelling_suggestions() {
        let names = ["CPU_ATTN", "FLASH_ATTN", "CPU_MLA"];
        assert_eq!(nearest("cpu_atn", names.into_iter()).as_deref(), Some("CPU_ATTN"));
        assert_eq!(nearest("TRITON", names.into_iter()), None);
        assert_eq!(edit_distance("kitten", "sitting"), 3);
    }
}
