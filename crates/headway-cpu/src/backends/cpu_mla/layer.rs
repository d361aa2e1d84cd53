//! Lifetime: the model, per layer. Class 3 of 3: a layer's numbers, and the calls of the kernels.

use super::{
    CpuMlaConfig, CpuMlaMetadata,
    builder::Memory,
    rules::{LAYOUTS, NAME},
    sizes::shapes,
};
use crate::{
    CpuExec,
    backends::common::{cache_layout, has_scale, positive},
    kernels::{
        attention::{CacheLayout, LayerNumbers, Lse, Shape, attend, write_latent},
        mla::{Absorbed, Dims, expand, gather, narrow, widen},
    },
};
use headway_attention::{AttentionError, KvMut, LayerImpl, MlaArgs, MlaImpl, Result};
use headway_tensor::{DType, Linear, TensorError, TensorMut, TensorRef, View};
use std::sync::{Arc, MutexGuard};

/// One layer of `CPU_MLA`.
pub struct CpuMlaLayer {
    dims: Dims,
    shape: Shape,
    absorbed: Absorbed,
    kv_b_proj: Arc<dyn Linear>,
    dtype: DType,
    cache_dtype: DType,
    scale: f32,
    kv_scale: f32,
}

impl LayerImpl for CpuMlaLayer {
    type Exec = CpuExec;
    type Config = CpuMlaConfig;
    type Metadata = CpuMlaMetadata;
}

impl CpuMlaLayer {
    /// Bytes of the absorbed matrices beyond `kv_b_proj` itself.
    pub fn absorbed_bytes(&self) -> usize {
        self.absorbed.bytes()
    }

    /// The cache as the kernels see it, checked against this layer's type.
    fn layout(&self, kv: &KvMut<'_>) -> Result<CacheLayout> {
        cache_layout(NAME, &LAYOUTS, self.cache_dtype, kv)
    }

    /// The numbers of attention over what is stored times `scale`.
    fn numbers(&self, scale: f32) -> LayerNumbers<'static> {
        LayerNumbers {
            scale: self.scale,
            window: None,
            soft_cap: None,
            alibi_slopes: None,
            sinks: None,
            k_scale: scale,
            v_scale: scale,
        }
    }

    fn memory<'m>(&self, m: &'m CpuMlaMetadata, q: DType) -> Result<MutexGuard<'m, Memory>> {
        if m.dims != self.dims {
            return Err(AttentionError::Inputs(format!(
                "a layer of {:?} was given metadata of a group of {:?}",
                self.dims, m.dims
            )));
        }
        if q != self.dtype {
            let supported = self.dtype.name();
            return Err(TensorError::WrongDType { what: "query", found: q, supported }.into());
        }
        m.memory.lock().map_err(|_| AttentionError::Inputs("an earlier call of this group panicked".into()))
    }

    /// [`MlaImpl::forward_mqa`] that also gives the natural log of each row's softmax denominator, for whoever merges
    /// this result with another: `lse` is `[decode rows, num_heads]`.
    ///
    /// # Errors
    /// As `forward_mqa`; too little room in `lse`.
    pub fn forward_mqa_with_lse(
        &self,
        cx: &CpuExec,
        q: TensorRef<'_>,
        kv: &mut KvMut<'_>,
        m: &CpuMlaMetadata,
        out: TensorMut<'_>,
        mut lse: Option<&mut [f32]>,
    ) -> Result<()> {
        let cache = self.layout(kv)?;
        let (d, mut memory) = (&self.dims, self.memory(m, q.dtype())?);
        let Memory { slab: [queries, latents, values], decode, wide: [wide, _], .. } = &mut *memory;
        let mut out = out.heads(d.heads)?;
        let numbers = self.numbers(self.kv_scale);
        for (rows, batch) in &m.slabs {
            let n = rows.len();
            self.absorbed.queries(cx, widen(q.rows(rows.clone())?, wide)?, queries)?;
            let x = TensorRef::from_host_strided(
                queries,
                &[n, d.heads, d.latent()],
                &heads_first(n, d.latent()),
            )?;
            let y = &[n, d.heads, d.rank];
            let y = TensorMut::from_host_strided(latents, y, &heads_first(n, d.rank))?;
            let first = rows.start * d.heads;
            let lse = match &mut lse {
                None => Lse::None,
                Some(l) => Lse::Write(l.get_mut(first..first + n * d.heads).ok_or_else(|| {
                    AttentionError::Inputs("too little room for the log-sum-exp of the decodes".into())
                })?),
            };
            attend(
                (cx.pool(), cx.attention_isa()),
                batch,
                decode,
                &numbers,
                x,
                (&cache, kv.host_bytes()?),
                y,
                lse,
            )?;
            self.absorbed.values(cx, latents, n, values)?;
            let row = |token: usize, head: usize| &values[(head * n + token) * d.v..][..d.v];
            narrow(row, out.reborrow().rows(rows.clone())?)?;
        }
        let done = m.slabs.last().map_or(0, |(rows, _)| rows.end);
        let all = out.shape()[0];
        Ok(out.rows(done..all)?.zero_host()?)
    }
}

