//! [`KvCacheManager`]: pages for requests out of one pool.
//!
//! Lifetime: the model. The scheduler calls it, in this order for each request: `lookup`, `admit`, then for each step
//! `allocate` before and `advance` after it, and `free` at the end or at preemption. One thread.

use std::collections::HashMap;

use super::hash::BlockHashes;
use super::pool::PagePool;
use super::prefix::{self, CachedPrefix};
use super::table::{GroupTable, RequestPages};
use super::{KvError, KvGroupKind, KvGroupPolicy, KvUsage, NULL_BLOCK, PrefixCacheStats, RequestId};

/// Whether a request comes for the first time or again after it was preempted; only the statistics differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// A new request.
    New,
    /// A request whose pages were taken from it and that is computed again.
    Resumed,
}

/// Hands out the pages of one pool to the requests of all KV cache groups.
///
/// ```
/// use headway_engine::kv::{Admission, BlockHashes, KvCacheManager, KvGroupPolicy, RequestId};
///
/// let mut kv = KvCacheManager::new(64, vec![KvGroupPolicy::full(16)], true)?;
/// let (id, prompt, mut hashes) = (RequestId(0), vec![7; 40], BlockHashes::default());
/// let prefix = kv.lookup(&mut hashes, &prompt);
/// assert!(kv.admit(id, prefix, prompt.len(), Admission::New)?);
/// assert_eq!(kv.block_table(id, 0).unwrap().len(), 3);
/// kv.advance(id, &mut hashes, &prompt, 40)?; // after the step that computed the 40 tokens
/// kv.free(id);
/// assert_eq!(kv.lookup(&mut hashes, &prompt).num_tokens(), 32);
/// # Ok::<(), headway_engine::kv::KvError>(())
/// ```
#[derive(Debug)]
pub struct KvCacheManager {
    groups: Vec<KvGroupPolicy>,
    granularity: usize,
    prefix_caching: bool,
    pool: PagePool,
    requests: HashMap<RequestId, RequestPages>,
    stats: PrefixCacheStats,
}

impl KvCacheManager {
    /// A manager of `num_blocks` pages (the null block 0 included) for the given KV cache groups.
    ///
    /// # Errors
    /// A pool without a page besides the null block or beyond 2^31 pages, no group, a zero size, block sizes without a
    /// usable common multiple; prefix caching beside a group of states.
    pub fn new(num_blocks: usize, groups: Vec<KvGroupPolicy>, prefix_caching: bool) -> Result<Self, KvError> {
        const MAX: usize = i32::MAX as usize;
        match num_blocks {
            0 | 1 => return Err(KvError::PoolTooSmall { num_blocks }),
            2..=MAX => {}
            _ => return Err(KvError::PoolTooLarge { num_blocks, max: MAX }),
        }
        if groups.is_empty() {
            return Err(KvError::NoGroups);
        }
        for (index, policy) in groups.iter().enumerate() {
            policy.check(index)?;
        }
        // States have no blocks that a prefix could end at; without prefix caching nothing asks.
        let tokens = groups.iter().filter(|g| g.kind != KvGroupKind::State && g.grows());
        let sizes: Vec<usize> = tokens.map(|g| g.block_size).collect();
        if prefix_caching && sizes.len() < groups.len() {
            return Err(KvError::PrefixCachingBesideState);
        }
        let granularity =
            common_multiple(&sizes).ok_or(KvError::BlockSizesIncommensurable { block_sizes: sizes })?;
        Ok(Self {
            groups,
            granularity,
            prefix_caching,
            pool: PagePool::new(num_blocks),
            requests: HashMap::new(),
            stats: PrefixCacheStats::default(),
        })
    }

    /// The groups' policies, by group index.
    pub fn groups(&self) -> &[KvGroupPolicy] {
        &self.groups
    }

    /// Whether full blocks are found again by their tokens.
    pub fn prefix_caching(&self) -> bool {
        self.prefix_caching
    }

    /// The smallest prefix that can be reused and the step in which prefixes grow, in tokens: the least common multiple
    /// of the groups' block sizes.
    pub fn prefix_granularity_tokens(&self) -> usize {
        self.granularity
    }

