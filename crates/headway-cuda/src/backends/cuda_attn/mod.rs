//! `CUDA_ATTN`: softmax attention over a paged KV cache on NVIDIA devices, by kernels of our own that need the driver and NVRTC alone.
//!
//! | what | support |
//! |---|---|
//! | batches | decode, prefill, chunked prefill and mixed, in one launch of a fixed size |
//! | q, k, v, out | bfloat16, float16; products on tensor cores, sums in float32, online softmax |
//! | KV cache | the activations' type, e4m3 and e5m2 with a scale for keys and one for values |
//! | heads | MHA, GQA, MQA, a key/value head's query heads in one tile; sizes in multiples of 8 up to 256 |
//! | masks | causal or not, per request and group; sliding window |
//! | layers | with a cache of their own or of an earlier layer |
//! | scores | soft cap, ALiBi, sinks |
//! | blocks | multiples of 16 tokens |
//! | sameness | with `--batch-invariant` a row's bits depend on no other row and not on the chunking |
//! | CUDA graphs | any batch: the launch is the same for all |
//! | devices | compute capability 8.0 and later; where a block has 99 KiB of shared memory (8.6, 8.9, 12.x) heads up to 128 |
//!
//! A value that is infinite or NaN reaches rows of its request for which a mask hides it, where both lie in one tile.
//!
//! The kernel: `csrc/attention/attention.cu`. Online softmax: Milakov and Gimelshein, 2018; tiles and their division
//! among warps: FlashAttention-2 (Dao, 2023); paging: PagedAttention (Kwon et al., 2023); parts of the keys:
//! Flash-Decoding (Dao et al., 2023).

mod builder;
mod layer;
mod rules;

pub use builder::{CudaAttnBuilder, CudaAttnMetadata};
pub use layer::CudaAttnLayer;
pub(super) use rules::LAYOUTS;
pub use rules::{CudaAttn, CudaAttnConfig};
