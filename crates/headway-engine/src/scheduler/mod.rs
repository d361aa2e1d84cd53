//! The scheduler: which requests compute how many tokens in the next step. No tensors, no device, no clock.
//!
//! Lifetime: the model. Continuous batching under a token budget (as in Orca, and vLLM's scheduler): in each step the
//! running decodes come first, then the next chunks of running prefills, then waiting requests, first come first
//! served. When pages run out, the request that arrived last loses its pages and is computed again later, its generated
//! tokens included (preemption by recompute).
//!
//! A step is [`Scheduler::schedule`] → the runner computes and samples → [`Scheduler::finish_step`]. Whether a request
//! has ended is for the engine to say, with the sampled token. With speculation a decode takes drafted tokens along,
//! and the outcome says how many of them stand.
//!
//! Not for sampling, detokenising or stop strings.

mod config;
mod drafts;
mod error;
mod plan;
mod request;
mod schedule;
mod stats;
mod step;

#[cfg(test)]
mod tests;

pub use config::SchedulerConfig;
pub use drafts::Draft;
pub use error::SchedulerError;
pub use plan::{BatchClass, ScheduledRequest, StepPlan};
pub use request::{NewRequest, RequestState};
pub use schedule::Scheduler;
pub use stats::SchedulerStats;
pub use step::StepOutcome;

pub use crate::kv::RequestId;
