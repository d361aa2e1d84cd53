//! The pages of one request: one block table for each KV cache group.
//!
//! Lifetime: from a request's admission to its end or preemption. Not for tokens, which the scheduler keeps.

use super::hash::BlockHashes;
use super::pool::PagePool;
use super::{KvGroupPolicy, NULL_BLOCK};

/// One group's block table of one request.
#[derive(Clone, Debug, Default)]
pub(super) struct GroupTable {
    /// Block ids by block number; entries that nobody reads any more are the null block.
    pub(super) blocks: Vec<u32>,
    /// Blocks before this number are the null block.
    pub(super) first_live: usize,
    /// Blocks before this number were offered to the index.
    pub(super) num_filed: usize,
}

/// All pages of one request.
#[derive(Clone, Debug, Default)]
pub(super) struct RequestPages {
    pub(super) tables: Vec<GroupTable>,
    /// Tokens whose keys and values are in the pages.
    pub(super) num_computed: usize,
    /// Tokens of its encoder's input.
    pub(super) encoder_tokens: usize,
}

impl GroupTable {
    /// The table of a cached prefix, whose pages the caller has shared.
    pub(super) fn from_prefix(policy: &KvGroupPolicy, blocks: Vec<u32>, num_tokens: usize) -> Self {
        let first_live = (policy.first_readable(num_tokens) / policy.block_size).min(blocks.len());
        let num_filed = blocks.len();
        Self { blocks, first_live, num_filed }
    }

    /// Pages that must be added to reach `num_tokens` tokens and hold an encoder's.
    pub(super) fn missing(&self, policy: &KvGroupPolicy, num_tokens: usize, encoder_tokens: usize) -> usize {
        policy.pages(num_tokens, encoder_tokens).saturating_sub(self.blocks.len())
    }

    /// Pages held.
    pub(super) fn live(&self) -> usize {
        self.blocks.len() - self.first_live
    }

    /// Gives back the pages that no query at `position` or later reads.
    pub(super) fn drop_unreadable(&mut self, pool: &mut PagePool, policy: &KvGroupPolicy, position: usize) {
        let keep = (policy.first_readable(position) / policy.block_size).min(self.blocks.len());
        while self.first_live < keep {
            pool.release(self.blocks[self.first_live]);
            self.blocks[self.first_live] = NULL_BLOCK;
            self.first_live += 1;
        }
    }

    /// Files the blocks that `num_computed` tokens fill and that were not filed before.
    pub(super) fn file_full(
        &mut self,
        pool: &mut PagePool,
        group: usize,
        size: usize,
        hashes: &mut BlockHashes,
        tokens: &[u32],
        num_computed: usize,
    ) {
        let num_full = num_computed / size;
        if num_full <= self.num_filed {
            return;
        }
        let known = hashes.upto(size, num_full, tokens);
        let first = self.num_filed.max(self.first_live);
        for (page, hash) in self.blocks.iter().zip(known).skip(first) {
            pool.file(*page, (group as u32, *hash));
        }
        self.num_filed = num_full;
    }
}

impl RequestPages {
    /// Gives every page back, the blocks furthest from the start first, so that the start of a prefix outlives its end
    /// in every group.
    pub(super) fn release_all(self, pool: &mut PagePool, groups: &[KvGroupPolicy]) {
        let mut left: Vec<usize> = self.tables.iter().map(|t| t.blocks.len()).collect();
        loop {
            let open = |g: &usize| left[*g] > self.tables[*g].first_live;
            let Some(g) =
                (0..groups.len()).filter(open).max_by_key(|g| left[*g].saturating_mul(groups[*g].block_size))
            else {
                return;
            };
            left[g] -= 1;
            pool.release(self.tables[g].blocks[left[g]]);
        }
    }
}
