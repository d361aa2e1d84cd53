//! What the KV cache manager refuses. Not for "no page is free just now", which is an answer and not an error.

use super::RequestId;

/// Why a call of the KV cache manager was refused. Every one is a wrong configuration or a wrong order of calls; a
/// full pool is reported as `Ok(false)` instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// The pool cannot hold the null block and one page.
    #[error(
        "a KV cache of {num_blocks} blocks has no room for a token: at least 2 are needed (block 0 is the null block); \
         give the cache more memory"
    )]
    PoolTooSmall {
        /// Blocks asked for, the null block included.
        num_blocks: usize,
    },
    /// More blocks than a block id can name.
    #[error(
        "a KV cache of {num_blocks} blocks is too large: at most {max} can be numbered; use a larger block size"
    )]
    PoolTooLarge {
        /// Blocks asked for.
        num_blocks: usize,
        /// The largest pool.
        max: usize,
    },
    /// No KV cache group was given.
    #[error("the KV cache manager needs at least one KV cache group")]
    NoGroups,
    /// A group's policy makes no sense.
    #[error("KV cache group {group}: {what} must be at least 1, got 0")]
    ZeroPolicy {
        /// Index of the group.
        group: usize,
        /// The field at fault.
        what: &'static str,
    },
    /// The common multiple of the groups' block sizes overflows.
    #[error("the block sizes {block_sizes:?} of the KV cache groups have no usable common multiple")]
    BlockSizesIncommensurable {
        /// Block size of each group in tokens.
        block_sizes: Vec<usize>,
    },
    /// A state serves its own request alone.
    #[error(
        "prefix caching needs keys and values of every token, and some KV cache group keeps a state instead; turn \
         prefix caching off"
    )]
    PrefixCachingBesideState,
    /// A request was admitted twice.
    #[error("request {0} already has pages in the KV cache")]
    AlreadyAdmitted(RequestId),
    /// A request has no pages (it was never admitted, or was freed).
    #[error("request {0} has no pages in the KV cache; admit it first")]
    UnknownRequest(RequestId),
    /// The prefix found by a lookup was evicted before it was used.
    #[error(
        "the cached prefix of {num_tokens} tokens is gone: look it up again before admitting request {request}"
    )]
    StalePrefix {
        /// The request that was to use it.
        request: RequestId,
        /// Its length in tokens.
        num_tokens: usize,
    },
    /// A request cannot go back behind what it has computed already.
    #[error("request {request} has {had} computed tokens and cannot go back to {asked}")]
    Backwards {
        /// The request.
        request: RequestId,
        /// Computed tokens known to the manager.
        had: usize,
        /// Computed tokens claimed by the caller.
        asked: usize,
    },
    /// A request claims computed tokens that have no page, or that the caller did not pass.
    #[error("request {request} claims {claimed} computed tokens, but only {have} {what}")]
    BeyondPages {
        /// The request.
        request: RequestId,
        /// Computed tokens claimed.
        claimed: usize,
        /// What there is.
        have: usize,
        /// Of what: pages or tokens.
        what: &'static str,
    },
}
