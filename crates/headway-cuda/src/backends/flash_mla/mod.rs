//! `FLASHMLA`: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) whose decodes are FlashMLA's kernel out of vLLM's
//! extension module, called without PyTorch; its cache writes and prefills are those of `CUDA_MLA` ([`super::latent`]).
//!
//! | what | support |
//! |---|---|
//! | module | what `headway kernels fetch flash-attn` brought; without it every layer is refused with the command |
//! | batches | decode, prefill, chunked prefill and mixed; decodes first |
//! | decode | absorbed, keys in parts; one new token a request (no drafts) |
//! | prefill | as `CUDA_MLA` does it |
//! | q, latents, out | bfloat16, float16 |
//! | cache | the activations' type, a row of 512 + 64 elements a token |
//! | sizes | `kv_lora_rank` 512, `qk_rope_head_dim` 64; any number of heads; heads of multiples of 8 up to 256 |
//! | blocks | 64 tokens |
//! | CUDA graphs | decodes of one token: which pages each block reads is dealt out anew for each step into the same place |
//! | devices | compute capability 9.0 |
//!
//! The deal is made once a step for all layers of a group, on the host, from exact lengths. Padding is requests without
//! keys. Queries in the latent space and their rotated parts are put together in one row of 576 for the kernel.

mod builder;
mod layer;
mod rules;

pub use builder::{FlashMlaBuilder, FlashMlaMetadata};
pub use layer::FlashMlaLayer;
pub use rules::{FlashMla, FlashMlaConfig};
