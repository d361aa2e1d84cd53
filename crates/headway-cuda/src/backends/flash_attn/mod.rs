//! `FLASH_ATTN`: FlashAttention-3 over a paged KV cache, out of vLLM's extension module, called without PyTorch.
//!
//! | what | support |
//! |---|---|
//! | module | what `headway kernels fetch flash-attn` brought; without it every layer is refused with the command |
//! | batches | decode, prefill, chunked prefill and mixed, in one launch |
//! | q, k, v, out | bfloat16, float16 |
//! | KV cache | the activations' type; fp8 (e4m3) beside bfloat16 |
//! | heads | MHA, GQA, MQA; sizes in multiples of 8 up to 256, over fp8 of 16 |
//! | masks | causal; sliding window |
//! | scores | soft cap; sinks, which the kernels take in bfloat16, for up to 64 heads |
//! | blocks | multiples of 16 tokens, heads outside of tokens or inside |
//! | sameness | with `--batch-invariant` keys are not divided, and every launch has one form |
//! | CUDA graphs | decodes, of one token or with drafts, as many each or not |
//! | devices | compute capability 9.0 |
//!
//! A schedule (how many parts each request's keys are divided into) is made on the device once a step for all layers of a
//! group, in memory that stays. The library chooses its tiles by a bound of the longest query, and merges parts of no row
//! beyond it: so a graph of any batch would need the largest bound, and its decodes have the tiles of prefills. Where
//! queries are as short as decodes the bound is a constant, and a launch depends on rows and requests alone; steps with
//! prefills run in pieces. An output can't be quantised by its kernels.
//!
//! Over an fp8 cache the kernels want queries in e4m3 too, and round probabilities to it. Queries are rounded as they are, by a
//! factor of 1 (`layer.rs`), in a launch before each layer's. So this backend stands back there for `CUDA_ATTN`, whose
//! queries and probabilities are the activations'.
//!
//! Keys and values are written by headway's own kernel. FlashAttention-3: Shah et al., 2024.

mod builder;
mod form;
mod layer;
mod rows;
mod rules;

pub use builder::{FlashAttnBuilder, FlashAttnMetadata};
pub use layer::FlashAttnLayer;
pub use rules::{FlashAttn, FlashAttnConfig};
