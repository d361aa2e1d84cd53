//! Lifetime: the model, per layer. Class 3 of 3: a layer's numbers, and the calls of the kernels.

use super::{
    CpuAttnConfig, CpuAttnMetadata,
    rules::{LAYOUTS, NAME},
};
use crate::{
    CpuExec,
    backends::common::{cache_layout, has_scale, positive, refuse},
    kernels::attention::{CacheLayout, LayerNumbers, Lse, Output, Shape, attend, write_kv},
};
use headway_attention::{
    AttentionArgs, AttentionError, AttentionImpl, KvMut, LayerImpl, Qkv, QuantisedOut, Result,
};
use headway_tensor::{DType, TensorError, TensorMut, View};

/// One layer of `CPU_ATTN`.
#[derive(Clone, Debug)]
pub struct CpuAttnLayer {
    shape: Shape,
    dtype: DType,
    cache_dtype: DType,
    scale: f32,
    window: Option<usize>,
    soft_cap: Option<f32>,
    alibi_slopes: Option<Vec<f32>>,
    sinks: Option<View<f32>>,
    k_scale: f32,
    v_scale: f32,
}

impl LayerImpl for CpuAttnLayer {
    type Exec = CpuExec;
    type Config = CpuAttnConfig;
    type Metadata = CpuAttnMetadata;
}

impl CpuAttnLayer {
    /// The cache as the kernels see it, checked against this layer's type.
    fn layout(&self, kv: &KvMut<'_>) -> Result<CacheLayout> {
        cache_layout(NAME, &LAYOUTS, self.cache_dtype, kv)
    }

    fn numbers(&self) -> Result<LayerNumbers<'_>> {
        let sinks = match &self.sinks {
            None => None,
            Some(s) => {
                Some(s.host().ok_or_else(|| refuse(NAME, "sinks on a device", "keep them on the host"))?)
            }
        };
        Ok(LayerNumbers {
            scale: self.scale,
            window: self.window,
            soft_cap: self.soft_cap,
            alibi_slopes: self.alibi_slopes.as_deref(),
            sinks,
            k_scale: self.k_scale,
            v_scale: self.v_scale,
        })
    }

    /// [`AttentionImpl::forward`] that also gives the natural log of each row's softmax denominator
    /// (a sink included; minus infinity where a row sees neither a key nor a sink), for whoever merges
    /// this result with another: `lse` is `[rows of the requests, num_heads]`.
    ///
    /// # Errors
    /// As `forward`; too little room in `lse`.
    pub fn forward_with_lse(
        &self,
        cx: &CpuExec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        metadata: &CpuAttnMetadata,
        out: TensorMut<'_>,
        lse: Option<&mut [f32]>,
    ) -> Result<()> {
        self.attend(cx, x, kv, metadata, Output::Plain(out), lse)
    }

    fn attend(
        &self,
        cx: &CpuExec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        metadata: &CpuAttnMetadata,
        out: Output<'_>,
        lse: Option<&mut [f32]>,
    ) -> Result<()> {
        let planned = metadata.plan().shape().copied();
        if planned.map(|s| Shape { slot_rows: 0, ..s }) != Some(self.shape) {
            return Err(AttentionError::Inputs(
                "a layer was given metadata of a group with other heads".into(),
            ));
        }
        if x.q.dtype() != self.dtype {
            return Err(TensorError::WrongDType {
                what: "query",
                found: x.q.dtype(),
                supported: self.dtype.name(),
            }
            .into());
        }
        let (batch, numbers) = (&metadata.batch, self.numbers()?);
        let lse = lse.map_or(Lse::None, Lse::Write);
        let run = |cache: &CacheLayout, bytes: &[u8]| {
            attend(
                (cx.pool(), cx.attention_isa()),
                batch,
                &metadata.workspace,
                &numbers,
                x.q,
                (cache, bytes),
                out,
                lse,
            )
        };
        match &metadata.own_rows {
            Some(rows) => rows.with(cx, &self.shape, x, run),
            None => run(&self.layout(kv)?, kv.host_bytes()?),
        }
    }
}

impl AttentionImpl for CpuAttnLayer {
    fn new(args: &AttentionArgs<'_>, _: &CpuAttnConfig) -> Result<Self> {
        let shape = Shape::new(args.num_heads, args.num_kv_heads, args.head_size, args.head_size_v, 0)
            .map_err(|why| refuse(NAME, why, "choose another backend for this layer"))?;
        let eight_bits = has_scale(NAME, args.dtype, args.kv_cache_dtype)?;
        if args.sliding_window == Some(0) {
            return Err(refuse(NAME, "a sliding window of 0 tokens", "a window holds the query's own token"));
        }
        if let Some(cap) = args.logit_soft_cap {
            positive(NAME, "a logit soft cap of", cap)?;
        }
        positive(NAME, "a k_scale of", args.k_scale)?;
        positive(NAME, "a v_scale of", args.v_scale)?;
        if !args.scale.is_finite() {
            return Err(refuse(NAME, format!("a scale of {}", args.scale), "it must be finite"));
        }
        let per_head = [args.alibi_slopes.map(<[f32]>::len), args.sinks.map(View::len)];
        if per_head.into_iter().flatten().any(|n| n != args.num_heads) {
            return Err(refuse(
                NAME,
                "ALiBi slopes or sinks of another number than heads",
                "give one a query head",
            ));
        }
        Ok(Self {
            shape,
            dtype: args.dtype,
            cache_dtype: args.kv_cache_dtype,
            scale: args.scale,
            window: args.sliding_window,
            soft_cap: args.logit_soft_cap,
            alibi_slopes: args.alibi_slopes.map(<[f32]>::to_vec),
            sinks: args.sinks.cloned(),
            k_scale: if eight_bits { args.k_scale } else { 1.0 },
            v_scale: if eight_bits { args.v_scale } else { 1.0 },
        })
    }

    fn update_kv_cache(
        &self,
        cx: &CpuExec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        slot_mapping: &View<i64>,
    ) -> Result<()> {
        let slots = slot_mapping
            .host()
            .ok_or_else(|| AttentionError::Inputs("the slot mapping is not on the host".into()))?;
        if kv.shared {
            return Err(AttentionError::KvCache(
                "a layer that shares another's cache must not write it".into(),
            ));
        }
        let cache = self.layout(kv)?;
        let bytes = kv.host_bytes()?;
        write_kv(
            (cx.pool(), cx.attention_isa()),
            &self.shape,
            (x.k, self.k_scale),
            (x.v, self.v_scale),
            slots,
            &cache,
            bytes,
        )
    }

    fn forward(
        &self,
        cx: &CpuExec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        metadata: &CpuAttnMetadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        self.forward_with_lse(cx, x, kv, metadata, out, None)
    }

    fn forward_quantised(
        &self,
        cx: &CpuExec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        metadata: &CpuAttnMetadata,
        out: QuantisedOut<'_>,
    ) -> Result<()> {
        let QuantisedOut { quant, codes, scales } = out;
        if self.dtype != DType::F32 {
            // The rule is for float32 outputs: one of another type would be rounded to it first.
            return Err(refuse(
                NAME,
                format!("output as {} with activations in {}", quant.kind(), self.dtype),
                "activations in float32 are",
            ));
        }
        let scales = scales.into_host::<f32>()?;
        self.attend(cx, x, kv, metadata, Output::Codes { quant, codes, scales }, None)
    }
}
