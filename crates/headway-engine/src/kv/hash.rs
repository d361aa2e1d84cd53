//! Hashes that name a full block by its tokens and everything before them.
//!
//! Lifetime: one request, kept across preemption: a request only ever appends tokens, so a computed hash stays true.
//! A hash does not depend on the group; the pool adds the group when it files a page.
//!
//! The hash is the first 128 bits of SHA-256 over (parent hash, token ids): a wrong hit would answer one request out
//! of another's cache, so two different prefixes must not meet even when someone tries to make them.

use sha2::{Digest, Sha256};

/// The name of a full block: its tokens and all tokens before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(u128);

impl BlockHash {
    /// The hash of the block of `tokens` that follows `parent` (`None`: the block is the first).
    pub fn chain(parent: Option<BlockHash>, tokens: &[u32]) -> Self {
        let mut sha = Sha256::new();
        sha.update([u8::from(parent.is_some())]);
        sha.update(parent.map_or(0, |p| p.0).to_le_bytes());
        for token in tokens {
            sha.update(token.to_le_bytes());
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
}

impl BlockHashes {
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
        let fresh = tokens.chunks_exact(block_size).take(num_blocks).skip(known);
        let mut parent = chain.last().copied();
        for block in fresh {
            let hash = BlockHash::chain(parent, block);
            chain.push(hash);
            parent = Some(hash);
        }
        &chain[..num_blocks.min(chain.len())]
    }
}