    /// The longest prefix of `tokens` that is in the cache for every group; at most `tokens.len() - 1` tokens. Empty
    /// when prefix caching is off. `hashes` belongs to the request that `tokens` belongs to.
    pub fn lookup(&self, hashes: &mut BlockHashes, tokens: &[u32]) -> CachedPrefix {
        match self.prefix_caching {
            true => prefix::find(&self.pool, &self.groups, self.granularity, hashes, tokens),
            false => CachedPrefix::none(),
        }
    }

    /// Gives a request its pages: those of `prefix`, shared, and fresh ones for the `num_new_tokens` after it. `false`
    /// (and nothing changed) when not enough pages are free now.
    ///
    /// # Errors
    /// The request has pages already, or the prefix was evicted since its lookup.
    pub fn admit(
        &mut self,
        request: RequestId,
        prefix: CachedPrefix,
        num_new_tokens: usize,
        admission: Admission,
    ) -> Result<bool, KvError> {
        if self.requests.contains_key(&request) {
            return Err(KvError::AlreadyAdmitted(request));
        }
        let num_computed = prefix.num_tokens;
        if !self.is_fresh(&prefix) {
            return Err(KvError::StalePrefix { request, num_tokens: num_computed });
        }
        if self.pages_to_admit(&prefix, num_computed + num_new_tokens, usize::MAX) > self.pool.num_free() {
            return Ok(false);
        }
        self.count(&prefix, admission);
        let pages = self.adopt(prefix);
        self.requests.insert(request, pages);
        self.allocate(request, num_computed, num_new_tokens)
    }

    /// Makes room for the next `num_new_tokens` of a request of which `num_computed` are in the cache, and gives back
    /// pages that no coming query reads. `false` (and no page added) when not enough pages are free now.
    ///
    /// # Errors
    /// An unknown request, or `num_computed` other than what [`Self::advance`] was told last.
    pub fn allocate(
        &mut self,
        request: RequestId,
        num_computed: usize,
        num_new_tokens: usize,
    ) -> Result<bool, KvError> {
        let pages = self.requests.get_mut(&request).ok_or(KvError::UnknownRequest(request))?;
        check_computed(request, pages, num_computed)?;
        let total = num_computed + num_new_tokens;
        let mut missing = 0;
        for (table, policy) in pages.tables.iter_mut().zip(&self.groups) {
            table.drop_unreadable(&mut self.pool, policy, num_computed);
            missing += table.missing(policy, total, pages.encoder_tokens);
        }
        if missing > self.pool.num_free() {
            return Ok(false);
        }
        for (table, policy) in pages.tables.iter_mut().zip(&self.groups) {
            let fresh = std::iter::from_fn(|| self.pool.take());
            table.blocks.extend(fresh.take(table.missing(policy, total, pages.encoder_tokens)));
        }
        Ok(true)
    }

    /// Of the next `num_new_tokens` of a request of which `num_computed` are in the cache, how many have room in its
    /// own pages and in the free ones without the last `reserved` of them. 0 for an unknown request.
    pub fn room(
        &self,
        request: RequestId,
        num_computed: usize,
        num_new_tokens: usize,
        reserved: usize,
    ) -> usize {
        let Some(pages) = self.requests.get(&request) else { return 0 };
        let spare = self.pool.num_free().saturating_sub(reserved);
        let fits = |n: &usize| {
            let tables = pages.tables.iter().zip(&self.groups);
            tables.map(|(t, p)| t.missing(p, num_computed + n, pages.encoder_tokens)).sum::<usize>() <= spare
        };
        (1..=num_new_tokens).rev().find(fits).unwrap_or(0)
    }

