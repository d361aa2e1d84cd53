//! `DAMPED_ATTN`: softmax attention with a factor on the scores.
//!
//! | what | support |
//! |---|---|
//! | batches, dtypes, masks, blocks | as `CPU_ATTN`, whose builder and kernels it uses |
//! | own setting | `factor`: multiplies every score before the softmax; 1 is `CPU_ATTN` |

mod layer;
mod rules;

pub use layer::DampedLayer;
pub use rules::{Damped, DampedConfig};
