//! `CPU_ATTN` against the float64 reference, at every level that this machine has: fixed cases, random
//! batches, sameness of a row's bits, writing the cache, and what is refused.

mod act;
mod against_reference;
mod bf16;
mod encoder;
mod layer;
mod masks;
mod quantised;
mod refusals;
mod run;
mod sameness;
mod world;
mod writing;
