//! Lifetime: the model, per layer. Class 3 of 3: a layer's numbers, and the calls of the kernels.

use super::{
    CudaAttnConfig, CudaAttnMetadata,
    rules::{LAYOUTS, NAME},
};
use crate::{
    CudaExec,
    backends::common::{
        cache_layout, cache_memory, check_softmax, expect_dtype, expect_write, on_device, positive, refuse,
    },
    kernels::{
        Kernel,
        attention::{Batch, LayerNumbers, Shape, attend, kernel},
        cache::{CacheLayout, write_kernel, write_kv},
    },
};
use headway_attention::{AttentionArgs, AttentionError, AttentionImpl, KvMut, LayerImpl, Qkv, Result};
use headway_tensor::{DType, TensorMut, View};
use std::sync::{Arc, OnceLock};

/// One layer of `CUDA_ATTN`.
pub struct CudaAttnLayer {
    shape: Shape,
    dtype: DType,
    cache_dtype: DType,
    scale: f32,
    window: Option<usize>,
    soft_cap: Option<f32>,
    alibi_slopes: Option<View<f32>>,
    sinks: Option<View<f32>>,
    k_scale: f32,
    v_scale: f32,
    on_device: OnceLock<OnDevice>,
}

/// What the layer has on the device: made at the first call, which is the profile run's.
struct OnDevice {
    attention: Arc<Kernel>,
    write: Arc<Kernel>,
    sinks: Option<View<f32>>,
    alibi_slopes: Option<View<f32>>,
}

impl LayerImpl for CudaAttnLayer {
    type Exec = CudaExec;
    type Config = CudaAttnConfig;
    type Metadata = CudaAttnMetadata;

    fn fill_zero(&self, cx: &CudaExec, out: &mut TensorMut<'_>) -> Result<()> {
        self.on_device(cx)?;
        Ok(cx.fill_zero(out)?)
    }
}

impl CudaAttnLayer {
    fn on_device(&self, cx: &CudaExec) -> Result<&OnDevice> {
        if let Some(d) = self.on_device.get() {
            return Ok(d);
        }
        let plain = self.soft_cap.is_none() && self.alibi_slopes.is_none();
        let made = OnDevice {
            attention: kernel(cx, &self.shape, self.dtype, self.cache_dtype, plain)?,
            write: write_kernel(cx, self.shape.head_size, self.dtype, self.cache_dtype)?,
            sinks: self.sinks.as_ref().map(|x| on_device(cx, x)).transpose()?,
            alibi_slopes: self.alibi_slopes.as_ref().map(|x| on_device(cx, x)).transpose()?,
        };
        Ok(self.on_device.get_or_init(|| made))
    }

    /// The cache as the kernels see it, checked against this layer's type.
    fn cache<'a>(&self, kv: &'a KvMut<'_>) -> Result<CacheLayout<'a>> {
        let memory = cache_memory(NAME, &LAYOUTS, self.cache_dtype, kv)?;
        Ok(cache_layout(memory, kv, self.shape.kv_heads, self.shape.head_size))
    }

    /// [`AttentionImpl::forward`] that also gives the natural log of each row's softmax denominator (a sink included;
    /// minus infinity where a row sees neither a key nor a sink), for whoever merges this result with another: `lse`
    /// is `[num_tokens, num_heads]`, float32.
    ///
    /// # Errors
    /// As `forward`; an `lse` of another shape.
    pub fn forward_with_lse(
        &self,
        cx: &CudaExec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        metadata: &CudaAttnMetadata,
        out: TensorMut<'_>,
        lse: Option<TensorMut<'_>>,
    ) -> Result<()> {
        if metadata.shape != self.shape {
            return Err(AttentionError::Inputs(
                "a layer was given metadata of a group with other heads".into(),
            ));
        }
        expect_dtype("query", x.q.dtype(), self.dtype)?;
        let (device, scratch) = (self.on_device(cx)?, &*metadata.scratch);
        let batch = Batch {
            tiles: &metadata.tiles,
            block_table: &metadata.block_table,
            table_stride: metadata.table_stride,
            query_start_loc: &metadata.query_start_loc,
            seq_lens: &metadata.seq_lens,
            causal: metadata.causal.as_ref(),
            num_tokens: metadata.num_tokens,
            part_out: &scratch.part_out,
            part_sum: &scratch.part_sum,
            counters: &scratch.counters,
            next: &scratch.next,
            part_rows: scratch.part_rows,
            num_counters: scratch.num_counters,
            grid: scratch.grid,
        };
        let numbers = LayerNumbers {
            scale: self.scale * self.k_scale,
            window: self.window,
            soft_cap: self.soft_cap,
            v_scale: self.v_scale,
            sinks: device.sinks.as_ref(),
            alibi_slopes: device.alibi_slopes.as_ref(),
        };
        Ok(attend(cx, &device.attention, &self.shape, &batch, &numbers, x.q, &self.cache(kv)?, out, lse)?)
    }
}

impl AttentionImpl for CudaAttnLayer {
    fn new(a: &AttentionArgs<'_>, _: &CudaAttnConfig) -> Result<Self> {
        check_softmax(NAME, a)?;
        let eight_bits = matches!(a.kv_cache_dtype, DType::F8E4M3 | DType::F8E5M2);
        if !eight_bits && a.kv_cache_dtype != a.dtype {
            let what = format!("a KV cache of {} with {} activations", a.kv_cache_dtype, a.dtype);
            return Err(refuse(NAME, what, "use the activations' type or an 8-bit float"));
        }
        if eight_bits {
            positive(NAME, "a key scale of", a.k_scale)?;
            positive(NAME, "a value scale of", a.v_scale)?;
        }
        Ok(Self {
            shape: Shape::new(a.num_heads, a.num_kv_heads, a.head_size)
                .map_err(|why| refuse(NAME, why, "choose another backend for this layer"))?,
            dtype: a.dtype,
            cache_dtype: a.kv_cache_dtype,
            scale: a.scale,
            window: a.sliding_window,
            soft_cap: a.logit_soft_cap,
            alibi_slopes: a.alibi_slopes.map(|x| View::from_vec(x.to_vec())),
            sinks: a.sinks.cloned(),
            k_scale: if eight_bits { a.k_scale } else { 1.0 },
            v_scale: if eight_bits { a.v_scale } else { 1.0 },
            on_device: OnceLock::new(),
        })
    }

    fn update_kv_cache(
        &self,
        cx: &CudaExec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        slot_mapping: &View<i64>,
    ) -> Result<()> {
        expect_write(x, kv, self.dtype)?;
        let device = self.on_device(cx)?;
        let scales = (self.k_scale, self.v_scale);
        Ok(write_kv(cx, &device.write, x.k, x.v, scales, slot_mapping, &self.cache(kv)?)?)
    }

    fn forward(
        &self,
        cx: &CudaExec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        metadata: &CudaAttnMetadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        self.forward_with_lse(cx, x, kv, metadata, out, None)
    }
}
