//! `MAMBA2_ATTN`: Mamba-2 mixers (Dao and Gu, 2024, arXiv 2405.21060) on NVIDIA devices, by kernels of our own that need
//! the driver and NVRTC alone.
//!
//! | what | support |
//! |---|---|
//! | batches | decode, prefill, chunked prefill and mixed, in one call; decodes first |
//! | x, out | bfloat16, float16; products on tensor cores, sums in float32 |
//! | states | convolution and scan each float32, bfloat16 or float16; a prefill's is float32 until its end |
//! | heads | any number that the groups divide, of any size; states of up to 256 |
//! | convolution | widths from 2 to 16 |
//! | states kept | the running one: no prefix caching, no drafted tokens |
//! | sameness | a decode's bits depend on no other row; with `--batch-invariant` a prefill's neither, nor on the chunking, at the price of single steps |
//! | CUDA graphs | decodes of one token |
//! | devices | compute capability 8.0 and later |
//!
//! Long prefills that leave most of the device idle are cut into segments of chunks, which are scanned at once: a state
//! is linear in the one before it, so what each segment adds is found without it.
//!
//! The kernels: [`crate::kernels::state_space`], `csrc/state_space/`.

mod builder;
mod layer;
mod rules;

pub use builder::{Mamba2Builder, Mamba2Metadata};
pub use layer::Mamba2Layer;
pub use rules::{Mamba2Attn, Mamba2Config};
