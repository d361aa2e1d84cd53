//! What the backends of this crate hold their inputs against and refuse alike, each in its own name.

use crate::{
    CudaExec,
    kernels::{attention::Shape, cache::CacheLayout},
};
use headway_attention::{
    AttentionArgs, AttentionError, Causal, CommonAttentionMetadata, GroupInfo, KvBuf, KvCacheSpec, KvMut,
    Qkv, Result,
    group::kv::{
        layout::KvCacheLayout,
        spec::{KvQuantMode, TokensPerState},
    },
};
use headway_tensor::{DType, DeviceMem, Persistent, TensorError, View};
use std::sync::Arc;

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

/// Refuses another element type than the layer's.
pub(super) fn expect_dtype(what: &'static str, found: DType, wanted: DType) -> Result<()> {
    match found == wanted {
        true => Ok(()),
        false => Err(TensorError::WrongDType { what, found, supported: wanted.name() }.into()),
    }
}

/// A window that kernels can be given as a number of tokens.
pub(super) fn expect_window(backend: &str, window: Option<usize>) -> Result<()> {
    match window {
        Some(w) if i32::try_from(w).map_or(true, |w| w < 1) => {
            Err(refuse(backend, format!("a sliding window of {w}"), "it must be at least 1, and fit 31 bits"))
        }
        _ => Ok(()),
    }
}

/// Keys and values of the layer's type, for a cache that is the layer's to write.
pub(super) fn expect_write(x: &Qkv<'_>, kv: &KvMut<'_>, dtype: DType) -> Result<()> {
    if kv.shared {
        return Err(AttentionError::KvCache("a layer that shares another's cache must not write it".into()));
    }
    expect_dtype("key", x.k.dtype(), dtype)?;
    expect_dtype("value", x.v.dtype(), dtype)
}

/// A layer's cache on the device, of the layer's type and in a layout that its kernels read.
pub(super) fn cache_memory<'a>(
    backend: &str,
    layouts: &[KvCacheLayout],
    dtype: DType,
    kv: &'a KvMut<'_>,
) -> Result<&'a Arc<dyn DeviceMem>> {
    expect_dtype("KV cache", kv.dtype, dtype)?;
    if !layouts.contains(&kv.layout) {
        let named: Vec<_> = layouts.iter().map(|l| l.name()).collect();
        let remedy = format!("supported: {}", named.join(", "));
        return Err(refuse(backend, format!("a KV cache laid out as {}", kv.layout), &remedy));
    }
    match &*kv.buf {
        KvBuf::Dev(memory) => Ok(memory),
        _ => Err(AttentionError::KvCache("the KV cache is on the host, not on a CUDA device".into())),
    }
}

/// A cache of keys and values as the kernels see it.
pub(super) fn cache_layout<'a>(
    memory: &'a Arc<dyn DeviceMem>,
    kv: &KvMut<'_>,
    kv_heads: usize,
    head_size: usize,
) -> CacheLayout<'a> {
    CacheLayout {
        memory,
        offset: kv.offset,
        block_stride: kv.block_stride,
        num_blocks: kv.num_blocks,
        block_size: kv.block_size,
        kv_heads,
        head_size,
        dtype: kv.dtype,
        heads_outside: kv.layout.is_block_contiguous(),
    }
}

/// On the device, wherever it was given.
pub(super) fn on_device(cx: &CudaExec, x: &View<f32>) -> Result<View<f32>> {
    match x.host() {
        None => Ok(x.clone()),
        Some(host) => {
            Ok(Persistent::new(cx, host.len())?.write(cx, host.len(), |to| to.copy_from_slice(host)))
        }
    }
}

/// A group's heads, where its cache is one of keys and values of one token each and quantised as `quants` say.
pub(super) fn softmax_shape(backend: &str, group: &GroupInfo, quants: &[KvQuantMode]) -> Result<Shape> {
    let attention = match &group.spec {
        KvCacheSpec::Full(a) | KvCacheSpec::SlidingWindow { attention: a, .. } => a,
        other => {
            return Err(refuse(
                backend,
                format!("a KV cache of {other:?}"),
                "full and sliding-window caches of keys and values are",
            ));
        }
    };
    let plain = quants.contains(&attention.quant)
        && attention.tokens_per_state == TokensPerState::ONE
        && attention.num_head_slots.is_none_or(|n| n == attention.num_kv_heads)
        && attention.state_content_bytes.is_none()
        && attention.chunk_mask.is_none()
        && attention.cache_format.is_none()
        && attention.head_size == attention.head_size_v;
    if !plain {
        let eight_bits = quants.contains(&KvQuantMode::Fp8PerTensor);
        let or = if eight_bits { " or as 8-bit floats with one scale" } else { "" };
        return Err(refuse(
            backend,
            "a packed, compressed or chunked KV cache, or values of another size than keys",
            &format!("keys and values of one token each, unquantised{or}, are"),
        ));
    }
    Shape::new(group.num_heads, attention.num_kv_heads, attention.head_size)
        .map_err(|why| refuse(backend, why, "choose another backend for these layers"))
}

/// The requests' causal flags, where they are on the device alone.
pub(super) fn causal_flags(common: &CommonAttentionMetadata) -> Option<&View<u8>> {
    match common.causal() {
        Causal::PerRequest(v) if v.host().is_none() => Some(v),
        _ => None,
    }
}

/// A layer's types, sizes and numbers, as kernels of softmax attention take them; what a cache may be is not in it.
pub(super) fn check_softmax(backend: &str, a: &AttentionArgs<'_>) -> Result<()> {
    if !matches!(a.dtype, DType::BF16 | DType::F16) {
        return Err(refuse(backend, format!("{} activations", a.dtype), "use bfloat16 or float16"));
    }
    if a.head_size_v != a.head_size {
        let what = format!("value heads of {} beside key heads of {}", a.head_size_v, a.head_size);
        return Err(refuse(backend, what, "both must be of one size"));
    }
    positive(backend, "a score factor of", a.scale)?;
    let given = [a.sinks.map(View::len), a.alibi_slopes.map(<[f32]>::len)];
    if let Some(n) = given.into_iter().flatten().find(|&n| n != a.num_heads) {
        let what = format!("sinks or ALiBi slopes for {n} heads of {}", a.num_heads);
        return Err(refuse(backend, what, "give one for each query head"));
    }
    if let Some(cap) = a.logit_soft_cap {
        positive(backend, "a soft cap of", cap)?;
    }
    expect_window(backend, a.sliding_window)
}

/// Most requests and new tokens of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepLimits {
    max_num_reqs: usize,
    max_num_tokens: usize,
}

impl StepLimits {
    pub(super) fn of(group: &GroupInfo) -> Self {
        Self { max_num_reqs: group.max_num_reqs, max_num_tokens: group.max_num_tokens }
    }

    /// Holds a step against the limits, and refuses what no backend here does.
    pub(super) fn check(&self, backend: &str, common: &CommonAttentionMetadata) -> Result<()> {
        let x = &common.inputs;
        if x.dcp_local_seq_lens.is_some() {
            return Err(refuse(backend, "decode context parallelism", "run without it"));
        }
        if x.num_reqs > self.max_num_reqs || x.num_actual_tokens > self.max_num_tokens {
            return Err(AttentionError::Inputs(format!(
                "{} requests with {} new tokens; the group was built for {} with {}",
                x.num_reqs, x.num_actual_tokens, self.max_num_reqs, self.max_num_tokens
            )));
        }
        Ok(())
    }
}
