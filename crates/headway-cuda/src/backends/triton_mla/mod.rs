//! `TRITON_MLA`: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) whose decodes are Triton kernels of our own,
//! compiled ahead of time and launched without Python; its cache writes and prefills are those of `CUDA_MLA`
//! ([`super::latent`]).
//!
//! | what | support |
//! |---|---|
//! | kernels | what `headway kernels build triton --mla` made; a layer without them is refused with that command |
//! | batches | decode, prefill, chunked prefill and mixed; decodes first |
//! | decode | absorbed; all heads of a request over one read of its latents, in tiles of 16 or 64 rows; keys in parts, which a second launch merges; several new tokens a request (drafts) |
//! | prefill | as `CUDA_MLA` does it |
//! | q, latents, out | bfloat16, float16 |
//! | cache | the activations' type, a row of 512 + 64 elements a token |
//! | sizes | `kv_lora_rank` 512, `qk_rope_head_dim` 64; any number of heads; heads of multiples of 8 up to 256 |
//! | blocks | multiples of 16 tokens |
//! | CUDA graphs | batches of decodes with as many new tokens each; lengths are read on the device |
//! | devices | compute capability 8.0 and later, by what the kernels are compiled for, in steps of 64 keys down to 16 where a block has less shared memory |
//!
//! Decodes are not planned on the host: the launch follows from how many tokens and requests there are. The kernels:
//! `csrc/triton/latent.py`.

mod builder;
mod layer;
mod rules;

pub use builder::{TritonMlaBuilder, TritonMlaMetadata};
pub use layer::TritonMlaLayer;
pub use rules::{TritonMla, TritonMlaConfig};
