//! Tests of the KV cache manager: named cases, and random orders of calls against a shadow of the pages.

mod cases;
mod properties;
pub(crate) mod shadow;
