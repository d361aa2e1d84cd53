//! Lifetime: the model, per layer. Class 3 of 3: a layer's numbers, and the calls of the kernels.

use super::{FlashAttnConfig, FlashAttnMetadata, builder::window_left, rules::NAME};
use crate::{
    CudaError, CudaExec,
    backends::{
        common::{cache_layout, cache_memory, expect_dtype, expect_window, expect_write, positive, refuse},
        cuda_attn::LAYOUTS,
        extensions::open,
    },
    kernels::{
        Kernel,
        cache::{CacheLayout, write_kernel, write_kv},
        flash_attn::{FlashNumbers, Form, MOST_HEADS_WITH_SINKS, element, run},
    },
    modules::extension::{Extension, Extensions},
};
use half::bf16;
use headway_attention::{AttentionArgs, AttentionError, AttentionImpl, KvMut, LayerImpl, Qkv, Result};
use headway_tensor::{DType, Persistent, TensorMut, View};
use std::sync::{Arc, OnceLock};

/// One layer of `FLASH_ATTN`.
pub struct FlashAttnLayer {
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    dtype: DType,
    scale: f32,
    window: Option<usize>,
    soft_cap: Option<f32>,
    sinks: Option<View<f32>>,
    on_device: OnceLock<OnDevice>,
}

/// What the layer has on the device: made at the first call, which is the profile run's.
struct OnDevice {
    module: Arc<Extension>,
    write: Arc<Kernel>,
    sinks: Option<View<u16>>,
}

impl LayerImpl for FlashAttnLayer {
    type Exec = CudaExec;
    type Config = FlashAttnConfig;
    type Metadata = FlashAttnMetadata;

    fn fill_zero(&self, cx: &CudaExec, out: &mut TensorMut<'_>) -> Result<()> {
        self.on_device(cx)?;
        Ok(cx.fill_zero(out)?)
    }
}

/// Sinks in bfloat16 on the device, wherever they were given.
fn rounded(cx: &CudaExec, x: &View<f32>) -> Result<View<u16>> {
    let mut sinks = vec![0f32; x.len()];
    match (x.host(), x.device_mem()) {
        (Some(host), _) => sinks.copy_from_slice(host),
        (None, Some(memory)) => {
            let offset = (x.addr() - memory.addr()) as usize;
            cx.read(memory, offset, bytemuck::cast_slice_mut(&mut sinks))?;
        }
        (None, None) => return Err(CudaError::Argument("sinks that are nowhere".into()).into()),
    }
    let codes = |to: &mut [u16]| {
        to.iter_mut().zip(&sinks).for_each(|(to, &x)| *to = bf16::from_f32(x).to_bits());
    };
    Ok(Persistent::new(cx, sinks.len())?.write(cx, sinks.len(), codes))
}

impl FlashAttnLayer {
    fn on_device(&self, cx: &CudaExec) -> Result<&OnDevice> {
        if let Some(d) = self.on_device.get() {
            return Ok(d);
        }
        let made = OnDevice {
            module: open(NAME, Extensions::FlashAttention3)?,
            write: write_kernel(cx, self.head_size, self.dtype, self.dtype)?,
            sinks: self.sinks.as_ref().map(|x| rounded(cx, x)).transpose()?,
        };
        Ok(self.on_device.get_or_init(|| made))
    }

    /// The cache as the kernels see it, checked against this layer's type.
    fn cache<'a>(&self, kv: &'a KvMut<'_>) -> Result<CacheLayout<'a>> {
        let memory = cache_memory(NAME, &LAYOUTS, self.dtype, kv)?;
        Ok(cache_layout(memory, kv, self.kv_heads, self.head_size))
    }

    /// [`AttentionImpl::forward`] that also gives the natural log of each row's softmax denominator, for whoever merges
    /// this result with another, as context parallelism does: `lse` is `[num_heads, rows]`, float32 without gaps, for
    /// the rows that requests have.
    ///
    /// # Errors
    /// As `forward`; an `lse` of another shape.
    pub fn forward_with_lse(
        &self,
        cx: &CudaExec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        metadata: &FlashAttnMetadata,
        mut out: TensorMut<'_>,
        lse: Option<TensorMut<'_>>,
    ) -> Result<()> {
        let shape = metadata.shape;
        if (shape.heads, shape.kv_heads, shape.head_size) != (self.heads, self.kv_heads, self.head_size) {
            return Err(AttentionError::Inputs(
                "a layer was given metadata of a group with other heads".into(),
            ));
        }
        expect_dtype("query", x.q.dtype(), self.dtype)?;
        let device = self.on_device(cx)?;
        // A layer whose window is not the group's has tiles of its own, and so a schedule of its own.
        let form = Form { window_left: window_left(self.window), ..metadata.form };
        let schedule = metadata.schedule.as_ref().filter(|_| form == metadata.form);
        let numbers = FlashNumbers {
            scale: self.scale,
            soft_cap: self.soft_cap.unwrap_or(0.0),
            sinks: device.sinks.as_ref(),
        };
        if !metadata.padding.is_empty() {
            cx.fill_zero(&mut out.reborrow().rows(metadata.padding.clone())?)?;
        }
        let rows = metadata.batch.rows;
        let (q, to) = (x.q.rows(0..rows)?, out.rows(0..rows)?);
        let (batch, scratch) = (&metadata.batch, &*metadata.scratch);
        let cache = self.cache(kv)?;
        run(cx, &device.module, &shape, &form, batch, schedule, &numbers, q, &cache, to, scratch, lse)?;
        Ok(())
    }
}

impl AttentionImpl for FlashAttnLayer {
    fn new(a: &AttentionArgs<'_>, _: &FlashAttnConfig) -> Result<Self> {
        if element(a.dtype).is_none() {
            return Err(refuse(NAME, format!("{} activations", a.dtype), "use bfloat16 or float16"));
        }
        if a.kv_cache_dtype != a.dtype {
            let what = format!("a KV cache of {} with {} activations", a.kv_cache_dtype, a.dtype);
            return Err(refuse(NAME, what, "use the activations' type"));
        }
        if a.head_size_v != a.head_size {
            let what = format!("value heads of {} beside key heads of {}", a.head_size_v, a.head_size);
            return Err(refuse(NAME, what, "both must be of one size"));
        }
        if a.alibi_slopes.is_some() {
            return Err(refuse(NAME, "ALiBi", "choose another backend for this layer"));
        }
        positive(NAME, "a score factor of", a.scale)?;
        if let Some(cap) = a.logit_soft_cap {
            positive(NAME, "a soft cap of", cap)?;
        }
        if let Some(n) = a.sinks.map(View::len).filter(|&n| n != a.num_heads || n > MOST_HEADS_WITH_SINKS) {
            let what = format!("{n} sinks for {} heads", a.num_heads);
            return Err(refuse(NAME, what, "give one for each query head, 64 at most"));
        }
        expect_window(NAME, a.sliding_window)?;
        Ok(Self {
            heads: a.num_heads,
            kv_heads: a.num_kv_heads,
            head_size: a.head_size,
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
        let device = self.on_device(cx)?;
        Ok(write_kv(cx, &device.write, x.k, x.v, (1.0, 1.0), slot_mapping, &self.cache(kv)?)?)
    }

    fn forward(
        &self,
        cx: &CudaExec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        metadata: &FlashAttnMetadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        self.forward_with_lse(cx, x, kv, metadata, out, None)
    }
}
