//! Lifetime: the model, per layer. Class 3 of 3: a layer's numbers, and the calls of the kernels.

use super::{FlashInferConfig, FlashInferMetadata, builder::Part, rules::NAME};
use crate::{
    CudaExec,
    backends::{
        common::{cache_layout, cache_memory, expect_dtype, expect_window, expect_write, positive, refuse},
        cuda_attn::LAYOUTS,
        modules::{is_built, open},
    },
    kernels::{
        Kernel,
        cache::{CacheLayout, write_kernel, write_kv},
        flashinfer::{PagedNumbers, run},
    },
    modules::{Kind, Module, Want, module_dtype},
};
use headway_attention::{AttentionArgs, AttentionError, AttentionImpl, KvMut, LayerImpl, Qkv, Result};
use headway_tensor::{DType, TensorMut, TensorRef, View};
use std::sync::{Arc, OnceLock};

/// One layer of `FLASHINFER`.
pub struct FlashInferLayer {
    heads: usize,
    kv_heads: usize,
    head_size: usize,
    dtype: DType,
    named: &'static str,
    scale: f32,
    window: Option<usize>,
    soft_cap: Option<f32>,
    write: OnceLock<Arc<Kernel>>,
    fa2: OnceLock<Arc<Module>>,
    /// `None`: not built in this layer's form.
    fa3: OnceLock<Option<Arc<Module>>>,
}

impl LayerImpl for FlashInferLayer {
    type Exec = CudaExec;
    type Config = FlashInferConfig;
    type Metadata = FlashInferMetadata;

    fn fill_zero(&self, cx: &CudaExec, out: &mut TensorMut<'_>) -> Result<()> {
        // The profile run's: what a step needs is opened and compiled before it.
        self.fa2(cx)?;
        self.fa3(cx)?;
        self.write_kernel(cx)?;
        Ok(cx.fill_zero(out)?)
    }
}

impl FlashInferLayer {
    fn write_kernel(&self, cx: &CudaExec) -> Result<&Kernel> {
        if let Some(kernel) = self.write.get() {
            return Ok(kernel);
        }
        let made = write_kernel(cx, self.head_size, self.dtype, self.dtype)?;
        Ok(self.write.get_or_init(|| made))
    }

    /// What this layer asks of a module.
    fn want(&self, kind: Kind) -> Want<'static> {
        Want {
            kind,
            dtype: self.named,
            head_size: self.head_size,
            sliding_window: self.window.is_some(),
            soft_cap: self.soft_cap.is_some(),
            arch: None,
        }
    }

    fn fa2(&self, cx: &CudaExec) -> Result<&Module> {
        if let Some(module) = self.fa2.get() {
            return Ok(module);
        }
        let opened = open(NAME, cx, self.want(Kind::Fa2))?;
        Ok(self.fa2.get_or_init(|| opened))
    }

    /// fa3's module, where it is built.
    fn fa3(&self, cx: &CudaExec) -> Result<Option<&Module>> {
        if self.fa3.get().is_none() {
            let want = self.want(Kind::Fa3);
            let opened = if is_built(cx, want) { Some(open(NAME, cx, want)?) } else { None };
            self.fa3.get_or_init(|| opened);
        }
        Ok(self.fa3.get().and_then(Option::as_deref))
    }

    /// The module that runs a plan, where this layer has one.
    fn module(&self, cx: &CudaExec, kind: Kind) -> Result<Option<&Module>> {
        if kind == Kind::Fa3 { self.fa3(cx) } else { self.fa2(cx).map(Some) }
    }

    /// The first plan of the prefills that this layer has a module for.
    fn prefill<'a>(
        &'a self,
        cx: &CudaExec,
        metadata: &'a FlashInferMetadata,
    ) -> Result<(&'a Part, &'a Module)> {
        for part in &metadata.prefills {
            if let Some(module) = self.module(cx, part.kind)? {
                return Ok((part, module));
            }
        }
        Err(refuse(NAME, "prefills in this layer's form", &self.want(Kind::Fa2).command()))
    }

    /// The cache as the kernels see it, checked against this layer's type.
    fn cache<'a>(&self, kv: &'a KvMut<'_>) -> Result<CacheLayout<'a>> {
        let memory = cache_memory(NAME, &LAYOUTS, self.dtype, kv)?;
        Ok(cache_layout(memory, kv, self.kv_heads, self.head_size))
    }

    fn run(
        &self,
        cx: &CudaExec,
        metadata: &FlashInferMetadata,
        (part, module): (&Part, &Module),
        q: TensorRef<'_>,
        cache: &CacheLayout<'_>,
        out: &mut TensorMut<'_>,
    ) -> Result<()> {
        let window_left = self.window.map_or(-1, |w| (w - 1) as i32);
        if window_left != metadata.window_left {
            // The kernels would look for partial results where the plan has put none.
            return Err(AttentionError::Inputs(format!(
                "a layer that sees {window_left} keys before its own, with a plan for {} (-1: all)",
                metadata.window_left
            )));
        }
        let numbers = PagedNumbers {
            scale: self.scale,
            soft_cap: self.soft_cap.unwrap_or(0.0),
            window_left,
            causal: part.causal,
        };
        let rows = part.rows.clone();
        let (q, out) = (q.rows(rows.clone())?, out.reborrow().rows(rows)?);
        Ok(run(cx, module, &metadata.shape, &part.plan, &part.batch, &numbers, q, cache, out)?)
    }
}

