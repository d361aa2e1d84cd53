//! Numbers that the KV cache manager reports. Not for the scheduler's numbers, which it keeps itself.

/// How full the pool is, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvUsage {
    /// Pages that can be handed out (the null block left out).
    pub total_pages: usize,
    /// Pages that some request holds.
    pub used_pages: usize,
    /// Pages that no request holds.
    pub free_pages: usize,
    /// Of the free pages, those that still hold a block that a lookup can find.
    pub cached_free_pages: usize,
}

impl KvUsage {
    /// Share of the pool in use, 0 to 1.
    pub fn fraction(&self) -> f64 {
        if self.total_pages == 0 { 0.0 } else { self.used_pages as f64 / self.total_pages as f64 }
    }
}

/// What prefix caching did, since start-up, counted when a request is admitted. A preempted request finds its own
/// blocks again when it resumes; that is no hit and is counted apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixCacheStats {
    /// New requests that were admitted with the cache asked.
    pub requests: u64,
    /// Tokens of those requests.
    pub queried_tokens: u64,
    /// Of them, tokens found in the cache.
    pub hit_tokens: u64,
    /// Requests resumed after preemption.
    pub resumed_requests: u64,
    /// Tokens of resumed requests.
    pub resumed_queried_tokens: u64,
    /// Of them, tokens found in the cache.
    pub resumed_hit_tokens: u64,
    /// Cached blocks dropped because their page was needed.
    pub evicted_blocks: u64,
}

impl PrefixCacheStats {
    /// Share of new requests' tokens that were found, 0 to 1.
    pub fn hit_rate(&self) -> f64 {
        if self.queried_tokens == 0 { 0.0 } else { self.hit_tokens as f64 / self.queried_tokens as f64 }
    }
}
