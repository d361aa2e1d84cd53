//! Lifetime: one step. What every builder gets, how a batch divides, the build loop, and what layers
//! read.

pub mod batch;
pub mod build;
pub mod common;
pub(crate) mod composed;
pub mod context_parallel;
pub mod fast_prefill;
pub mod local_attention;
pub mod micro_batch;