impl AttentionImpl for FlashInferLayer {
    fn new(a: &AttentionArgs<'_>, _: &FlashInferConfig) -> Result<Self> {
        let Some(named) = module_dtype(a.dtype) else {
            return Err(refuse(NAME, format!("{} activations", a.dtype), "use bfloat16 or float16"));
        };
        if a.kv_cache_dtype != a.dtype {
            let what = format!("a KV cache of {} with {} activations", a.kv_cache_dtype, a.dtype);
            return Err(refuse(NAME, what, "use the activations' type"));
        }
        if a.head_size_v != a.head_size {
            let what = format!("value heads of {} beside key heads of {}", a.head_size_v, a.head_size);
            return Err(refuse(NAME, what, "both must be of one size"));
        }
        if a.sinks.is_some() || a.alibi_slopes.is_some() {
            return Err(refuse(NAME, "sinks and ALiBi", "choose another backend for this layer"));
        }
        positive(NAME, "a score factor of", a.scale)?;
        if let Some(cap) = a.logit_soft_cap {
            positive(NAME, "a soft cap of", cap)?;
        }
        expect_window(NAME, a.sliding_window)?;
        Ok(Self {
            heads: a.num_heads,
            kv_heads: a.num_kv_heads,
            head_size: a.head_size,
            dtype: a.dtype,
            named,
            scale: a.scale,
            window: a.sliding_window,
            soft_cap: a.logit_soft_cap,
            write: OnceLock::new(),
            fa2: OnceLock::new(),
            fa3: OnceLock::new(),
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
        let kernel = self.write_kernel(cx)?;
        Ok(write_kv(cx, kernel, x.k, x.v, (1.0, 1.0), slot_mapping, &self.cache(kv)?)?)
    }

    fn forward(
        &self,
        cx: &CudaExec,
        x: &Qkv<'_>,
        kv: &mut KvMut<'_>,
        metadata: &FlashInferMetadata,
        mut out: TensorMut<'_>,
    ) -> Result<()> {
        let shape = metadata.shape;
        if (shape.heads, shape.kv_heads, shape.head_size) != (self.heads, self.kv_heads, self.head_size) {
            return Err(AttentionError::Inputs(
                "a layer was given metadata of a group with other heads".into(),
            ));
        }
        expect_dtype("query", x.q.dtype(), self.dtype)?;
        let cache = self.cache(kv)?;
        if let Some(part) = &metadata.decodes {
            self.run(cx, metadata, (part, self.fa2(cx)?), x.q, &cache, &mut out)?;
        }
        if !metadata.prefills.is_empty() {
            let (part, module) = self.prefill(cx, metadata)?;
            self.run(cx, metadata, (part, module), x.q, &cache, &mut out)?;
        }
        if !metadata.padding.is_empty() {
            cx.fill_zero(&mut out.rows(metadata.padding.clone())?)?;
        }
        Ok(())
    }
}
