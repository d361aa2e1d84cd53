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
        flash_attn::{FlashNumbers, Form, MOST_HEADS_WITH_SINKS, Queries, element, head_step, run},
        ops::codes::quantise_queries,
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
    cache: DType,
    scale: f32,
    /// Factors that turn what is stored into keys and values.
    kv_scales: (f32, f32),
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
    /// Factors of 8-bit queries, keys and values.
    scales: Option<View<f32>>,
}

/// Factor of queries in 8 bits. One for all, so that a row's result depends on that row alone: a factor that followed what
/// a step brings would make it depend on the step. It takes part in no rounding but of numbers beyond 448, which become
/// 448, and of those below 2^-6, which are off by up to 2^-10: codes are floating-point numbers.
const Q_SCALE: f32 = 1.0;

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
        let coded = self.cache == DType::F8E4M3;
        let scales = [Q_SCALE, self.kv_scales.0, self.kv_scales.1];
        let made = OnDevice {
            module: open(NAME, Extensions::FlashAttention3)?,
            write: write_kernel(cx, self.head_size, self.dtype, self.cache)?,
            scales: match coded {
                true => Some(Persistent::new(cx, 3)?.write(cx, 3, |to| to.copy_from_slice(&scales))),
                false => None,
            },
            sinks: self.sinks.as_ref().map(|x| rounded(cx, x)).transpose()?,
        };
        Ok(self.on_device.get_or_init(|| made))
    }

    /// The cache as the kernels see it, checked against this layer's type.
    fn cache<'a>(&self, kv: &'a KvMut<'_>) -> Result<CacheLayout<'a>> {
        let memory = cache_memory(NAME, &LAYOUTS, self.cache, kv)?;
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
            scales: device.scales.as_ref(),
        };
        if !metadata.padding.is_empty() {
            cx.fill_zero(&mut out.reborrow().rows(metadata.padding.clone())?)?;
        }
        let rows = metadata.batch.rows;
        let (q, to) = (x.q.rows(0..rows)?, out.rows(0..rows)?);
        let (batch, scratch) = (&metadata.batch, &*metadata.scratch);
        let q = match (self.cache == DType::F8E4M3, &metadata.codes) {
            (false, _) => Queries::Rows(q),
            (true, Some(codes)) => {
                quantise_queries(cx, Q_SCALE, q, codes)?;
                Queries::Codes(codes)
            }
            (true, None) => {
                return Err(AttentionError::Inputs(
                    "a layer with an fp8 cache was given metadata of a group without".into(),
                ));
            }
        };
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
        let coded = a.kv_cache_dtype == DType::F8E4M3;
        if a.kv_cache_dtype != a.dtype && (!coded || a.dtype != DType::BF16) {
            let what = format!("a KV cache of {} with {} activations", a.kv_cache_dtype, a.dtype);
            return Err(refuse(NAME, what, "use the activations' type, or fp8 (e4m3) with bfloat16"));
        }
        if !a.head_size.is_multiple_of(head_step(a.kv_cache_dtype)) {
            let what = format!("heads of {} over a cache of {}", a.head_size, a.kv_cache_dtype);
            return Err(refuse(NAME, what, "choose another backend for this layer"));
        }
        positive(NAME, "a factor of stored keys of", a.k_scale)?;
        positive(NAME, "a factor of stored values of", a.v_scale)?;
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
            cache: a.kv_cache_dtype,
            scale: a.scale,
            kv_scales: (a.k_scale, a.v_scale),
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
        Ok(write_kv(cx, &device.write, x.k, x.v, self.kv_scales, slot_mapping, &self.cache(kv)?)?)
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