    /// Records that the first `num_computed` of `tokens` are in the cache now, and files the blocks that they fill.
    ///
    /// # Errors
    /// An unknown request, a count below the last one, beyond the request's pages or beyond `tokens`.
    pub fn advance(
        &mut self,
        request: RequestId,
        hashes: &mut BlockHashes,
        tokens: &[u32],
        num_computed: usize,
    ) -> Result<(), KvError> {
        let pages = self.requests.get_mut(&request).ok_or(KvError::UnknownRequest(request))?;
        if num_computed < pages.num_computed {
            return Err(KvError::Backwards { request, had: pages.num_computed, asked: num_computed });
        }
        let with_pages = |(t, p): (&GroupTable, &KvGroupPolicy)| t.blocks.len().saturating_mul(p.block_size);
        let growing = pages.tables.iter().zip(&self.groups).filter(|(_, p)| p.grows());
        let room = growing.map(with_pages).min().unwrap_or(0);
        for (have, what) in [(room, "fit its pages"), (tokens.len(), "tokens were given")] {
            if num_computed > have {
                return Err(KvError::BeyondPages { request, claimed: num_computed, have, what });
            }
        }
        pages.num_computed = num_computed;
        if self.prefix_caching {
            for (group, (table, policy)) in pages.tables.iter_mut().zip(&self.groups).enumerate() {
                table.file_full(&mut self.pool, group, policy.block_size, hashes, tokens, num_computed);
            }
        }
        Ok(())
    }

    /// Gives back all pages of a request; its full blocks stay findable until their pages are needed. `false` when the
    /// request has none.
    pub fn free(&mut self, request: RequestId) -> bool {
        match self.requests.remove(&request) {
            Some(pages) => {
                pages.release_all(&mut self.pool, &self.groups);
                true
            }
            None => false,
        }
    }

    /// A request's block table in one group: block ids by block number, the null block where nothing is read any more.
    /// `None` for an unknown request or group.
    pub fn block_table(&self, request: RequestId, group: usize) -> Option<&[u32]> {
        Some(&self.requests.get(&request)?.tables.get(group)?.blocks)
    }

    /// Tokens of a request whose keys and values are in the cache. `None` for an unknown request.
    pub fn num_computed_tokens(&self, request: RequestId) -> Option<usize> {
        Some(self.requests.get(&request)?.num_computed)
    }

    /// Free pages that a request of `num_tokens` tokens takes on top of `prefix` until all of them are computed, at most
    /// `max_chunk` a step; cached pages of the prefix that nobody holds count.
    pub fn pages_to_admit(&self, prefix: &CachedPrefix, num_tokens: usize, max_chunk: usize) -> usize {
        let held = |id: &&u32| **id != NULL_BLOCK && self.pool.refs(**id) == 0;
        let revived = prefix.tables.iter().flatten().filter(held).count();
        let known = prefix.tables.iter().map(Vec::len).chain(std::iter::repeat(0));
        let fresh = self.groups.iter().zip(known).map(|(policy, known)| {
            let peak = match policy.grows() {
                true => policy.peak_pages(num_tokens, max_chunk),
                false => usize::MAX,
            };
            policy.pages(num_tokens, prefix.encoder_tokens).saturating_sub(known).min(peak)
        });
        revived + fresh.sum::<usize>()
    }

    /// Pages that a request will still take until `num_tokens` of its tokens are computed, at most `max_chunk` a step.
    pub fn pages_outstanding(&self, request: RequestId, num_tokens: usize, max_chunk: usize) -> usize {
        let Some(pages) = self.requests.get(&request) else { return self.peak_pages(num_tokens, max_chunk) };
        let still = |(t, p): (&GroupTable, &KvGroupPolicy)| {
            p.peak_pages(num_tokens, max_chunk).saturating_sub(t.live()).min(t.missing(
                p,
                num_tokens,
                pages.encoder_tokens,
            ))
        };
        pages.tables.iter().zip(&self.groups).map(still).sum()
    }

    /// The most pages that one request of `num_tokens` tokens ever holds, computed at most `max_chunk` tokens a step.
    pub fn peak_pages(&self, num_tokens: usize, max_chunk: usize) -> usize {
        self.groups.iter().map(|g| g.peak_pages(num_tokens, max_chunk)).fold(0, usize::saturating_add)
    }

    /// The longest request, in tokens kept in the cache, that fits an otherwise empty pool when at most `max_chunk`
    /// tokens are computed a step; 0 when not even one token fits, `usize::MAX` when no length is too much (every
    /// group looks back only so far).
    pub fn max_request_tokens(&self, max_chunk: usize) -> usize {
        self.max_request_tokens_beside(0, max_chunk)
    }

