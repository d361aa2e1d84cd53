//! `FLASHINFER_MLA`: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) whose decodes are FlashInfer's compiled
//! kernels, called without Python; its cache writes and prefills are those of `CUDA_MLA` ([`super::latent`]).
//!
//! | what | support |
//! |---|---|
//! | modules | what `headway kernels build flashinfer --mla` made; a layer without one is refused with that command |
//! | batches | decode, prefill, chunked prefill and mixed; decodes first |
//! | decode | absorbed, by `mla_fa3` where it is built (Hopper), else by `mla_fa2`; split over keys; several new tokens a request (drafts) with 1, 2, 4, … 128 heads: the kernels reckon with tiles that end where tokens do |
//! | prefill | as `CUDA_MLA` does it |
//! | q, latents, out | bfloat16, float16 |
//! | cache | the activations' type, a row of 512 + 64 elements a token |
//! | sizes | `kv_lora_rank` 512, `qk_rope_head_dim` 64; any number of heads; heads of multiples of 8 up to 256 |
//! | blocks | multiples of 16 tokens |
//! | CUDA graphs | batches of decodes with as many new tokens each: the plan is made anew for each step into the same places, the launch is the same |
//! | devices | compute capability 8.0 and later, by what the modules are compiled for |
//!
//! A plan is made once a step for all layers of a group, on the host, from exact lengths. Its tables, 0.6 MB of which
//! little is used, go to the device with one copy in the stream's order. They are of one size whatever the batch, and the
//! launch depends on the number of multiprocessors and on whether requests have more than 64 rows (heads times new
//! tokens) in the mean: that is what a graph freezes. Padding is planned as requests of as many tokens without keys, whose
//! results are zeros.

mod builder;
mod layer;
mod rows;
mod rules;

pub use builder::{FlashInferMlaBuilder, FlashInferMlaMetadata};
pub use layer::FlashInferMlaLayer;
pub use rules::{FlashInferMla, FlashInferMlaConfig};
