//! [`PromptLookup`]: drafts out of what the request has said already (prompt lookup decoding, n-gram speculation).
//!
//! Lifetime: one request. The index is a hash chain, as compressors use for finding matches: buckets of positions by
//! the hash of the `min` tokens before them, the latest first. It grows by one entry a token, and a lookup follows so
//! many entries at most, so a step's cost does not grow with the context.

/// How many of a request's last tokens must have come before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LookupSizes {
    /// The fewest tokens that make a match, at least 1 (`--prompt-lookup-min`).
    pub min: usize,
    /// Longer matches than this are not told apart, at least `min` (`--prompt-lookup-max`).
    pub max: usize,
}

impl LookupSizes {
    /// The fewest, where not asked.
    pub const DEFAULT_MIN: usize = 3;
    /// The most, where not asked.
    pub const DEFAULT_MAX: usize = 8;
}

impl Default for LookupSizes {
    fn default() -> Self {
        Self { min: Self::DEFAULT_MIN, max: Self::DEFAULT_MAX }
    }
}

/// Places looked at in one lookup.
const MOST_CANDIDATES: usize = 64;
/// Buckets: the fewest and the most, powers of two.
const BUCKETS: (usize, usize) = (1 << 8, 1 << 16);
/// No position.
const NONE: u32 = u32::MAX;

/// Proposes what followed the last tokens when they came before.
///
/// ```
/// use headway_engine::speculation::{LookupSizes, PromptLookup};
///
/// let mut lookup = PromptLookup::new(LookupSizes { min: 2, max: 4 });
/// let mut drafts = vec![];
/// lookup.propose(&[1, 2, 3, 4, 5, 9, 2, 3], 2, &mut drafts);
/// assert_eq!(drafts, [4, 5]);
/// ```
#[derive(Clone, Debug)]
pub struct PromptLookup {
    sizes: LookupSizes,
    /// By bucket the latest position whose `min` tokens before it fall into it.
    heads: Vec<u32>,
    /// By position the one before it in its bucket.
    earlier: Vec<u32>,
    /// The most tokens of the next draft.
    trust: usize,
}

/// The most tokens of a request's first draft.
const FIRST_TRUST: usize = 2;

impl PromptLookup {
    /// A drafter of a request that it has seen nothing of.
    pub fn new(sizes: LookupSizes) -> Self {
        let min = sizes.min.max(1);
        let sizes = LookupSizes { min, max: sizes.max.max(min) };
        Self { sizes, heads: vec![], earlier: vec![], trust: FIRST_TRUST }
    }

    /// Appends at most `most` tokens to `drafts`: those that followed the longest match of the end of `tokens`, of
    /// equal ones the latest. A match that ends so near that less than `most` tokens follow goes on into what it
    /// proposes, so that a text that goes round in circles is drafted in full. Nothing where there is no match; fewer
    /// where the last drafts were wrong ([`Self::learn_outcome`]).
    ///
    /// `tokens` are all tokens of the request; it may only ever grow.
    pub fn propose(&mut self, tokens: &[u32], most: usize, drafts: &mut Vec<u32>) {
        self.learn(tokens);
        let Some(from) = self.find(tokens) else { return };
        let start = drafts.len();
        for i in 0..most.min(self.trust) {
            let at = from + i;
            let token = tokens.get(at).copied().unwrap_or_else(|| drafts[start + at - tokens.len()]);
            drafts.push(token);
        }
    }

    /// Takes note of a draft of `drafted` tokens, of which the first `accepted` were right. A draft that was right is
    /// followed by one of up to twice its length, a wrong one by one of as many tokens as were right and one more: where
    /// text is new, a chance match costs a row, not K.
    pub fn learn_outcome(&mut self, drafted: usize, accepted: usize) {
        match accepted < drafted {
            true => self.trust = accepted + 1,
            false => self.trust = self.trust.max(drafted.saturating_mul(2)),
        }
    }

    /// Bytes of the index.
    pub fn bytes(&self) -> usize {
        (self.heads.capacity() + self.earlier.capacity()) * size_of::<u32>()
    }

    /// Files the positions before the end that were not filed so far.
    fn learn(&mut self, tokens: &[u32]) {
        // Positions are kept in 32 bits; a longer request is drafted from its first four billion tokens.
        let end = tokens.len().min(NONE as usize);
        // Filed anew in twice the buckets when the tokens outgrow them, which costs a constant for each token.
        if self.heads.is_empty() || (end > 2 * self.heads.len() && self.heads.len() < BUCKETS.1) {
            self.heads = vec![NONE; end.next_power_of_two().clamp(BUCKETS.0, BUCKETS.1)];
            self.earlier.clear();
        }
        for position in self.earlier.len()..end {
            let earlier = match position.checked_sub(self.sizes.min) {
                Some(first) => {
                    let bucket = self.bucket(&tokens[first..position]);
                    std::mem::replace(&mut self.heads[bucket], position as u32)
                }
                None => NONE,
            };
            self.earlier.push(earlier);
        }
    }

    /// The position after the longest match, of equal ones the latest.
    fn find(&self, tokens: &[u32]) -> Option<usize> {
        let LookupSizes { min, max } = self.sizes;
        let last = &tokens[tokens.len().checked_sub(min)?..];
        let (mut best, mut found) = (min - 1, None);
        let mut at = self.heads[self.bucket(last)];
        for _ in 0..MOST_CANDIDATES {
            let Some(&earlier) = self.earlier.get(at as usize) else { break };
            let position = at as usize;
            let pairs = tokens[..position].iter().rev().zip(tokens.iter().rev());
            let len = pairs.take(max).take_while(|(a, b)| a == b).count();
            if len > best {
                (best, found) = (len, Some(position));
                if len == max {
                    break;
                }
            }
            at = earlier;
        }
        found
    }

    /// FNV-1a over the tokens, the high bits of which choose the bucket.
    fn bucket(&self, tokens: &[u32]) -> usize {
        let mix = |h: u64, t: &u32| (h ^ u64::from(*t)).wrapping_mul(0x0000_0100_0000_01b3);
        let hash = tokens.iter().fold(0xcbf2_9ce4_8422_2325, mix).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (hash >> 40) as usize & (self.heads.len() - 1)
    }
}
