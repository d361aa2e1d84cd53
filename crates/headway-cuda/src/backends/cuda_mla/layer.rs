//! Lifetime: the model, per layer. Class 3 of 3: a layer's numbers, and the calls of the kernels.

use super::{CudaMlaConfig, CudaMlaMetadata, rules::NAME};
use crate::{
    CudaExec,
    backends::latent::LatentLayer,
    kernels::{
        mla::{DecodeBatch, DecodeKernels, DecodeNumbers, decode},
        ops::latent::{into_latents, out_of_latents},
    },
};
use headway_attention::{AttentionError, KvMut, LayerImpl, MlaArgs, MlaImpl, Result};
use headway_tensor::{TensorMut, TensorRef, View};
use std::sync::OnceLock;

/// One layer of `CUDA_MLA`.
pub struct CudaMlaLayer {
    latent: LatentLayer,
    /// Made at the first call with metadata, which says how the group divides its work.
    decodes: OnceLock<DecodeKernels>,
}

impl LayerImpl for CudaMlaLayer {
    type Exec = CudaExec;
    type Config = CudaMlaConfig;
    type Metadata = CudaMlaMetadata;

    fn fill_zero(&self, cx: &CudaExec, out: &mut TensorMut<'_>) -> Result<()> {
        self.latent.on_device(cx)?;
        Ok(cx.fill_zero(out)?)
    }
}

impl CudaMlaLayer {
    /// The group's kernels, for its metadata.
    fn decode_kernels(&self, cx: &CudaExec, m: &CudaMlaMetadata) -> Result<&DecodeKernels> {
        let (s, l) = (&m.sizes, &self.latent);
        let wanted = (s.decode, s.planner.batch_invariant);
        if self.decodes.get().is_none() {
            let types = (l.dtype, l.cache_dtype);
            let made = DecodeKernels::new(cx, &l.dims, s.decode, types, s.planner.batch_invariant)?;
            self.decodes.get_or_init(|| made);
        }
        match self.decodes.get() {
            Some(made) if (made.form, made.chunked) == wanted => Ok(made),
            _ => Err(AttentionError::Inputs("a layer was given metadata of a group of other limits".into())),
        }
    }
}

impl MlaImpl for CudaMlaLayer {
    fn new(a: &MlaArgs<'_>, _: &CudaMlaConfig) -> Result<Self> {
        Ok(Self { latent: LatentLayer::new(NAME, a)?, decodes: OnceLock::new() })
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
        m: &CudaMlaMetadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        let l = &self.latent;
        l.expect(cx, &m.sizes.latent, q.dtype())?;
        let kernels = self.decode_kernels(cx, m)?;
        let (w, d, space) = (l.kv_b_proj()?, &l.dims, &*m.prefills.workspace);
        let batch = DecodeBatch {
            tiles: &m.tiles,
            merges: &m.merges,
            block_table: &m.prefills.block_table,
            table_stride: m.prefills.table_stride,
            query_start_loc: &m.query_start_loc,
            seq_lens: &m.seq_lens,
            tokens: m.split.decode_tokens,
            part_out: &m.parts.out,
            part_sum: &m.parts.sum,
            next: &m.parts.next,
            part_rows: m.sizes.planner.max_part_rows,
            grid: m.sizes.planner.slots,
        };
        let numbers = DecodeNumbers { scale: l.scale * l.kv_scale, v_scale: l.kv_scale };
        into_latents(cx, w, d, q, &space.q_latent)?;
        let queries = (&space.q_latent, q);
        decode(cx, kernels, d, &batch, numbers, queries, &l.cache(kv)?, &space.out_latent)?;
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
        self.latent.prefill(cx, q, latent, kv, &m.prefills, out)
    }
}
