//! Lifetime: process. The backends by name. A name and a platform are the identity: any number of plugins can
//! register, and a second backend of one name on one platform is an error.

use super::{
    composed::{self, Composed},
    erased::{DynBackend, Erased},
};
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
    /// name that is taken on its platform, [`AttentionError::Composition`] for one that reads as two.
    pub fn register<B: AttentionBackend<Kind: PickArgs>>(&mut self) -> Result<()> {
        let backend = Erased::<B>::new();
        let name = backend.rules().name.to_string();
        if B::CONTRACT != CONTRACT_VERSION {
            return Err(AttentionError::Contract { backend: name, built: B::CONTRACT });
        }
        let rules = backend.rules();
        if name.contains(composed::BETWEEN) {
            let why = "names with + are of two backends that serve as one; choose another".into();
            return Err(AttentionError::Composition { name, why });
        }
        if self.backends.iter().any(|b| b.rules().name == name && b.rules().platform == rules.platform) {
            return Err(AttentionError::Duplicate(name));
        }
        self.backends.push(Arc::new(backend));
        Ok(())
    }

    /// The backend of that name (case counts for nothing); the first of several, each on its platform. `A+B` is
    /// [`Composed`]: a backend made of two registered ones, A for decodes and B for prefills.
    ///
    /// # Errors
    /// [`AttentionError::Unknown`], with the names there are and the nearest by spelling;
    /// [`AttentionError::Composition`] where two backends can't be made one.
    pub fn get(&self, name: &str) -> Result<Arc<dyn DynBackend>> {
        self.find(name, None)
    }

    /// The backend of that name on a platform; where it has none there, the one that [`Registry::get`] gives, whose
    /// rules then refuse by the platform.
    ///
    /// # Errors
    /// As [`Registry::get`].
    pub fn get_on(&self, name: &str, platform: &str) -> Result<Arc<dyn DynBackend>> {
        self.find(name, Some(platform))
    }

    fn find(&self, name: &str, platform: Option<&str>) -> Result<Arc<dyn DynBackend>> {
        let here = |b: &Arc<dyn DynBackend>| platform.is_none_or(|p| b.rules().platform == p);
        let Some([decode, prefill]) = composed::parts_of(name)? else {
            let all = self.named(name)?;
            return Ok(Arc::clone(all.iter().find(|b| here(b)).unwrap_or(&all[0])));
        };
        let (decodes, prefills) = (self.named(decode)?, self.named(prefill)?);
        let beside = |d: &&Arc<dyn DynBackend>| {
            let both = prefills.iter().find(|p| p.rules().platform == d.rules().platform);
            both.map(|p| (Arc::clone(d), Arc::clone(p)))
        };
        let pairs: Vec<_> = decodes.iter().filter_map(beside).collect();
        let pair = pairs.iter().find(|(d, _)| here(d)).or(pairs.first());
        let (d, p) = pair.cloned().unwrap_or_else(|| (Arc::clone(decodes[0]), Arc::clone(prefills[0])));
        Ok(Arc::new(Composed::new(d, p)?))
    }

    /// Those of that name, on whatever platforms; at least one.
    fn named(&self, name: &str) -> Result<Vec<&Arc<dyn DynBackend>>> {
        let all: Vec<_> =
            self.backends.iter().filter(|b| b.rules().name.eq_ignore_ascii_case(name)).collect();
        if !all.is_empty() {
            return Ok(all);
        }
        let mut names: Vec<String> = vec![];
        for b in &self.backends {
            let name = b.rules().name.to_string();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        Err(AttentionError::Unknown {
            name: name.to_owned(),
            nearest: nearest(name, names.iter().map(String::as_str)),
            known: names.join(", "),
        })
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
