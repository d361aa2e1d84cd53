//! Lifetime: the model, per layer. Class 3 of 3: a layer's numbers, and the calls of the kernels.

use super::{
    CudaMlaConfig, CudaMlaMetadata,
    rules::{LAYOUTS, NAME},
};
use crate::{
    CudaExec, CudaLinear,
    backends::common::{cache_memory, expect_dtype, positive, refuse},
    kernels::{
        Kernel,
        mla::{
            DecodeBatch, DecodeKernels, DecodeNumbers, Dims, LatentCache, PrefillForm, PrefillPass, decode,
            gather, gather_kernel, prefill, prefill_kernel, write_latent, write_latent_kernel,
        },
        ops::latent::{check, expand, into_latents, out_of_latents},
    },
};
use headway_attention::{AttentionError, KvMut, LayerImpl, MlaArgs, MlaImpl, Result};
use headway_tensor::{DType, Linear, TensorMut, TensorRef, View};
use std::{
    any::Any,
    sync::{Arc, OnceLock},
};

/// One layer of `CUDA_MLA`.
pub struct CudaMlaLayer {
    dims: Dims,
    kv_b_proj: Arc<dyn Linear>,
    dtype: DType,
    cache_dtype: DType,
    scale: f32,
    kv_scale: f32,
    /// Made at the first call, which is the profile run's.
    on_device: OnceLock<[Arc<Kernel>; 2]>,
    /// Made at the first call with metadata, which says how the group divides its work.
    of_group: OnceLock<(DecodeKernels, PrefillForm, Arc<Kernel>)>,
}

fn cuda_linear(w: &dyn Linear) -> Result<&CudaLinear> {
    (w as &dyn Any).downcast_ref().ok_or_else(|| {
        refuse(NAME, "a kv_b_proj that was loaded for another device", "load the model for this one")
    })
}

impl LayerImpl for CudaMlaLayer {
    type Exec = CudaExec;
    type Config = CudaMlaConfig;
    type Metadata = CudaMlaMetadata;

    fn fill_zero(&self, cx: &CudaExec, out: &mut TensorMut<'_>) -> Result<()> {
        self.on_device(cx)?;
        Ok(cx.fill_zero(out)?)
    }
}

impl CudaMlaLayer {
    /// The kernels that write the cache and gather from it.
    fn on_device(&self, cx: &CudaExec) -> Result<&[Arc<Kernel>; 2]> {
        if let Some(made) = self.on_device.get() {
            return Ok(made);
        }
        let made = [
            write_latent_kernel(cx, self.dims.latent(), self.dtype, self.cache_dtype)?,
            gather_kernel(cx, &self.dims, self.dtype, self.cache_dtype)?,
        ];
        Ok(self.on_device.get_or_init(|| made))
    }

    /// The group's kernels, for its metadata.
    fn of_group(
        &self,
        cx: &CudaExec,
        m: &CudaMlaMetadata,
        q: DType,
    ) -> Result<&(DecodeKernels, PrefillForm, Arc<Kernel>)> {
        if m.sizes.dims != self.dims {
            return Err(AttentionError::Inputs(format!(
                "a layer of {:?} was given metadata of a group of {:?}",
                self.dims, m.sizes.dims
            )));
        }
        expect_dtype("query", q, self.dtype)?;
        let s = &m.sizes;
        let wanted = (s.decode, s.planner.batch_invariant, s.prefill);
        if self.of_group.get().is_none() {
            let types = (self.dtype, self.cache_dtype);
            let decodes = DecodeKernels::new(cx, &self.dims, s.decode, types, s.planner.batch_invariant)?;
            let made = (decodes, s.prefill, prefill_kernel(cx, &self.dims, s.prefill, self.dtype)?);
            self.of_group.get_or_init(|| made);
        }
        match self.of_group.get() {
            Some(made) if (made.0.form, made.0.chunked, made.1) == wanted => Ok(made),
            _ => Err(AttentionError::Inputs("a layer was given metadata of a group of other limits".into())),
        }
    }

