//! Tests of the scheduler with a fake model that reads its own cache.

mod cases;
mod drafts;
mod fake;
mod preemption;
mod properties;
mod ranges;
