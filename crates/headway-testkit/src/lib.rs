//! What headway's parts are held against: a plain float64 attention, tolerances, a seeded source of
//! numbers, and the suite that any backend, ours or a plugin, is run through.
//!
//! A dev-dependency of the other crates and of plugins. It holds nothing that a running engine needs,
//! and nothing in it is fast.
#![forbid(unsafe_code)]

pub mod golden;
pub mod reference;
pub mod rng;
pub mod suite;
pub mod testdata;
pub mod tolerance;

pub use reference::{Answer, PagedBatch, Params, Request, attend, attend_paged};
pub use rng::Rng;
pub use tolerance::{Closeness, Mismatch, Tolerance};