/// Strides of `[tokens, heads, width]` that lies heads first.
fn heads_first(tokens: usize, width: usize) -> [usize; 3] {
    [width, tokens * width, 1]
}

impl MlaImpl for CpuMlaLayer {
    fn new(args: &MlaArgs<'_>, _: &CpuMlaConfig) -> Result<Self> {
        let dims = Dims {
            heads: args.num_heads,
            nope: args.qk_nope_head_dim,
            rope: args.qk_rope_head_dim,
            rank: args.kv_lora_rank,
            v: args.v_head_dim,
        };
        let (shape, _) = shapes(&dims, 0, 0)?;
        let eight_bits = has_scale(NAME, args.dtype, args.kv_cache_dtype)?;
        positive(NAME, "a scale of the scores of", args.scale)?;
        positive(NAME, "a scale of the cache of", args.kv_scale)?;
        Ok(Self {
            dims,
            shape,
            absorbed: Absorbed::new(&**args.kv_b_proj, &dims)?,
            kv_b_proj: Arc::clone(args.kv_b_proj),
            dtype: args.dtype,
            cache_dtype: args.kv_cache_dtype,
            scale: args.scale,
            kv_scale: if eight_bits { args.kv_scale } else { 1.0 },
        })
    }

    fn update_kv_cache(
        &self,
        _: &CpuExec,
        latent: TensorRef<'_>,
        kv: &mut KvMut<'_>,
        slot_mapping: &View<i64>,
    ) -> Result<()> {
        let slots = slot_mapping
            .host()
            .ok_or_else(|| AttentionError::Inputs("the slot mapping is not on the host".into()))?;
        let cache = self.layout(kv)?;
        write_latent(&self.shape, (latent, self.kv_scale), slots, &cache, kv.host_bytes()?)
    }

    fn forward_mqa(
        &self,
        cx: &CpuExec,
        q: TensorRef<'_>,
        kv: &mut KvMut<'_>,
        metadata: &CpuMlaMetadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        self.forward_mqa_with_lse(cx, q, kv, metadata, out, None)
    }

    fn forward_mha(
        &self,
        cx: &CpuExec,
        q: TensorRef<'_>,
        latent: TensorRef<'_>,
        kv: &mut KvMut<'_>,
        m: &CpuMlaMetadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        let cache = self.layout(kv)?;
        let (d, mut memory) = (&self.dims, self.memory(m, q.dtype())?);
        let Memory { latents, pages, prefill, lse, wide: [wide, result], .. } = &mut *memory;
        let mut out = out.heads(d.heads)?;
        out.zero_host()?;
        let rows = m.passes.iter().map(|(p, _)| p.rows.end).max().unwrap_or(0);
        let Some(prefill) = prefill.as_ref().filter(|_| rows > 0) else { return Ok(()) };
        let q = widen(q, wide)?;
        let narrower = self.dtype != DType::F32;
        if narrower {
            result.clear();
            result.resize(rows * d.heads * d.v, 0.0);
        }
        let lse = lse.get_mut(..rows * d.heads).ok_or_else(|| {
            AttentionError::Inputs(format!("{rows} rows of prefill, more than the group was built for"))
        })?;
        lse.fill(f32::NEG_INFINITY);
        let table = m.table.host();
        let table =
            table.ok_or_else(|| AttentionError::Inputs("the block table is not on the host".into()))?;
        for (pass, batch) in &m.passes {
            let read = (&cache, &*kv.host_bytes()?, self.kv_scale);
            gather(cx.pool(), &pass.runs, d.latent(), read, (table, m.stride), latent, latents)?;
            expand(cx, &*self.kv_b_proj, latents, pass.slots, pages)?;
            let rows = pass.rows.clone();
            let of = |n: usize| rows.start * n..rows.end * n;
            let y = if narrower {
                TensorMut::from_host(&mut result[of(d.heads * d.v)], &[rows.len(), d.heads, d.v])?
            } else {
                out.reborrow().rows(rows.clone())?
            };
            let (layout, bytes) = pages.as_cache();
            let lse = Lse::Merge(&mut lse[of(d.heads)]);
            let (on, numbers) = ((cx.pool(), cx.attention_isa()), self.numbers(1.0));
            attend(on, batch, prefill, &numbers, q.rows(rows)?, (&layout, bytes), y, lse)?;
        }
        if narrower {
            let row = |token: usize, head: usize| &result[(token * d.heads + head) * d.v..][..d.v];
            narrow(row, out.rows(0..rows)?)?;
        }
        Ok(())
    }
}
