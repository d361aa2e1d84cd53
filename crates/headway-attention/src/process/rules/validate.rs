//! Holds a rule book against a layer's needs: every reason against it, in the field's order.

use super::{KernelBlockSize, LayerNeed, Refusal, RuleBook};

impl RuleBook {
    /// Whether heads of this size are taken.
    pub fn supports_head_size(&self, n: usize) -> bool {
        self.head_sizes.is_empty() || self.head_sizes.iter().any(|r| r.contains(n))
    }

    /// Whether a manager block of this size can be cut into blocks that a kernel takes.
    pub fn supports_block_size(&self, block_size: usize) -> bool {
        self.kernel_block_sizes.is_empty()
            || self.kernel_block_sizes.iter().any(|k| match *k {
                KernelBlockSize::Exact(n) | KernelBlockSize::MultipleOf(n) => {
                    n > 0 && block_size > 0 && block_size.is_multiple_of(n)
                }
            })
    }

    /// Every reason why the backend does not fit, by the rule book's fields alone.
    pub fn refusals(&self, need: &LayerNeed) -> Vec<Refusal> {
        let mut r: Vec<Refusal> = vec![];
        let mut refuse = |wrong: bool, why: Refusal| {
            if wrong {
                r.push(why);
            }
        };
        refuse(
            self.platform != need.platform,
            format!("runs on {}, not on {}", self.platform, need.platform).into(),
        );
        refuse(self.kind != need.kind, format!("{} not supported", need.kind.name()).into());
        refuse(!self.supports_head_size(need.head_size), "head_size not supported".into());
        refuse(
            need.head_size_v != need.head_size && !self.supports_different_v_head_size,
            "different value head size not supported".into(),
        );
        refuse(!self.dtypes.contains(&need.dtype), "dtype not supported".into());
        refuse(
            need.kv_cache_dtype.as_ref().is_some_and(|d| !self.kv_cache_dtypes.contains(d)),
            "kv_cache_dtype not supported".into(),
        );
        refuse(
            need.block_size.is_some_and(|b| !self.supports_block_size(b)),
            "block_size not supported".into(),
        );
        refuse(need.use_sparse && !self.is_sparse, "sparse not supported".into());
        refuse(
            need.sliding_window.is_some() && !self.supports_sliding_window,
            "sliding window not supported".into(),
        );
        refuse(need.has_sinks && !self.supports_sinks, "sink setting not supported".into());
        refuse(
            need.has_logit_soft_cap && !self.supports_logit_soft_cap,
            "logit soft cap not supported".into(),
        );
        refuse(need.has_alibi && !self.supports_alibi, "ALiBi not supported".into());
        refuse(
            need.compute_capability
                .zip(self.compute_capabilities)
                .is_some_and(|(c, (lo, hi))| c < lo || c > hi),
            "compute capability not supported".into(),
        );
        refuse(
            !self.attn_types.contains(&need.attn_type),
            format!("attention type {} not supported", attn_type_name(need)).into(),
        );
        refuse(need.use_non_causal && !self.supports_non_causal, "non-causal attention not supported".into());
        refuse(
            need.use_batch_invariant && !self.supports_batch_invariance,
            "batch invariance not supported".into(),
        );
        refuse(need.use_dcp && !self.supports_dcp, "decode context parallelism not supported".into());
        refuse(need.use_pcp && !self.supports_pcp, "prefill context parallelism not supported".into());
        r
    }
}

fn attn_type_name(need: &LayerNeed) -> &'static str {
    use super::AttnType;
    match need.attn_type {
        AttnType::Decoder => "decoder",
        AttnType::Encoder => "encoder",
        AttnType::EncoderOnly => "encoder_only",
        AttnType::EncoderDecoder => "encoder_decoder",
    }
}
