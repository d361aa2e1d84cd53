//! Lifetime: the model, per layer. Class 3 of 3: a layer's numbers, and the calls of the kernels.

use super::{TritonMlaConfig, TritonMlaMetadata, rules::NAME};
use crate::{
    CudaExec,
    backends::{latent::LatentLayer, triton::load},
    kernels::{
        ops::latent::{into_latents, out_of_latents},
        triton::{LatentBatch, LatentKernels, decode},
    },
    modules::{
        module_dtype,
        triton::{TritonWant, WantOf},
    },
};
use headway_attention::{KvMut, LayerImpl, MlaArgs, MlaImpl, Result};
use headway_tensor::{TensorMut, TensorRef, View};
use std::sync::OnceLock;

/// One layer of `TRITON_MLA`.
pub struct TritonMlaLayer {
    latent: LatentLayer,
    /// Made at the first call, which is the profile run's.
    decodes: OnceLock<LatentKernels>,
}

impl LayerImpl for TritonMlaLayer {
    type Exec = CudaExec;
    type Config = TritonMlaConfig;
    type Metadata = TritonMlaMetadata;

    fn fill_zero(&self, cx: &CudaExec, out: &mut TensorMut<'_>) -> Result<()> {
        self.latent.on_device(cx)?;
        self.decode_kernels(cx)?;
        Ok(cx.fill_zero(out)?)
    }
}

impl TritonMlaLayer {
    fn decode_kernels(&self, cx: &CudaExec) -> Result<&LatentKernels> {
        if let Some(made) = self.decodes.get() {
            return Ok(made);
        }
        let dtype = module_dtype(self.latent.dtype).unwrap_or_default();
        let want = TritonWant { dtype, of: WantOf::Latent, arch: None };
        let made = load(NAME, cx, want, LatentKernels::load)?;
        Ok(self.decodes.get_or_init(|| made))
    }
}

impl MlaImpl for TritonMlaLayer {
    fn new(a: &MlaArgs<'_>, _: &TritonMlaConfig) -> Result<Self> {
        Ok(Self { latent: LatentLayer::of_deepseek(NAME, a)?, decodes: OnceLock::new() })
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
        m: &TritonMlaMetadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        let l = &self.latent;
        l.expect(cx, &m.prefills.sizes, q.dtype())?;
        let kernels = self.decode_kernels(cx)?;
        let (w, d, space) = (l.kv_b_proj()?, &l.dims, &*m.prefills.workspace);
        let batch = LatentBatch {
            block_table: &m.prefills.block_table,
            table_stride: m.prefills.table_stride,
            query_start_loc: &m.query_start_loc,
            seq_lens: &m.seq_lens,
            num_reqs: m.num_reqs,
            num_tokens: m.split.decode_tokens,
            plan: m.plan,
            part_rows: m.parts.rows,
            part_out: &m.parts.out,
            part_sums: &m.parts.sums,
        };
        into_latents(cx, w, d, q, &space.q_latent)?;
        decode(cx, kernels, d, &batch, l.scale, (&space.q_latent, q), &l.cache(kv)?, &space.out_latent)?;
        Ok(out_of_latents(cx, w, d, &space.out_latent, out)?)
    }

    fn forward_mha(
        &self,
        cx: &CudaExec,
        q: TensorRef<'_>,
        latent: TensorRef<'_>,
        kv: &mut KvMut<'_>,
        m: &TritonMlaMetadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        self.latent.prefill(cx, q, latent, kv, &m.prefills, out)
    }
}
