//! `MAMBA2_ATTN` against a float64 scan: batches, chunkings, slots, state types, instruction sets.

mod against_reference;
mod refusals;
mod sameness;
mod world;
