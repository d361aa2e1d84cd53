//! Lifetime: the model's arithmetic, used each step. What builders compute on the host: splits,
//! prefix sums, chunk plans, page lists, state indices. Pure functions of a step's lengths and a
//! group's block table; every backend's builder calls them, whatever the device.
//!
//! Results that grow with the batch go into `Vec`s that the caller keeps: a step after the first
//! allocates nothing. Lengths are tokens; block tables are `[num_reqs, stride]`, row-major.
//!
//! | file | what | for |
//! |---|---|---|
//! | [`lengths`] | prefix sums of a part of the batch | all |
//! | [`flash_attn`] | ahead-of-time schedule, splits, decode context parallelism | FlashAttention |
//! | [`triton`] | buffers of a softmax in segments | Triton's unified attention |
//! | [`pages`] | page lists: a block table without its holes | FlashInfer |
//! | [`flashinfer`] | kernels of the two halves, plan arguments, draft masks | FlashInfer |
//! | [`mla`] | decode and prefill halves, workspace size | multi-head latent attention |
//! | [`context_chunks`] | a prefill's cached context through a bounded workspace | multi-head latent attention |
//! | [`prefill_passes`] | what a prefill expands at a time, and who attends to it | multi-head latent attention |
//! | [`scan_chunks`] | chunks of a scan that end where sequences end | Mamba-2 |
//! | [`conv_blocks`] | programs of a causal convolution | state-space layers |
//! | [`mamba_states`] | which block holds a request's state | state-space layers |
//! | [`mamba2`] | both halves of a state-space step | Mamba-2 |
//! | [`mamba2_dims`] | sizes of a layer, from the shapes of its states | Mamba-2 |

pub mod context_chunks;
pub mod conv_blocks;
pub mod flash_attn;
pub mod flashinfer;
pub mod lengths;
pub mod mamba2;
pub mod mamba2_dims;
pub mod mamba_states;
pub mod mla;
pub mod pages;
pub mod prefill_passes;
pub mod scan_chunks;
pub mod triton;
