//! Lifetime: one step. What every builder gets, the build loop, and what layers read.

pub mod build;
pub mod common;
