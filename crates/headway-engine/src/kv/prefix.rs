//! The longest cached prefix that every KV cache group can serve.
//!
//! Lifetime: one admission. A full group needs every block of the prefix; a group that looks back only so far needs
//! the blocks that the first new token reads. The prefix must end on a block border of every group, and it never
//! covers the whole prompt: the last token is always computed, because its logits are wanted. Nor does it end inside a
//! range whose tokens see each other both ways: what is left of such a range could not be computed whole.

use super::hash::BlockHashes;
use super::pool::{PageKey, PagePool};
use super::{KvGroupPolicy, NULL_BLOCK};

/// A prefix found in the cache. Holds no page: use it for an admission before anything else is allocated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CachedPrefix {
    /// Length in tokens; a multiple of every group's block size.
    pub(super) num_tokens: usize,
    /// Tokens that were looked for.
    pub(super) queried: usize,
    /// For each group the block table of the prefix; entries that nobody will read are the null block.
    pub(super) tables: Vec<Vec<u32>>,
    /// Tokens of the encoder's input that the request brings with it.
    pub(super) encoder_tokens: usize,
    /// Every page of the tables with what it was found by, so that an eviction in between is noticed.
    pub(super) keys: Vec<(u32, PageKey)>,
}

impl CachedPrefix {
    /// A prefix of nothing, for a request that must not use the cache.
    pub fn none() -> Self {
        Self::default()
    }

    /// For a request that attends to an encoder's input of so many tokens.
    #[must_use]
    pub fn with_encoder_tokens(self, encoder_tokens: usize) -> Self {
        Self { encoder_tokens, ..self }
    }

    /// Length in tokens.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }
}

/// Finds the longest usable prefix of `tokens`; `step` is the common multiple of all block sizes.
pub(super) fn find(
    pool: &PagePool,
    groups: &[KvGroupPolicy],
    step: usize,
    hashes: &mut BlockHashes,
    tokens: &[u32],
) -> CachedPrefix {
    let mut length = tokens.len().saturating_sub(1) / step * step;
    // Each pass can only shorten the prefix, so this ends; full groups settle in their first pass.
    loop {
        let before = length;
        for (group, policy) in groups.iter().enumerate() {
            length = longest_for(pool, group, policy, step, hashes, tokens, length);
        }
        length = hashes.outside_ranges(length) / step * step;
        if length == before {
            break;
        }
    }
    let mut prefix = CachedPrefix { num_tokens: length, queried: tokens.len(), ..CachedPrefix::none() };
    for (group, policy) in groups.iter().enumerate() {
        add_table(pool, group, policy, hashes, tokens, &mut prefix);
    }
    prefix
}

/// The longest prefix of at most `length` tokens, a multiple of `step`, that one group can serve.
fn longest_for(
    pool: &PagePool,
    group: usize,
    policy: &KvGroupPolicy,
    step: usize,
    hashes: &mut BlockHashes,
    tokens: &[u32],
    mut length: usize,
) -> usize {
    let size = policy.block_size;
    // From the front where everything is read: most prompts miss early, and no hash behind the miss is needed.
    if policy.first_readable(length) == 0 {
        for block in 0..length / size {
            if !is_cached(pool, group, size, hashes, tokens, block) {
                return block * size / step * step;
            }
        }
        return length;
    }
    'shorter: while length > 0 {
        for block in (policy.first_readable(length) / size..length / size).rev() {
            if !is_cached(pool, group, size, hashes, tokens, block) {
                length = block * size / step * step;
                continue 'shorter;
            }
        }
        return length;
    }
    0
}

fn is_cached(
    pool: &PagePool,
    group: usize,
    size: usize,
    hashes: &mut BlockHashes,
    tokens: &[u32],
    block: usize,
) -> bool {
    let known = hashes.upto(size, block + 1, tokens);
    known.get(block).is_some_and(|hash| pool.find((group as u32, *hash)).is_some())
}

fn add_table(
    pool: &PagePool,
    group: usize,
    policy: &KvGroupPolicy,
    hashes: &mut BlockHashes,
    tokens: &[u32],
    prefix: &mut CachedPrefix,
) {
    let num_blocks = prefix.num_tokens / policy.block_size;
    let first = policy.first_readable(prefix.num_tokens) / policy.block_size;
    let mut table = vec![NULL_BLOCK; num_blocks];
    let known = hashes.upto(policy.block_size, num_blocks, tokens);
    for (block, hash) in known.iter().enumerate().skip(first) {
        let key = (group as u32, *hash);
        if let Some(page) = pool.find(key) {
            table[block] = page;
            prefix.keys.push((page, key));
        }
    }
    prefix.tables.push(table);
}
