//! A batch that is measured.

use serde::Deserialize;

/// What a case does.
#[derive(Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// One new token a request.
    Decode,
    /// Many new tokens a request.
    Prefill,
    /// Both in one call.
    Mixed,
    /// Only the cache write.
    Write,
}

impl Kind {
    /// As files and tables write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Prefill => "prefill",
            Self::Mixed => "mixed",
            Self::Write => "write",
        }
    }
}

/// Where the cache of a call lies.
#[derive(Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum CacheState {
    /// Last touched a pool's worth of traffic ago.
    Cold,
    /// The same every call.
    Hot,
}

/// One case.
#[derive(Deserialize, Debug, Clone)]
pub struct Case {
    /// Its name.
    pub id: String,
    /// What it does.
    pub kind: Kind,
    /// Where its cache lies.
    pub cache: CacheState,
    /// `[new tokens, tokens in all]` of each request, decodes first.
    #[serde(default)]
    pub seqs: Vec<[usize; 2]>,
    /// Tokens to write, for [`Kind::Write`].
    #[serde(default)]
    pub tokens: usize,
    /// For heads of latent attention, and for no others.
    #[serde(default)]
    pub latent: bool,
}

impl Case {
    /// What is wrong with it.
    ///
    /// # Errors
    /// That.
    pub fn check(&self) -> Result<(), &'static str> {
        match self.kind {
            Kind::Write if self.tokens == 0 => Err("tokens must be at least 1"),
            Kind::Write if self.latent => Err("writes are of keys and values; leave latent out"),
            Kind::Write => Ok(()),
            _ if self.seqs.is_empty() => Err("seqs is empty"),
            _ if self.seqs.iter().any(|&[new, all]| new == 0 || new > all) => {
                Err("a request needs at least one new token, and no more of them than tokens in all")
            }
            _ => Ok(()),
        }
    }

    /// New tokens of all requests.
    pub fn new_tokens(&self) -> usize {
        if self.kind == Kind::Write { self.tokens } else { self.seqs.iter().map(|s| s[0]).sum() }
    }

    /// Key/value pairs that the call reads, each once; for a write, that it writes. `window`: a query sees so many, with
    /// its own.
    pub fn kv_tokens(&self, window: Option<usize>) -> usize {
        let reach = window.unwrap_or(usize::MAX);
        let seen = |&[new, all]: &[usize; 2]| all - (all - new + 1).saturating_sub(reach);
        if self.kind == Kind::Write { self.tokens } else { self.seqs.iter().map(seen).sum() }
    }

    /// Pairs of a query and a key that it may see.
    pub fn visible_pairs(&self, window: Option<usize>) -> usize {
        let reach = window.unwrap_or(usize::MAX);
        // The query at position p, from 1 on, sees p keys, or the window's.
        let up_to = |p: usize| {
            let few = p.min(reach);
            few * (few + 1) / 2 + (p - few) * few
        };
        self.seqs.iter().map(|&[new, all]| up_to(all) - up_to(all - new)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_window_leaves_is_counted() {
        let case = |seqs: &[[usize; 2]]| Case {
            id: String::new(),
            kind: Kind::Mixed,
            cache: CacheState::Cold,
            seqs: seqs.to_vec(),
            tokens: 0,
            latent: false,
        };
        // By the definition: token p sees the last `window` of the first p.
        for seqs in
            [vec![[1, 1]], vec![[1, 100]], vec![[7, 7]], vec![[5, 30], [1, 3]], vec![[64, 64], [1, 9]]]
        {
            for window in [None, Some(1), Some(4), Some(7), Some(30), Some(1000)] {
                let w = window.unwrap_or(usize::MAX);
                let sees = |p: usize| p.min(w);
                let pairs = |&[new, all]: &[usize; 2]| (all - new + 1..=all).map(sees).sum::<usize>();
                let keys = |&[new, all]: &[usize; 2]| all - (all - new + 1 - sees(all - new + 1));
                let c = case(&seqs);
                assert_eq!(
                    c.visible_pairs(window),
                    seqs.iter().map(pairs).sum::<usize>(),
                    "{seqs:?} {window:?}"
                );
                assert_eq!(c.kv_tokens(window), seqs.iter().map(keys).sum::<usize>(), "{seqs:?} {window:?}");
            }
        }
    }
}
