//! `TRITON_ATTN`: softmax attention over a paged KV cache by Triton kernels of our own, compiled ahead of time and launched
//! without Python: the portable choice.
//!
//! | what | support |
//! |---|---|
//! | kernels | what `headway kernels build triton` made; a layer without them is refused with the command that makes them |
//! | batches | decode, prefill, chunked prefill and mixed, in one launch; decodes too few to fill the device have their keys in parts, which a second launch merges |
//! | q, k, v, out | bfloat16, float16; products on tensor cores, sums in float32, online softmax |
//! | KV cache | the activations' type |
//! | heads | MHA, GQA, MQA, a key/value head's query heads in one tile; sizes in multiples of 8 up to 256 |
//! | masks | causal or not, per request and group; sliding window |
//! | layers | with a cache of their own or of an earlier layer |
//! | scores | soft cap (kernels built with it), sinks |
//! | blocks | multiples of 16 tokens, heads outside of tokens or inside |
//! | CUDA graphs | any batch: a launch of its tokens and requests, lengths are read on the device |
//! | devices | compute capability 8.0 and later, by what the kernels are compiled for |
//!
//! Nothing is planned on the host: a block finds its rows by bisection. Keys and values are written by the kernel that
//! `CUDA_ATTN` has. The kernels: `csrc/triton/attention.py`.

mod builder;
mod layer;
mod rules;

pub use builder::{TritonAttnBuilder, TritonAttnMetadata};
pub use layer::TritonAttnLayer;
pub use rules::{TritonAttn, TritonAttnConfig};
