//! `CPU_ATTN`: softmax attention over a paged KV cache on the CPU.
//!
//! | what | support |
//! |---|---|
//! | batches | decode, prefill, chunked prefill and mixed, in one call |
//! | q, k, v, out | float32, bfloat16, float16; sums in float32, online softmax |
//! | KV cache | float32, bfloat16, float16, e4m3 and e5m2 with a scale for keys and one for values |
//! | heads | MHA, GQA, MQA; sizes in multiples of 8 up to 512; value heads may differ |
//! | masks | causal or not, per request and group; sliding window; ranges that see each other both ways (PrefixLM); R-SWA |
//! | layers | with a cache of their own or of an earlier layer; cross-attention; encoders, which have none |
//! | scores | soft cap, ALiBi, sinks |
//! | blocks | 16, 32, 64 or 128 tokens |
//! | sameness | a row's bits depend on no other row, the chunking or the number of threads, always |
//! | instruction sets | portable, AVX2; AVX-512 is compiled by the same code; AMX over bfloat16 caches |
//!
//! The kernel and its cache layout: [`crate::kernels::attention`]. Online softmax: Milakov and
//! Gimelshein, 2018; tiles: FlashAttention (Dao et al., 2022); paging: PagedAttention (Kwon et al.,
//! 2023); splits over keys: Flash-Decoding (Dao et al., 2023).

mod builder;
mod layer;
mod own_pages;
mod rules;

pub use builder::{CpuAttnBuilder, CpuAttnMetadata};
pub use layer::CpuAttnLayer;
pub use rules::{CpuAttn, CpuAttnConfig};
