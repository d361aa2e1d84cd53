//! `FLASHINFER`: FlashInfer's compiled kernels over a paged KV cache, called without Python.
//!
//! | what | support |
//! |---|---|
//! | modules | what `headway kernels build flashinfer` made; a layer without one is refused with the command that makes it |
//! | batches | decodes by fa2, keys in parts; prefills by fa3 where it is built (Hopper), else by fa2; a mixed batch is two launches |
//! | q, k, v, out | bfloat16, float16 |
//! | KV cache | the activations' type |
//! | heads | MHA, GQA, MQA; sizes 64, 128, 256 |
//! | masks | causal; sliding window (modules built with it) |
//! | scores | soft cap (modules built with it) |
//! | blocks | multiples of 16 tokens, heads outside of tokens or inside |
//! | CUDA graphs | decodes of one token: the plan is made anew for each step into the same places, the launch is the same |
//! | devices | compute capability 8.0 and later, by what the modules are compiled for |
//!
//! A plan is made once a step for all layers of a group, on the host, from exact lengths. Keys and values are written by
//! headway's own kernel.

mod builder;
mod layer;
mod rules;

pub use builder::{FlashInferBuilder, FlashInferMetadata};
pub use layer::FlashInferLayer;
pub use rules::{FlashInfer, FlashInferConfig};
