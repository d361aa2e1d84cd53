//! `CUDA_MLA`: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a paged cache of latents on NVIDIA
//! devices, by kernels of our own; products with `kv_b_proj` are cuBLASLt's.
//!
//! | what | support |
//! |---|---|
//! | batches | decode, prefill, chunked prefill and mixed; decodes first |
//! | decode | absorbed: all heads of a request in tiles over one read of its latents, keys and values at once; split over keys; several new tokens a request (drafts) |
//! | prefill | keys and values expanded through `kv_b_proj`, new tokens and cached context alike through a bounded workspace, results merged by log-sum-exp |
//! | q, latents, out | bfloat16, float16; products on tensor cores, sums in float32, online softmax |
//! | cache | one row of `kv_lora_rank + qk_rope_head_dim` elements a token, without padding; the activations' type, e4m3 and e5m2 with a scale |
//! | sizes | multiples of 8; latents up to 512, 576 with the rotated elements; heads up to 256 |
//! | blocks | multiples of 16 tokens |
//! | sameness | with `--batch-invariant` every row is computed as a decode, whose bits depend on no other row and not on the chunking |
//! | CUDA graphs | batches of decodes with as many new tokens each: prefills go through passes that the host plans |
//! | devices | compute capability 8.0 and later |
//!
//! A decode is three products and a merge: queries into the latent space, attention over the latents, results out of it.
//! Queries in the latent space and weighted latents are rounded to the activations' type in between.
//!
//! # Workspace
//! [`Sizes`], with [`LatentSizes`](super::latent::LatentSizes) in it, is the one formula for what is allocated and reported. Prefills expand at most `workspace_tokens` tokens
//! at a time (setting of `[backend.CUDA_MLA]`); the default is as many as make 1 GiB of latents, keys and values, at
//! least 64 and no more than a request or a step can have. Results of earlier passes are merged in the output's type, so
//! that many passes cost precision.

mod builder;
mod layer;
mod rules;
mod sizes;

pub use builder::{CudaMlaBuilder, CudaMlaMetadata};
pub use layer::CudaMlaLayer;
pub use rules::{CudaMla, CudaMlaConfig};
pub use sizes::Sizes;
