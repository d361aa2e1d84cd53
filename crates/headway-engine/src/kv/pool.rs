//! The one pool of pages: reference counts, the list of free pages, and the index from block hash to page.
//!
//! Lifetime: the model. Knows nothing of requests or tables. Every operation is O(1).
//!
//! The free list is doubly linked through the pages themselves. Block 0 is the null block: never handed out, never
//! written, and so free to be the list's anchor. The front is reused first: pages without a hash go to the front, pages
//! with one to the back, so a cached prefix is dropped only when nothing else is free, the least recently used first.

use std::collections::HashMap;

use super::BlockHash;

/// The block id that stands for "no block": table entries behind a window point here. Never allocated, never written.
pub const NULL_BLOCK: u32 = 0;

/// The group of a page and the hash of its tokens: what a cached page is found by.
pub(super) type PageKey = (u32, BlockHash);

#[derive(Clone, Debug, Default)]
struct Page {
    refs: u32,
    prev: u32,
    next: u32,
    key: Option<PageKey>,
}

#[derive(Debug)]
pub(super) struct PagePool {
    pages: Vec<Page>,
    num_free: usize,
    num_free_cached: usize,
    evictions: u64,
    index: HashMap<PageKey, u32>,
}

impl PagePool {
    /// `num_blocks` includes the null block; the caller has checked that it fits a block id.
    pub(super) fn new(num_blocks: usize) -> Self {
        let mut pool = Self {
            pages: vec![Page::default(); num_blocks],
            num_free: 0,
            num_free_cached: 0,
            evictions: 0,
            index: HashMap::new(),
        };
        for id in 1..num_blocks as u32 {
            pool.link_back(id);
        }
        pool
    }

    /// Pages that can be handed out at all (the null block left out).
    pub(super) fn capacity(&self) -> usize {
        self.pages.len() - 1
    }

    pub(super) fn num_free(&self) -> usize {
        self.num_free
    }

    pub(super) fn num_free_cached(&self) -> usize {
        self.num_free_cached
    }

    pub(super) fn evictions(&self) -> u64 {
        self.evictions
    }

    pub(super) fn refs(&self, id: u32) -> u32 {
        self.pages[id as usize].refs
    }

    pub(super) fn key(&self, id: u32) -> Option<PageKey> {
        self.pages[id as usize].key
    }

    pub(super) fn find(&self, key: PageKey) -> Option<u32> {
        self.index.get(&key).copied()
    }

    /// Takes the page that is reused first; it forgets what it held. `None` when every page is in use.
    pub(super) fn take(&mut self) -> Option<u32> {
        let id = self.pages[NULL_BLOCK as usize].next;
        if id == NULL_BLOCK {
            return None;
        }
        self.unlink(id);
        self.evictions += u64::from(self.forget(id));
        self.pages[id as usize].refs = 1;
        Some(id)
    }

    /// One more owner for a page that a lookup found.
    pub(super) fn share(&mut self, id: u32) {
        if self.pages[id as usize].refs == 0 {
            self.unlink(id);
        }
        self.pages[id as usize].refs += 1;
    }

    /// One owner less; a page without owners is free, and can still be found while its hash is known.
    pub(super) fn release(&mut self, id: u32) {
        let page = &mut self.pages[id as usize];
        debug_assert!(id != NULL_BLOCK && page.refs > 0, "page {id} released without an owner");
        page.refs -= 1;
        if page.refs > 0 {
            return;
        }
        if page.key.is_some() {
            self.link_back(id);
        } else {
            self.link_front(id);
        }
    }

    /// Files a page under its hash, unless another page already stands there (then this one stays unfiled).
    pub(super) fn file(&mut self, id: u32, key: PageKey) {
        if self.pages[id as usize].key.is_some() || self.index.contains_key(&key) {
            return;
        }
        self.index.insert(key, id);
        self.pages[id as usize].key = Some(key);
    }

    /// Forgets every hash. Pages in use stay with their owners.
    pub(super) fn forget_all(&mut self) {
        self.index.clear();
        self.num_free_cached = 0;
        for page in &mut self.pages {
            page.key = None;
        }
    }

    /// The free pages from the one reused first, for checks.
    #[cfg(test)]
    pub(super) fn free_list(&self) -> Vec<u32> {
        let mut list = Vec::new();
        let mut at = self.pages[0].next;
        while at != NULL_BLOCK {
            list.push(at);
            at = self.pages[at as usize].next;
        }
        list
    }

    /// Filed pages as the index has them, for checks.
    #[cfg(test)]
    pub(super) fn filed(&self) -> impl Iterator<Item = (PageKey, u32)> + '_ {
        self.index.iter().map(|(key, id)| (*key, *id))
    }

    fn forget(&mut self, id: u32) -> bool {
        match self.pages[id as usize].key.take() {
            Some(key) => self.index.remove(&key).is_some(),
            None => false,
        }
    }

    fn link_front(&mut self, id: u32) {
        let next = self.pages[NULL_BLOCK as usize].next;
        self.link_between(NULL_BLOCK, id, next);
    }

    fn link_back(&mut self, id: u32) {
        let prev = self.pages[NULL_BLOCK as usize].prev;
        self.link_between(prev, id, NULL_BLOCK);
    }

    fn link_between(&mut self, prev: u32, id: u32, next: u32) {
        self.pages[id as usize].prev = prev;
        self.pages[id as usize].next = next;
        self.pages[prev as usize].next = id;
        self.pages[next as usize].prev = id;
        self.num_free += 1;
        self.num_free_cached += usize::from(self.pages[id as usize].key.is_some());
    }

    fn unlink(&mut self, id: u32) {
        let (prev, next) = (self.pages[id as usize].prev, self.pages[id as usize].next);
        self.pages[prev as usize].next = next;
        self.pages[next as usize].prev = prev;
        self.num_free -= 1;
        self.num_free_cached -= usize::from(self.pages[id as usize].key.is_some());
    }
}
