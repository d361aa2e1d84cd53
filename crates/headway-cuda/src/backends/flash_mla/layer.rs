//! Lifetime: the model, per layer. Class 3 of 3: a layer's numbers, and the calls of the kernels.

use super::{FlashMlaConfig, FlashMlaMetadata, rules::NAME};
use crate::{
    CudaExec,
    backends::latent::LatentLayer,
    kernels::{
        flash_mla::run,
        ops::latent::{into_rows, out_of_latents},
    },
};
use headway_attention::{AttentionError, KvMut, LayerImpl, MlaArgs, MlaImpl, Result};
use headway_tensor::{TensorMut, TensorRef, View};

/// One layer of `FLASHMLA`.
pub struct FlashMlaLayer {
    latent: LatentLayer,
}

impl LayerImpl for FlashMlaLayer {
    type Exec = CudaExec;
    type Config = FlashMlaConfig;
    type Metadata = FlashMlaMetadata;

    fn fill_zero(&self, cx: &CudaExec, out: &mut TensorMut<'_>) -> Result<()> {
        self.latent.on_device(cx)?;
        Ok(cx.fill_zero(out)?)
    }
}

impl MlaImpl for FlashMlaLayer {
    fn new(a: &MlaArgs<'_>, _: &FlashMlaConfig) -> Result<Self> {
        Ok(Self { latent: LatentLayer::of_deepseek(NAME, a)? })
    }

    fn update_kv_cache(
        &self,
        cx: &CudaExec,
        latent: TensorRef<'_>,
        kv: &mut KvMut<'_>,
        slot_mapping: &View<i64>,
    ) -> Result<()> {
        self.latent.write(cx, latent, kv, slot_mapping)
    }

    fn forward_mqa(
        &self,
        cx: &CudaExec,
        q: TensorRef<'_>,
        kv: &mut KvMut<'_>,
        m: &FlashMlaMetadata,
        mut out: TensorMut<'_>,
    ) -> Result<()> {
        let l = &self.latent;
        l.expect(cx, &m.prefills.sizes, q.dtype())?;
        let Some(decodes) = &m.decodes else {
            return Err(AttentionError::Inputs("decodes of a step that was planned without".into()));
        };
        let (w, d, space) = (l.kv_b_proj()?, &l.dims, &*m.prefills.workspace);
        into_rows(cx, w, d, q, &m.space.q)?;
        let (queries, cache) = ((&m.space.q, l.dtype), l.cache(kv)?);
        let memory = (&space.out_latent, &m.space.scratch);
        run(cx, &m.module, d.heads, decodes, l.scale, queries, &cache, memory.0, memory.1)?;
        let (rows, all) = (decodes.seq_lens.len(), out.shape()[0]);
        out_of_latents(cx, w, d, &space.out_latent, out.reborrow())?;
        if rows < all {
            cx.fill_zero(&mut out.rows(rows..all)?)?;
        }
        Ok(())
    }

    fn forward_mha(
        &self,
        cx: &CudaExec,
        q: TensorRef<'_>,
        latent: TensorRef<'_>,
        kv: &mut KvMut<'_>,
        m: &FlashMlaMetadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        self.latent.prefill(cx, q, latent, kv, &m.prefills, out)
    }
}
