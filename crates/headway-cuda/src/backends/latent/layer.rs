//! Lifetime: the model, per layer. A layer's numbers, its cache, and everything but its decodes.

use super::{LAYOUTS, LatentSizes, PrefillWork};
use crate::{
    CudaExec, CudaLinear,
    backends::common::{cache_memory, expect_dtype, positive, refuse},
    kernels::{
        Kernel,
        mla::{
            DEEPSEEK, Dims, LatentCache, PrefillForm, PrefillPass, gather, gather_kernel, prefill,
            prefill_kernel, write_latent, write_latent_kernel,
        },
        ops::latent::{check, expand},
    },
};
use headway_attention::{AttentionError, KvMut, MlaArgs, Result};
use headway_tensor::{DType, Linear, TensorMut, TensorRef, View};
use std::{
    any::Any,
    sync::{Arc, OnceLock},
};

/// What every layer of latent attention is, whoever decodes.
pub(in crate::backends) struct LatentLayer {
    pub dims: Dims,
    pub dtype: DType,
    pub cache_dtype: DType,
    pub scale: f32,
    /// Factor that turns stored latents into latents: 1 but for 8 bits.
    pub kv_scale: f32,
    backend: &'static str,
    kv_b_proj: Arc<dyn Linear>,
    /// Those that write the cache and gather from it; made at the first call, which is the profile run's.
    on_device: OnceLock<[Arc<Kernel>; 2]>,
    /// Made at the first call with metadata, which says how the group divides its work.
    of_group: OnceLock<(PrefillForm, Arc<Kernel>)>,
}

fn cuda_linear<'a>(backend: &str, w: &'a dyn Linear) -> Result<&'a CudaLinear> {
    (w as &dyn Any).downcast_ref().ok_or_else(|| {
        refuse(backend, "a kv_b_proj that was loaded for another device", "load the model for this one")
    })
}

impl LatentLayer {
    /// A layer whose decodes are another project's kernels: DeepSeek's latents, in the activations' type.
    ///
    /// # Errors
    /// Other latents or types; as [`LatentLayer::new`].
    pub fn of_deepseek(backend: &'static str, a: &MlaArgs<'_>) -> Result<Self> {
        if (a.kv_lora_rank, a.qk_rope_head_dim) != DEEPSEEK {
            let what = format!("latents of {} + {}", a.kv_lora_rank, a.qk_rope_head_dim);
            return Err(refuse(backend, what, "choose another backend for this layer"));
        }
        if a.kv_cache_dtype != a.dtype {
            let what = format!("a KV cache of {} with {} activations", a.kv_cache_dtype, a.dtype);
            return Err(refuse(backend, what, "use the activations' type"));
        }
        Self::new(backend, a)
    }

    /// A layer of a backend.
    ///
    /// # Errors
    /// Sizes and types that the kernels don't take, in the backend's name.
    pub fn new(backend: &'static str, a: &MlaArgs<'_>) -> Result<Self> {
        let dims = Dims {
            heads: a.num_heads,
            nope: a.qk_nope_head_dim,
            rope: a.qk_rope_head_dim,
            rank: a.kv_lora_rank,
            v: a.v_head_dim,
        };
        if let Some(what) = dims.refusal() {
            return Err(refuse(backend, what, "choose another backend for this layer"));
        }
        if !matches!(a.dtype, DType::BF16 | DType::F16) {
            return Err(refuse(backend, format!("{} activations", a.dtype), "use bfloat16 or float16"));
        }
        let eight_bits = matches!(a.kv_cache_dtype, DType::F8E4M3 | DType::F8E5M2);
        if !eight_bits && a.kv_cache_dtype != a.dtype {
            let what = format!("a KV cache of {} with {} activations", a.kv_cache_dtype, a.dtype);
            return Err(refuse(backend, what, "use the activations' type or an 8-bit float"));
        }
        positive(backend, "a scale of the scores of", a.scale)?;
        positive(backend, "a scale of the cache of", a.kv_scale)?;
        check(cuda_linear(backend, &**a.kv_b_proj)?, &dims, a.dtype)?;
        Ok(Self {
            dims,
            dtype: a.dtype,
            cache_dtype: a.kv_cache_dtype,
            scale: a.scale,
            kv_scale: if eight_bits { a.kv_scale } else { 1.0 },
            backend,
            kv_b_proj: Arc::clone(a.kv_b_proj),
            on_device: OnceLock::new(),
            of_group: OnceLock::new(),
        })
    }

    /// The projection out of the latent space.
    pub fn kv_b_proj(&self) -> Result<&CudaLinear> {
        cuda_linear(self.backend, &*self.kv_b_proj)
    }

