//! Lifetime: the model, per attention group. Builders, the groups themselves, what the KV cache of a
//! group looks like, and graph modes.

pub mod arith;
pub mod builder;
pub(crate) mod composed;
pub mod graph;
pub mod groups;
pub mod kv;
pub mod plan;
