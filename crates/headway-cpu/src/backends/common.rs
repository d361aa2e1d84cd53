//! What the backends of this crate check and refuse alike, each in its own name.

use crate::kernels::attention::CacheLayout;
use headway_attention::{AttentionError, CommonAttentionMetadata, GroupInfo, KvCacheLayout, KvMut, Result};
use headway_tensor::{DType, TensorError};

/// Refuses in a backend's name.
pub(super) fn refuse(backend: &str, what: impl Into<String>, remedy: &str) -> AttentionError {
    AttentionError::Unsupported { backend: backend.to_owned(), what: what.into(), remedy: remedy.into() }
}

/// A finite number above 0; `what` ends in "of".
pub(super) fn positive(backend: &str, what: &str, x: f32) -> Result<()> {
    if x.is_finite() && x > 0.0 {
        return Ok(());
    }
    Err(refuse(backend, format!("{what} {x}"), "it must be a finite number above 0"))
}

/// Checks the types of activations and of the cache; whether the latter is an 8-bit float, which has a scale.
pub(super) fn has_scale(backend: &str, activations: DType, cache: DType) -> Result<bool> {
    if !activations.is_compute_float() {
        let remedy = "use float32, bfloat16 or float16";
        return Err(refuse(backend, format!("{activations} activations"), remedy));
    }
    let eight_bits = matches!(cache, DType::F8E4M3 | DType::F8E5M2);
    if !eight_bits && !cache.is_compute_float() {
        let remedy = "use float32, bfloat16, float16 or an 8-bit float";
        return Err(refuse(backend, format!("a KV cache of {cache}"), remedy));
    }
    Ok(eight_bits)
}

/// The cache as the attention kernels see it, checked against a layer's type and the backend's layouts.
pub(super) fn cache_layout(
    backend: &str,
    layouts: &[KvCacheLayout],
    dtype: DType,
    kv: &KvMut<'_>,
) -> Result<CacheLayout> {
    if kv.dtype != dtype {
        let supported = dtype.name();
        return Err(TensorError::WrongDType { what: "KV cache", found: kv.dtype, supported }.into());
    }
    if !layouts.contains(&kv.layout) {
        let named: Vec<_> = layouts.iter().map(|l| l.name()).collect();
        let remedy = format!("supported: {}", named.join(", "));
        return Err(refuse(backend, format!("a KV cache laid out as {}", kv.layout), &remedy));
    }
    Ok(CacheLayout {
        offset: kv.offset,
        block_stride: kv.block_stride,
        num_blocks: kv.num_blocks,
        block_size: kv.block_size,
        dtype: kv.dtype,
    })
}

/// The most that a group's step can hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepLimits {
    pub(super) max_num_reqs: usize,
    pub(super) max_num_tokens: usize,
}

impl StepLimits {
    pub(super) fn of(group: &GroupInfo) -> Self {
        Self { max_num_reqs: group.max_num_reqs, max_num_tokens: group.max_num_tokens }
    }

    /// Holds a step against the limits, and refuses what no backend here does.
    pub(super) fn check(&self, backend: &str, common: &CommonAttentionMetadata) -> Result<()> {
        let x = &common.inputs;
        if x.dcp_local_seq_lens.is_some() {
            return Err(refuse(backend, "decode context parallelism", "run without it on the CPU"));
        }
        let tokens = x.query_start_loc.host().last().copied().unwrap_or(0);
        if x.num_reqs > self.max_num_reqs || i64::from(tokens) > self.max_num_tokens as i64 {
            return Err(AttentionError::Inputs(format!(
                "{} requests with {tokens} new tokens; the group was built for {} with {}",
                x.num_reqs, self.max_num_reqs, self.max_num_tokens
            )));
        }
        Ok(())
    }
}

/// Refuses bidirectional spans, which masked attention would get wrong.
pub(super) fn refuse_mm_prefixes(backend: &str, common: &CommonAttentionMetadata) -> Result<()> {
    match &common.inputs.mm_prefix_ranges {
        Some(ranges) if ranges.iter().any(|r| !r.is_empty()) => {
            Err(refuse(backend, "bidirectional multimodal prefixes", "choose another backend"))
        }
        _ => Ok(()),
    }
}