    /// The kernels that write the cache and gather from it.
    pub fn on_device(&self, cx: &CudaExec) -> Result<&[Arc<Kernel>; 2]> {
        if let Some(made) = self.on_device.get() {
            return Ok(made);
        }
        let made = [
            write_latent_kernel(cx, self.dims.latent(), self.dtype, self.cache_dtype)?,
            gather_kernel(cx, &self.dims, self.dtype, self.cache_dtype)?,
        ];
        Ok(self.on_device.get_or_init(|| made))
    }

    /// Refuses metadata of another group, and queries of another type. Compiles the prefills' kernel with the first
    /// metadata of the group, of whatever batch: start-up's first step is of decodes.
    pub fn expect(&self, cx: &CudaExec, sizes: &LatentSizes, q: DType) -> Result<()> {
        if sizes.dims != self.dims {
            return Err(AttentionError::Inputs(format!(
                "a layer of {:?} was given metadata of a group of {:?}",
                self.dims, sizes.dims
            )));
        }
        expect_dtype("query", q, self.dtype)?;
        self.prefill_kernel(cx, sizes.prefill).map(drop)
    }

    /// The cache as the kernels see it, checked against this layer's type.
    pub fn cache<'a>(&self, kv: &'a KvMut<'_>) -> Result<LatentCache<'a>> {
        let memory = cache_memory(self.backend, &LAYOUTS, self.cache_dtype, kv)?;
        Ok(LatentCache {
            memory,
            offset: kv.offset,
            block_stride: kv.block_stride,
            num_blocks: kv.num_blocks,
            block_size: kv.block_size,
            width: self.dims.latent(),
            dtype: kv.dtype,
        })
    }

    /// As [`headway_attention::MlaImpl::update_kv_cache`].
    pub fn write(
        &self,
        cx: &CudaExec,
        latent: TensorRef<'_>,
        kv: &KvMut<'_>,
        slot_mapping: &View<i64>,
    ) -> Result<()> {
        if kv.shared {
            return Err(AttentionError::KvCache(
                "a layer that shares another's cache must not write it".into(),
            ));
        }
        expect_dtype("latent", latent.dtype(), self.dtype)?;
        let [write, _] = self.on_device(cx)?;
        Ok(write_latent(cx, write, latent, self.kv_scale, slot_mapping, &self.cache(kv)?)?)
    }

    /// The kernel of prefills, for a group's metadata.
    fn prefill_kernel(&self, cx: &CudaExec, form: PrefillForm) -> Result<&Kernel> {
        if self.of_group.get().is_none() {
            let made = (form, prefill_kernel(cx, &self.dims, form, self.dtype)?);
            self.of_group.get_or_init(|| made);
        }
        match self.of_group.get() {
            Some((made, kernel)) if *made == form => Ok(kernel),
            _ => Err(AttentionError::Inputs("a layer was given metadata of a group of other limits".into())),
        }
    }

    /// As [`headway_attention::MlaImpl::forward_mha`].
    pub fn prefill(
        &self,
        cx: &CudaExec,
        q: TensorRef<'_>,
        latent: TensorRef<'_>,
        kv: &KvMut<'_>,
        work: &PrefillWork,
        out: TensorMut<'_>,
    ) -> Result<()> {
        self.expect(cx, &work.sizes, q.dtype())?;
        expect_dtype("latent", latent.dtype(), self.dtype)?;
        let form = work.sizes.prefill;
        let kernel = self.prefill_kernel(cx, form)?;
        let [_, gather_run] = self.on_device(cx)?;
        let (w, d, space) = (self.kv_b_proj()?, &self.dims, &*work.workspace);
        let cache = self.cache(kv)?;
        let (all, live) = (out.shape()[0], work.rows);
        let mut out = out.heads(d.heads)?;
        for pass in &work.passes {
            let runs = (&pass.runs, pass.longest, pass.slots);
            let table = (&work.block_table, work.table_stride);
            gather(cx, gather_run, runs, (&cache, self.kv_scale), table, latent, &space.latents)?;
            expand(cx, w, d, &space.latents, pass.slots, &space.expanded)?;
            let keys = PrefillPass {
                tiles: &pass.tiles,
                slots: pass.slots,
                latents: &space.latents,
                expanded: &space.expanded,
                lse: &space.lse,
            };
            let (q, out) = (q.rows(0..live)?, out.reborrow().rows(0..live)?);
            prefill(cx, kernel, (d, form), &keys, self.scale, q, out)?;
        }
        Ok(cx.fill_zero(&mut out.rows(live..all)?)?)
    }
}
