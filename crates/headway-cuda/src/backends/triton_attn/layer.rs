//! Lifetime: the model, per layer. Class 3 of 3: a layer's numbers, and the calls of the kernels.

use super::{TritonAttnConfig, TritonAttnMetadata, rules::NAME};
use crate::{
    CudaExec,
    backends::{
        common::{cache_layout, cache_memory, check_softmax, expect_dtype, expect_write, on_device, refuse},
        cuda_attn::LAYOUTS,
        triton::load,
    },
    kernels::{
        Kernel,
        attention::{LayerNumbers, Shape},
        cache::{CacheLayout, write_kernel, write_kv},
        triton::{Batch, TritonKernels, attend},
    },
    modules::{
        module_dtype,
        triton::{TritonWant, WantOf},
    },
};
use headway_attention::{AttentionArgs, AttentionError, AttentionImpl, KvMut, LayerImpl, Qkv, Result};
use headway_tensor::{DType, TensorMut, View};
use std::sync::{Arc, OnceLock};

/// One layer of `TRITON_ATTN`.
pub struct TritonAttnLayer {
    shape: Shape,
    dtype: DType,
    scale: f32,
    window: Option<usize>,
    soft_cap: Option<f32>,
    sinks: Option<View<f32>>,
    on_device: OnceLock<OnDevice>,
}

/// What the layer has on the device: made at the first call, which is the profile run's.
struct OnDevice {
    attention: TritonKernels,
    write: Arc<Kernel>,
    sinks: Option<View<f32>>,
}

impl LayerImpl for TritonAttnLayer {
    type Exec = CudaExec;
    type Config = TritonAttnConfig;
    type Metadata = TritonAttnMetadata;

    fn fill_zero(&self, cx: &CudaExec, out: &mut TensorMut<'_>) -> Result<()> {
        self.on_device(cx)?;
        Ok(cx.fill_zero(out)?)
    }
}

impl TritonAttnLayer {
    fn on_device(&self, cx: &CudaExec) -> Result<&OnDevice> {
        if let Some(d) = self.on_device.get() {
            return Ok(d);
        }
        let made = OnDevice {
            attention: self.kernels(cx)?,
            write: write_kernel(cx, self.shape.head_size, self.dtype, self.dtype)?,
            sinks: self.sinks.as_ref().map(|x| on_device(cx, x)).transpose()?,
        };
        Ok(self.on_device.get_or_init(|| made))
    }

    fn kernels(&self, cx: &CudaExec) -> Result<TritonKernels> {
        let of = WantOf::Paged { head_size: self.shape.head_size, soft_cap: self.soft_cap.is_some() };
        let want = TritonWant { dtype: module_dtype(self.dtype).unwrap_or_default(), of, arch: None };
        load(NAME, cx, want, TritonKernels::load)
    }

    /// The cache as the kernels see it, checked against this layer's type.
    fn cache<'a>(&self, kv: &'a KvMut<'_>) -> Result<CacheLayout<'a>> {
        let memory = cache_memory(NAME, &LAYOUTS, self.dtype, kv)?;
        Ok(cache_layout(memory, kv, self.shape.kv_heads, self.shape.head_size))
    }
}

impl AttentionImpl for TritonAttnLayer {
    fn new(a: &AttentionArgs<'_>, _: &TritonAttnConfig) -> Result<Self> {
        check_softmax(NAME, a)?;
        if a.kv_cache_dtype != a.dtype {
            let what = format!("a KV cache of {} with {} activations", a.kv_cache_dtype, a.dtype);
            return Err(refuse(NAME, what, "use the activations' type, or CUDA_ATTN"));
        }
        if a.alibi_slopes.is_some() {
            return Err(refuse(NAME, "ALiBi slopes", "use CUDA_ATTN"));
        }
        Ok(Self {
            shape: Shape::new(a.num_heads, a.num_kv_heads, a.head_size)
                .map_err(|why| refuse(NAME, why, "choose another backend for this layer"))?,
            dtype: a.dtype,
            scale: a.scale,
            window: a.sliding_window,
            soft_cap: a.logit_soft_cap,
            sinks: a.sinks.cloned(),
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
        let write = &self.on_device(cx)?.write;
        Ok(write_kv(cx, write, x.k, x.v, (1.0, 1.0), slot_mapping, &self.cache(kv)?)?)
    }

    fn forward(
        &self,
        cx: &CudaExec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        metadata: &TritonAttnMetadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        if metadata.shape != self.shape {
            return Err(AttentionError::Inputs(
                "a layer was given metadata of a group with other heads".into(),
            ));
        }
        expect_dtype("query", x.q.dtype(), self.dtype)?;
        let device = self.on_device(cx)?;
        let batch = Batch {
            block_table: &metadata.block_table,
            table_stride: metadata.table_stride,
            query_start_loc: &metadata.query_start_loc,
            seq_lens: &metadata.seq_lens,
            mask: &metadata.mask,
            num_reqs: metadata.num_reqs,
            num_tokens: metadata.num_tokens,
            plan: metadata.plan,
            part_out: &metadata.scratch.part_out,
            part_sums: &metadata.scratch.part_sums,
        };
        let numbers = LayerNumbers {
            scale: self.scale,
            window: self.window,
            soft_cap: self.soft_cap,
            v_scale: 1.0,
            sinks: device.sinks.as_ref(),
            alibi_slopes: None,
        };
        Ok(attend(cx, &device.attention, &self.shape, &batch, &numbers, x.q, &self.cache(kv)?, out)?)
    }
}
