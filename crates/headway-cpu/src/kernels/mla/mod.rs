//! What latent attention (MLA; DeepSeek-V2, arXiv 2405.04434) does around the attention kernel. Safe code: the
//! products are those of `linear` and [`attention`](super::attention).
//!
//! - A decode attends to the latents as they are. [`Absorbed`] brings a query into the latent space (W_UK) and the
//!   result out of it (W_UV); between the two stands [`attend`](super::attention::attend) over pages of
//!   [`Form::Latent`](super::attention::Form::Latent).
//! - A prefill attends to keys and values. [`gather`] collects latents of cached or new tokens, [`expand`] makes pages
//!   of keys and values of them through `kv_b_proj`, a bounded number at a time, and `attend` merges each part's result
//!   with what came before.
//!
//! # Precision
//! Latents are read in the cache's type; queries in the latent space, scores, sums and results are float32. The
//! absorbed matrices are those of the file: dense ones in their type, block-quantised ones dequantised to float32 (and
//! so more exact than in a prefill, which multiplies them in their own form).

mod absorb;
mod expand;
mod gather;
mod rows;

pub use absorb::Absorbed;
pub use expand::{Pages, expand};
pub use gather::gather;
pub use headway_attention::group::arith::prefill_passes::{Run, Source};
pub use rows::{narrow, widen};

/// The sizes of a latent-attention layer, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Query heads.
    pub heads: usize,
    /// Elements of a query and key head without rotary position.
    pub nope: usize,
    /// Elements of a query and key head with rotary position.
    pub rope: usize,
    /// Width of the latent.
    pub rank: usize,
    /// Elements of a value head.
    pub v: usize,
}

impl Dims {
    /// Elements of a query and key head.
    pub fn qk(&self) -> usize {
        self.nope + self.rope
    }

    /// Elements of a row of the cache.
    pub fn latent(&self) -> usize {
        self.rank + self.rope
    }

    /// Columns of `kv_b_proj`.
    pub fn expanded(&self) -> usize {
        self.heads * (self.nope + self.v)
    }
}
