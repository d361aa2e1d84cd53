//! A shadow of the cache: what a runner would have written into each slot of each page, and checks that every read finds
//! its own value.
//!
//! The value of a position stands for its key and value vectors: it depends on the group, on the token and on every token
//! before it, as they do. So a page that is shared wrongly, written twice or read through a wrong entry shows.

use std::collections::{HashMap, HashSet};

use crate::kv::{KvCacheManager, NULL_BLOCK, RequestId};

/// One request's share of a step.
#[derive(Clone, Copy)]
pub(crate) struct Work<'a> {
    pub(crate) id: RequestId,
    pub(crate) tokens: &'a [u32],
    pub(crate) start: usize,
    pub(crate) len: usize,
}

/// Slot contents: (group, digest of all tokens up to the position).
#[derive(Default)]
pub(crate) struct Shadow {
    slots: HashMap<(u32, usize), (usize, u64)>,
}

/// A digest of `tokens`, one token at a time.
pub(crate) fn digest(before: u64, token: u32) -> u64 {
    let x =
        (before ^ u64::from(token).wrapping_add(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x ^ (x >> 29)
}

fn digests(tokens: &[u32]) -> Vec<u64> {
    let step = |last: &mut u64, token: &u32| {
        *last = digest(*last, *token);
        Some(*last)
    };
    tokens.iter().scan(1, step).collect()
}

impl Shadow {
    /// Plays a step: all writes, then every read of every query. Panics on the first thing that is wrong. Returns for
    /// each request the value read at its last position in group 0.
    pub(crate) fn run(&mut self, kv: &KvCacheManager, batch: &[Work<'_>]) -> Vec<u64> {
        let mut written = HashSet::new();
        for work in batch {
            let values = digests(&work.tokens[..work.start + work.len]);
            for (group, policy) in kv.groups().iter().enumerate() {
                let table = kv.block_table(work.id, group).expect("a scheduled request has a table");
                for position in work.start..work.start + work.len {
                    let page = table[position / policy.block_size];
                    assert_ne!(page, NULL_BLOCK, "request {} writes {position} to the null block", work.id);
                    assert_eq!(
                        kv.pool().refs(page),
                        1,
                        "request {} writes {position} to a shared page",
                        work.id
                    );
                    assert_eq!(
                        kv.pool().key(page),
                        None,
                        "request {} writes {position} to a filed page",
                        work.id
                    );
                    let slot = (page, position % policy.block_size);
                    assert!(written.insert(slot), "slot {slot:?} is written twice in a step");
                    self.slots.insert(slot, (group, values[position]));
                }
            }
        }
        batch.iter().map(|work| self.read(kv, work)).collect()
    }

    fn read(&self, kv: &KvCacheManager, work: &Work<'_>) -> u64 {
        let end = work.start + work.len;
        let values = digests(&work.tokens[..end]);
        let mut last = 0;
        for (group, policy) in kv.groups().iter().enumerate() {
            let table = kv.block_table(work.id, group).expect("a scheduled request has a table");
            for position in policy.first_readable(work.start)..end {
                let page = table[position / policy.block_size];
                assert_ne!(page, NULL_BLOCK, "request {} reads {position} from the null block", work.id);
                let found = self.slots.get(&(page, position % policy.block_size));
                assert_eq!(found, Some(&(group, values[position])), "request {} reads {position}", work.id);
                if group == 0 {
                    last = found.map_or(0, |f| f.1);
                }
            }
        }
        last
    }
}

/// Checks the pool against the tables: counts exact, nothing lost, nothing twice, sharing only of equal full prefixes.
pub(crate) fn check_pool(kv: &KvCacheManager, tokens: &HashMap<RequestId, Vec<u32>>) {
    let pool = kv.pool();
    let mut owners: HashMap<u32, Vec<(RequestId, usize, usize)>> = HashMap::new();
    for (id, group, table) in kv.tables() {
        for (block, &page) in table.blocks.iter().enumerate() {
            assert_eq!(
                page == NULL_BLOCK,
                block < table.first_live,
                "null entries are those behind the window"
            );
            if page != NULL_BLOCK {
                owners.entry(page).or_default().push((id, group, block));
            }
        }
    }
    let free = pool.free_list();
    let distinct: HashSet<u32> = free.iter().copied().collect();
    assert_eq!(distinct.len(), free.len(), "a page is twice in the free list");
    assert_eq!(free.len(), pool.num_free());
    assert!(!distinct.contains(&NULL_BLOCK));
    assert_eq!(pool.refs(NULL_BLOCK), 0);
    assert_eq!(pool.key(NULL_BLOCK), None);
    for page in 1..=pool.capacity() as u32 {
        let count = owners.get(&page).map_or(0, Vec::len);
        assert_eq!(pool.refs(page) as usize, count, "reference count of page {page}");
        assert_eq!(distinct.contains(&page), count == 0, "page {page} is lost or free while in use");
    }
    let mut filed = HashSet::new();
    for (key, page) in pool.filed() {
        assert_eq!(pool.key(page), Some(key));
        assert!(filed.insert(page), "page {page} is filed twice");
    }
    assert_eq!(free.iter().filter(|p| filed.contains(p)).count(), pool.num_free_cached());
    for owners in owners.values().filter(|o| o.len() > 1) {
        let (first, group, block) = owners[0];
        let end = (block + 1) * kv.groups()[group].block_size;
        for &(other, other_group, other_block) in &owners[1..] {
            assert_eq!((group, block), (other_group, other_block), "a page stands for two places");
            assert_ne!(first, other, "a request has a page twice");
            assert_eq!(
                tokens[&first][..end],
                tokens[&other][..end],
                "{first} and {other} share an unequal prefix"
            );
            let computed = kv.num_computed_tokens(first).min(kv.num_computed_tokens(other));
            assert!(computed >= Some(end), "a page is shared before it is full");
        }
    }
}
