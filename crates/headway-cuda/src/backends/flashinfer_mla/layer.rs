//! Lifetime: the model, per layer. Class 3 of 3: a layer's numbers, and the calls of the kernels.

use super::{FlashInferMlaConfig, FlashInferMlaMetadata, rules::NAME};
use crate::{
    CudaExec,
    backends::latent::LatentLayer,
    kernels::{
        flashinfer::run_latent,
        ops::latent::{into_latents, out_of_latents},
    },
};
use headway_attention::{AttentionError, KvMut, LayerImpl, MlaArgs, MlaImpl, Result};
use headway_tensor::{TensorMut, TensorRef, View};

/// One layer of `FLASHINFER_MLA`.
pub struct FlashInferMlaLayer {
    latent: LatentLayer,
}

impl LayerImpl for FlashInferMlaLayer {
    type Exec = CudaExec;
    type Config = FlashInferMlaConfig;
    type Metadata = FlashInferMlaMetadata;

    fn fill_zero(&self, cx: &CudaExec, out: &mut TensorMut<'_>) -> Result<()> {
        self.latent.on_device(cx)?;
        Ok(cx.fill_zero(out)?)
    }
}

impl MlaImpl for FlashInferMlaLayer {
    fn new(a: &MlaArgs<'_>, _: &FlashInferMlaConfig) -> Result<Self> {
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
        m: &FlashInferMlaMetadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        let l = &self.latent;
        l.expect(cx, &m.prefills.sizes, q.dtype())?;
        let Some(decodes) = &m.decodes else {
            return Err(AttentionError::Inputs("decodes of a step that was planned without".into()));
        };
        let (w, d, space) = (l.kv_b_proj()?, &l.dims, &*m.prefills.workspace);
        into_latents(cx, w, d, q, &space.q_latent)?;
        let (module, queries, cache) = (&decodes.module, (&space.q_latent, q), l.cache(kv)?);
        let of = (&m.shape, &decodes.plan, &decodes.batch);
        run_latent(cx, module, of, l.scale, queries, &cache, &space.out_latent)?;
        Ok(out_of_latents(cx, w, d, &space.out_latent, out)?)
    }

    fn forward_mha(
        &self,
        cx: &CudaExec,
        q: TensorRef<'_>,
        latent: TensorRef<'_>,
        kv: &mut KvMut<'_>,
        m: &FlashInferMlaMetadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        self.latent.prefill(cx, q, latent, kv, &m.prefills, out)
    }
}
