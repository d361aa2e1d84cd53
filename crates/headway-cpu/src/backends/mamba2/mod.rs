//! `MAMBA2_ATTN`: Mamba-2 mixers (Dao and Gu, 2024, arXiv 2405.21060) with a state of fixed size a request.
//!
//! | what | support |
//! |---|---|
//! | batches | decode, prefill, chunked prefill and mixed, in one call; decodes first |
//! | x, out | float32 |
//! | states | convolution and scan each float32, bfloat16 or float16; all sums in float32 |
//! | heads | any number that the groups divide, any sizes |
//! | convolution | widths from 2 to 16 |
//! | states kept | the running one: no prefix caching, no drafted tokens |
//! | sameness | a row's bits depend on no other row and no thread; with `--batch-invariant` not on the chunking either, at the price of prefills that take single steps |
//! | instruction sets | portable, AVX2, AVX-512 |
//!
//! The kernels: [`crate::kernels::state_space`].

mod builder;
mod layer;
mod rules;

pub use builder::{Mamba2Builder, Mamba2Metadata};
pub use layer::Mamba2Layer;
pub use rules::{Mamba2Attn, Mamba2Config};