    /// The cache as the kernels see it, checked against this layer's type.
    fn cache<'a>(&self, kv: &'a KvMut<'_>) -> Result<LatentCache<'a>> {
        let memory = cache_memory(NAME, &LAYOUTS, self.cache_dtype, kv)?;
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
}

impl MlaImpl for CudaMlaLayer {
    fn new(a: &MlaArgs<'_>, _: &CudaMlaConfig) -> Result<Self> {
        let dims = Dims {
            heads: a.num_heads,
            nope: a.qk_nope_head_dim,
            rope: a.qk_rope_head_dim,
            rank: a.kv_lora_rank,
            v: a.v_head_dim,
        };
        if let Some(what) = dims.refusal() {
            return Err(refuse(NAME, what, "choose another backend for this layer"));
        }
        if !matches!(a.dtype, DType::BF16 | DType::F16) {
            return Err(refuse(NAME, format!("{} activations", a.dtype), "use bfloat16 or float16"));
        }
        let eight_bits = matches!(a.kv_cache_dtype, DType::F8E4M3 | DType::F8E5M2);
        if !eight_bits && a.kv_cache_dtype != a.dtype {
            let what = format!("a KV cache of {} with {} activations", a.kv_cache_dtype, a.dtype);
            return Err(refuse(NAME, what, "use the activations' type or an 8-bit float"));
        }
        positive(NAME, "a scale of the scores of", a.scale)?;
        positive(NAME, "a scale of the cache of", a.kv_scale)?;
        check(cuda_linear(&**a.kv_b_proj)?, &dims, a.dtype)?;
        Ok(Self {
            dims,
            kv_b_proj: Arc::clone(a.kv_b_proj),
            dtype: a.dtype,
            cache_dtype: a.kv_cache_dtype,
            scale: a.scale,
            kv_scale: if eight_bits { a.kv_scale } else { 1.0 },
            on_device: OnceLock::new(),
            of_group: OnceLock::new(),
        })
    }

    fn update_kv_cache(
        &self,
        cx: &CudaExec,
        latent: TensorRef<'_>,
        kv: &mut KvMut<'_>,
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

    fn forward_mqa(
        &self,
        cx: &CudaExec,
        q: TensorRef<'_>,
        kv: &mut KvMut<'_>,
        m: &CudaMlaMetadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        let (kernels, ..) = self.of_group(cx, m, q.dtype())?;
        let (w, d, space) = (cuda_linear(&*self.kv_b_proj)?, &self.dims, &*m.workspace);
        let batch = DecodeBatch {
            tiles: &m.tiles,
            merges: &m.merges,
            block_table: &m.block_table,
            table_stride: m.table_stride,
            query_start_loc: &m.query_start_loc,
            seq_lens: &m.seq_lens,
            tokens: m.split.decode_tokens,
            part_out: &space.part_out,
            part_sum: &space.part_sum,
            next: &space.next,
            part_rows: m.sizes.planner.max_part_rows,
            grid: m.sizes.planner.slots,
        };
        let numbers = DecodeNumbers { scale: self.scale * self.kv_scale, v_scale: self.kv_scale };
        into_latents(cx, w, d, q, &space.q_latent)?;
        let queries = (&space.q_latent, q);
        decode(cx, kernels, d, &batch, numbers, queries, &self.cache(kv)?, &space.out_latent)?;
        Ok(out_of_latents(cx, w, d, &space.out_latent, out)?)
    }

    fn forward_mha(
        &self,
        cx: &CudaExec,
        q: TensorRef<'_>,
        latent: TensorRef<'_>,
        kv: &mut KvMut<'_>,
        m: &CudaMlaMetadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        let (_, form, kernel) = self.of_group(cx, m, q.dtype())?;
        expect_dtype("latent", latent.dtype(), self.dtype)?;
        let [_, gather_run] = self.on_device(cx)?;
        let (w, d, space) = (cuda_linear(&*self.kv_b_proj)?, &self.dims, &*m.workspace);
        let cache = self.cache(kv)?;
        let (all, live) = (out.shape()[0], m.prefill_rows);
        let mut out = out.heads(d.heads)?;
        for pass in &m.passes {
            let runs = (&pass.runs, pass.longest, pass.slots);
            let table = (&m.block_table, m.table_stride);
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
            prefill(cx, kernel, (d, *form), &keys, self.scale, q, out)?;
        }
        Ok(cx.fill_zero(&mut out.rows(live..all)?)?)
    }
}