    /// As [`Self::max_request_tokens`], for requests with an encoder's input of so many tokens.
    pub fn max_request_tokens_beside(&self, encoder_tokens: usize, max_chunk: usize) -> usize {
        let encoded = self.groups.iter().filter(|g| !g.grows()).map(|g| g.pages(0, encoder_tokens)).sum();
        let Some(capacity) = self.pool.capacity().checked_sub(encoded) else { return 0 };
        let fits = |tokens: usize| self.peak_pages(tokens, max_chunk) <= capacity;
        if fits(usize::MAX) {
            return usize::MAX;
        }
        let (mut good, mut bad) = (0, usize::MAX);
        while bad - good > 1 {
            let middle = good + (bad - good) / 2;
            if fits(middle) { good = middle } else { bad = middle }
        }
        good
    }

    /// How full the pool is.
    pub fn usage(&self) -> KvUsage {
        let (total_pages, free_pages) = (self.pool.capacity(), self.pool.num_free());
        KvUsage {
            total_pages,
            used_pages: total_pages - free_pages,
            free_pages,
            cached_free_pages: self.pool.num_free_cached(),
        }
    }

    /// What prefix caching did since start-up.
    pub fn stats(&self) -> PrefixCacheStats {
        PrefixCacheStats { evicted_blocks: self.pool.evictions(), ..self.stats }
    }

    /// Forgets every cached prefix; requests keep their pages. For weights that change and for measurements.
    pub fn reset_prefix_cache(&mut self) {
        self.pool.forget_all();
    }

    #[cfg(test)]
    pub(super) fn pool(&self) -> &PagePool {
        &self.pool
    }

    #[cfg(test)]
    pub(super) fn tables(&self) -> impl Iterator<Item = (RequestId, usize, &GroupTable)> {
        self.requests.iter().flat_map(|(id, pages)| pages.tables.iter().enumerate().map(|(g, t)| (*id, g, t)))
    }

    /// Whether every page of the prefix still is what the lookup found.
    fn is_fresh(&self, prefix: &CachedPrefix) -> bool {
        prefix.keys.iter().all(|(page, key)| self.pool.key(*page) == Some(*key))
    }

    /// Turns a prefix into a request's tables, one more owner for each of its pages.
    fn adopt(&mut self, prefix: CachedPrefix) -> RequestPages {
        let (num_computed, encoder_tokens) = (prefix.num_tokens, prefix.encoder_tokens);
        let mut tables = prefix.tables;
        tables.resize(self.groups.len(), Vec::new());
        for id in tables.iter().flatten().filter(|id| **id != NULL_BLOCK) {
            self.pool.share(*id);
        }
        let tables = tables.into_iter().zip(&self.groups);
        let tables =
            tables.map(|(blocks, policy)| GroupTable::from_prefix(policy, blocks, num_computed)).collect();
        RequestPages { tables, num_computed, encoder_tokens }
    }

    fn count(&mut self, prefix: &CachedPrefix, admission: Admission) {
        if prefix.queried == 0 {
            return;
        }
        let (queried, hit) = (prefix.queried as u64, prefix.num_tokens as u64);
        match admission {
            Admission::New => {
                self.stats.requests += 1;
                self.stats.queried_tokens += queried;
                self.stats.hit_tokens += hit;
            }
            Admission::Resumed => {
                self.stats.resumed_requests += 1;
                self.stats.resumed_queried_tokens += queried;
                self.stats.resumed_hit_tokens += hit;
            }
        }
    }
}

/// The caller and the manager must agree on how far a request is, or pages would be dropped or shared wrongly.
fn check_computed(request: RequestId, pages: &RequestPages, num_computed: usize) -> Result<(), KvError> {
    match num_computed.cmp(&pages.num_computed) {
        std::cmp::Ordering::Equal => Ok(()),
        std::cmp::Ordering::Less => {
            Err(KvError::Backwards { request, had: pages.num_computed, asked: num_computed })
        }
        std::cmp::Ordering::Greater => Err(KvError::BeyondPages {
            request,
            claimed: num_computed,
            have: pages.num_computed,
            what: "were reported computed",
        }),
    }
}

/// The least common multiple, `None` on overflow.
fn common_multiple(sizes: &[usize]) -> Option<usize> {
    fn gcd(a: usize, b: usize) -> usize {
        if b == 0 { a } else { gcd(b, a % b) }
    }
    sizes.iter().try_fold(1usize, |acc, &size| (acc / gcd(acc, size)).checked_mul(size))
}
