//! A layer that is measured, and what a call of it moves and computes.

use super::case::{Case, Kind};
use headway_attention::{KvCacheSpec, LayerNeed};
use headway_tensor::DType;

/// A layer.
#[derive(Clone, Debug)]
pub struct Layer {
    /// As tables name it, such as `32/8/128`.
    pub name: String,
    /// What selection is asked, without a block size and a compute capability.
    pub need: LayerNeed,
    /// What its cache holds, with blocks of one token.
    pub cache: KvCacheSpec,
}

impl Layer {
    /// With a cache of another element type, and the type's name as users have it.
    pub fn with_cache(mut self, element: DType, name: &'static str) -> Self {
        self.need.kv_cache_dtype = Some(name.into());
        if let Some(attention) = self.cache.attention_mut() {
            attention.dtype = element;
        }
        self
    }

    /// Elements of a query head.
    pub fn q_head(&self) -> usize {
        self.need.latent.map_or(self.need.head_size, |l| l.qk_nope_head_dim + l.qk_rope_head_dim)
    }

    /// Elements of a head of the output.
    pub fn out_head(&self) -> usize {
        self.need.latent.map_or(self.need.head_size_v, |l| l.v_head_dim)
    }

    /// Bytes that a token's keys and values take in the cache; a latent row is both.
    pub fn token_bytes(&self) -> usize {
        self.cache.page_size_bytes()
    }

    /// Bytes of the keys and values that a case reads, each once; for a write, that it writes.
    pub fn kv_bytes(&self, case: &Case) -> usize {
        case.kv_tokens(self.need.sliding_window) * self.token_bytes()
    }

    /// Multiply-adds of a case's visible pairs, two operations each.
    pub fn flops(&self, case: &Case) -> f64 {
        let pairs = case.visible_pairs(self.need.sliding_window);
        (2 * self.widths(case.kind) * self.need.num_heads * pairs) as f64
    }

    /// Elements of a query head that meet a key's, and of a value, where attention is computed: of latent attention over
    /// the latents where queries are few, over expanded keys and values where they are many.
    pub fn widths(&self, kind: Kind) -> usize {
        match (self.need.latent, kind) {
            (None, _) => self.need.head_size + self.need.head_size_v,
            (Some(l), Kind::Prefill) => l.qk_nope_head_dim + l.qk_rope_head_dim + l.v_head_dim,
            (Some(l), _) => 2 * l.kv_lora_rank + l.qk_rope_head_dim,
        }
    }
}
