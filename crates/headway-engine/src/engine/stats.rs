//! [`EngineStats`]: what a server shows of a running engine.

use crate::kv::{KvUsage, PrefixCacheStats};

/// Numbers of now and since start-up; cheap to take in every step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Requests without pages now, the preempted ones included.
    pub waiting: usize,
    /// Requests with pages now.
    pub running: usize,
    /// Steps that computed something.
    pub steps: u64,
    /// Tokens computed in them.
    pub computed_tokens: u64,
    /// Times that a request lost its pages.
    pub preemptions: u64,
    /// Tokens drafted.
    pub drafted_tokens: u64,
    /// Drafted tokens that stood.
    pub accepted_tokens: u64,
    /// How full the KV cache is.
    pub kv: KvUsage,
    /// What prefix caching did.
    pub prefix: PrefixCacheStats,
}
