//! Holds a rule book against a layer's needs: every reason against it, in the field's order.

use super::{KernelBlockSize, KindTag, LayerNeed, Refusal, RuleBook};

impl RuleBook {
    /// Whether heads of this size are taken.
    pub fn supports_head_size(&self, n: usize) -> bool {
        self.head_sizes.is_empty() || self.head_sizes.iter().any(|r| r.contains(n))
    }

    /// Whether a manager block of this size can be cut into blocks that a kernel takes.
    pub fn supports_block_size(&self, block_size: usize) -> bool {
        self.kernel_block_sizes.is_empty()
            || self.kernel_block_sizes.iter().any(|k| match *k {
                KernelBlockSize::Exact(n) if self.whole_blocks_only => n == block_size,
                KernelBlockSize::Exact(n) | KernelBlockSize::MultipleOf(n) => {
                    n > 0 && block_size > 0 && block_size.is_multiple_of(n)
                }
            })
    }

    /// Whether a device of this compute capability is taken.
    pub fn supports_compute_capability(&self, need: &LayerNeed) -> bool {
        match (need.compute_capability, &self.compute_capabilities) {
            (Some(c), Some(ranges)) => ranges.iter().any(|r| r.contains(c)),
            _ => true,
        }
    }

    /// The block size to use where the user gave none: the preferred one, else the engine's default
    /// where a kernel takes it, else the fallback, else the smallest that the rule book names.
    pub fn preferred_block_size(&self, default: usize) -> usize {
        if let Some(n) = self.preferred_block_size {
            return n;
        }
        if self.supports_block_size(default) {
            return default;
        }
        if let Some(n) = self.fallback_block_size {
            return n;
        }
        self.kernel_block_sizes
            .iter()
            .map(|k| match *k {
                KernelBlockSize::Exact(n) | KernelBlockSize::MultipleOf(n) => n,
            })
            .min()
            .unwrap_or(default)
    }

    /// Every reason why the backend does not fit, by the rule book's fields alone. What concerns the
    /// cache is not asked of a layer without one.
    pub fn refusals(&self, need: &LayerNeed) -> Vec<Refusal> {
        let cached = |wrong: bool| need.has_cache && wrong;
        let checks: [(bool, &str); 26] = [
            (!self.supports_head_size(need.head_size), "head_size not supported"),
            (!self.dtypes.contains(&need.dtype), "dtype not supported"),
            (cached(!self.supports_kv_cache_dtype(need)), "kv_cache_dtype not supported"),
            (
                cached(need.block_size.is_some_and(|b| !self.supports_block_size(b))),
                "block_size not supported",
            ),
            (
                need.use_mm_prefix && !self.supports_mm_prefix,
                "partial multimodal token full attention not supported",
            ),
            (need.kind != self.kind && need.kind == KindTag::Mla, "MLA not supported"),
            (need.kind != self.kind && self.kind == KindTag::Mla, "non-MLA not supported"),
            (need.has_sinks && !self.supports_sinks, "attention sinks not supported"),
            (need.use_sparse && !self.is_sparse, "sparse not supported"),
            (!need.use_sparse && self.is_sparse, "non-sparse not supported"),
            (
                need.use_per_head_quant_scales && !self.supports_per_head_quant_scales,
                "per-head quant scales not supported",
            ),
            (!self.supports_compute_capability(need), "compute capability not supported"),
            (!self.attn_types.contains(&need.attn_type), ATTN_TYPE),
            (need.sliding_window.is_some() && !self.supports_sliding_window, "sliding window not supported"),
            (need.use_rswa && !self.supports_rswa, "R-SWA not supported"),
            (need.use_chunked_local && !self.supports_chunked_local, "chunked local attention not supported"),
            (need.use_non_causal && !self.supports_non_causal, "non-causal attention not supported"),
            (
                need.use_non_causal
                    && need.use_dcp
                    && !self.supports_non_causal_dcp
                    && self.kind == KindTag::Mla,
                "non-causal MLA attention with DCP not supported",
            ),
            (need.use_batch_invariant && !self.supports_batch_invariance, "batch invariance not supported"),
            (need.use_kv_connector && !self.supports_kv_connector, "KV connector not supported"),
            (need.use_pcp && !self.supports_pcp, "PCP not supported"),
            (need.use_dcp && !self.supports_dcp, "DCP not supported"),
            (
                need.use_adaptive_verification && !self.supports_inexact_query_lens,
                "device-cpu query lens mismatch not supported, this is needed for adaptive verification",
            ),
            (
                need.head_size_v != need.head_size && !self.supports_different_v_head_size,
                "different value head size not supported",
            ),
            (need.has_logit_soft_cap && !self.supports_logit_soft_cap, "logit soft cap not supported"),
            (need.has_alibi && !self.supports_alibi, "ALiBi not supported"),
        ];
        let platform = (self.platform != need.platform)
            .then(|| Refusal::from(format!("runs on {}, not on {}", self.platform, need.platform)));
        let state = (need.kind != self.kind && [need.kind, self.kind].contains(&KindTag::StateSpace))
            .then(|| Refusal::from(format!("{} not supported", need.kind.name())));
        let reasons = checks.into_iter().filter(|(wrong, _)| *wrong).map(|(_, why)| match why {
            ATTN_TYPE => format!("attention type {} not supported", need.attn_type.name()).into(),
            why => why.into(),
        });
        platform.into_iter().chain(state).chain(reasons).collect()
    }

    fn supports_kv_cache_dtype(&self, need: &LayerNeed) -> bool {
        match &need.kv_cache_dtype {
            None => self.supports_unset_kv_cache_dtype,
            Some(d) => self.kv_cache_dtypes.contains(d),
        }
    }
}

/// Stands for the reason that names the attention type.
const ATTN_TYPE: &str = "attention type";
