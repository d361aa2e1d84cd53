//! The KV cache manager: which page of the cache holds which tokens of which request. No tensors, no device.
//!
//! Lifetime: the model. One [`KvCacheManager`] serves every KV cache group out of one pool of equal pages, as the
//! hybrid KV cache manager of vLLM does: a block id indexes the one pool, and a request has one block table for each
//! group. Pages carry reference counts, full blocks can be found again by the hash of their tokens and all tokens
//! before them (prefix caching), and groups that look back only so far give pages back as they fall out of sight.
//!
//! Not for the bytes of a page (that is the runner's cache allocation) and not for slot mappings (made from block
//! tables by the contract crate).

mod error;
mod hash;
mod manager;
mod policy;
mod pool;
mod prefix;
mod stats;
mod table;

#[cfg(test)]
pub(crate) mod tests;

pub use error::KvError;
pub use hash::{BlockHash, BlockHashes};
pub use manager::{Admission, KvCacheManager};
pub use policy::{KvGroupKind, KvGroupPolicy};
pub use pool::NULL_BLOCK;
pub use prefix::CachedPrefix;
pub use stats::{KvUsage, PrefixCacheStats};

/// A request's identity inside the scheduler and the KV cache manager. Later requests have larger ids, so the order of
/// ids is the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}
