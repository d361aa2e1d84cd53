//! Hashes that name a full block by its tokens and everything before them.
//!
//! Lifetime: one request, kept across preemption: a request only ever appends tokens, so a computed hash stays true.
//! A hash does not depend on the group; the pool adds the group when it files a page.
//!
//! The hash is the first 128 bits of SHA-256 over (parent hash, token ids): a wrong hit would answer one request out
//! of another's cache, so two different prefixes must not meet even when someone tries to make them.

use sha2::{Digest, Sha256};
use std::ops::Range;

/// The name of a full block: its tokens and all tokens before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(u128);

impl BlockHash {
    /// The hash of the block of `tokens` that follows `parent` (`None`: the block is the first).
    pub fn chain(parent: Option<BlockHash>, tokens: &[u32]) -> Self {
        Self::chain_with(parent, tokens, &[])
    }

    /// [`Self::chain`] of a block that depends on `more` than its tokens and those before.
    fn chain_with(parent: Option<BlockHash>, tokens: &[u32], more: &[u64]) -> Self {
        let mut sha = Sha256::new();
        sha.update([u8::from(parent.is_some()) | u8::from(!more.is_empty()) << 1]);
        sha.update(parent.map_or(0, |p| p.0).to_le_bytes());
        for token in tokens {
            sha.update(token.to_le_bytes());
        }
        for x in more {
            sha.update(x.to_le_bytes());
        }
        let digest = sha.finalize();
        let mut first = [0u8; 16];
        first.copy_from_slice(&digest[..16]);
        Self(u128::from_le_bytes(first))
    }
}

/// The block hashes of one request, one chain for each block size in use; filled as far as they were asked for.
///
/// Belongs to whoever owns the request's tokens and must only ever be used with them.
#[derive(Clone, Debug, Default)]
pub struct BlockHashes {
    /// (block size in tokens, hashes of the full blocks from the first).
    chains: Vec<(usize, Vec<BlockHash>)>,
    /// Ranges whose tokens see each other in both directions.
    both_ways: Vec<Range<usize>>,
    /// Tokens of the prompt, where the layers see those after it otherwise (R-SWA).
    prompt: Option<usize>,
}

impl BlockHashes {
    /// For a request whose keys and values depend on more than the tokens up to them: a block that a range of
    /// `both_ways` reaches into depends on the range and on the rest of its tokens; one past the `prompt` (R-SWA) on
    /// where that ends.
    pub fn with_masks(both_ways: Vec<Range<usize>>, prompt: Option<usize>) -> Self {
        Self { chains: vec![], both_ways, prompt }
    }

    /// `length`, or where that is inside a range, the beginning of it: what is computed of a range is computed whole.
    pub(super) fn outside_ranges(&self, mut length: usize) -> usize {
        while let Some(r) = self.both_ways.iter().find(|r| r.start < length && length < r.end) {
            length = r.start;
        }
        length
    }

    /// What a block depends on besides its tokens and those before.
    fn more(
        both_ways: &[Range<usize>],
        prompt: Option<usize>,
        block: Range<usize>,
        tokens: &[u32],
    ) -> Vec<u64> {
        let mut more = vec![];
        for r in both_ways.iter().filter(|r| r.start < block.end && r.end > block.start) {
            more.extend([r.start as u64, r.end as u64]);
            let rest = block.end.max(r.start)..r.end.max(block.end);
            more.extend(tokens.get(rest).unwrap_or(&[]).iter().map(|&t| u64::from(t)));
        }
        more.extend(prompt.filter(|&p| block.end > p).map(|p| p as u64));
        more
    }

    /// The hashes of the first `num_blocks` blocks of `block_size` tokens, or of as many as `tokens` fills.
    pub fn upto(&mut self, block_size: usize, num_blocks: usize, tokens: &[u32]) -> &[BlockHash] {
        let at = match self.chains.iter().position(|(size, _)| *size == block_size) {
            Some(at) => at,
            None => {
                self.chains.push((block_size, Vec::new()));
                self.chains.len() - 1
            }
        };
        let chain = &mut self.chains[at].1;
        let known = chain.len();
        let fresh = tokens.chunks_exact(block_size).enumerate().take(num_blocks).skip(known);
        let mut parent = chain.last().copied();
        let masked = !self.both_ways.is_empty() || self.prompt.is_some();
        for (i, block) in fresh {
            let at = i * block_size..(i + 1) * block_size;
            let more = if masked { Self::more(&self.both_ways, self.prompt, at, tokens) } else { vec![] };
            let hash = BlockHash::chain_with(parent, block, &more);
            chain.push(hash);
            parent = Some(hash);
        }
        &chain[..num_blocks.min(chain.len())]
    }
}
