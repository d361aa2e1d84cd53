//! Numbers that the scheduler reports. Not for times, which the engine measures.

/// The scheduler's counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Requests without pages now, the preempted ones included.
    pub waiting: usize,
    /// Requests with pages now.
    pub running: usize,
    /// Steps that computed something, since start-up.
    pub steps: u64,
    /// Tokens computed in them.
    pub computed_tokens: u64,
    /// Of these, tokens that had been computed before a preemption.
    pub recomputed_tokens: u64,
    /// Times that a request lost its pages.
    pub preemptions: u64,
    /// Requests finished.
    pub finished: u64,
    /// Requests aborted.
    pub aborted: u64,
    /// `batch_sizes[n]`: steps with `n` requests, `n` from 0 to the most in one step.
    pub batch_sizes: Vec<u64>,
}
