//! `CPU_MLA`: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over a paged cache of latents on the CPU.
//!
//! | what | support |
//! |---|---|
//! | batches | decode, prefill, chunked prefill and mixed; decodes first |
//! | decode | absorbed: all heads over one latent row a token, each page read and turned once for a token's heads; split over keys; several new tokens a request (drafts) |
//! | prefill | keys and values expanded through `kv_b_proj`, new tokens and cached context alike through a bounded workspace, results merged by log-sum-exp |
//! | q, latents, out | float32, bfloat16, float16; sums in float32, online softmax |
//! | cache | one row of `kv_lora_rank + qk_rope_head_dim` elements a token, without padding; float32, bfloat16, float16, e4m3 and e5m2 with a scale |
//! | sizes | multiples of 8; latents up to 1024, heads up to 512 |
//! | blocks | 16, 32, 64 or 128 tokens |
//! | sameness | under batch invariance every row is computed as a decode, whose bits depend on no other row, the chunking or the number of threads |
//! | instruction sets | portable, AVX2; AVX-512 is compiled by the same code; AMX over bfloat16 caches |
//!
//! # Workspace
//! [`Sizes`] is the one formula for what is allocated and reported. Prefills expand at most `workspace_tokens` tokens
//! at a time (setting of `[backend.CPU_MLA]`); the default is as many as make 64 MiB of keys and values in float32, at
//! least 64 and no more than a request or a step can have. Decodes go through the latent space in slabs of at most
//! 64 MiB of queries.
//!
//! Precision: see [`crate::kernels::mla`].

mod builder;
mod layer;
mod rules;
mod sizes;

pub use builder::{CpuMlaBuilder, CpuMlaMetadata};
pub use layer::CpuMlaLayer;
pub use rules::{CpuMla, CpuMlaConfig};
pub use sizes::Sizes;
