//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries (through a compression of their own, or not) and
//! the latent row that the cache keeps, rotary embedding on the parts that have a position, the backend's kernel, output
//! projection.

use super::{
    buffers::Buffers,
    kernels::{Kernels, wrong_kind},
    step::Step,
};
use crate::models::{
    ModelError, ModelPlan,
    load::Loader,
    plan::{MlaPlan, MlaQueryPlan},
};
use headway_attention::{AttnLayer, DynMla, KvPool, LayerArgs, LayerKernel, MlaArgs};
use headway_tensor::{Linear, RopeStyle, Tensor, TensorMut};
use std::{ops::Range, sync::Arc};

pub(super) struct Mla {
    layer: AttnLayer,
    kernel: Box<dyn DynMla>,
    /// Queries or their compressed form, then the latent and the part of the key that is rotated.
    down: Arc<dyn Linear>,
    /// From compressed queries to queries.
    up: Option<(Tensor, Arc<dyn Linear>)>,
    kv_norm: Tensor,
    o: Arc<dyn Linear>,
    rope: (usize, RopeStyle),
    num_heads: usize,
    nope: usize,
    rotated: usize,
    rank: usize,
}

impl Mla {
    pub fn load(
        loader: &Loader<'_>,
        model: &ModelPlan,
        a: &MlaPlan,
        layer: AttnLayer,
        kernels: &mut Kernels<'_>,
    ) -> Result<Self, ModelError> {
        let kv_b_proj = loader.linear(&a.kv_b)?;
        let args = LayerArgs::Mla(MlaArgs {
            layer,
            num_heads: a.num_heads,
            kv_lora_rank: a.kv_lora_rank,
            qk_nope_head_dim: a.qk_nope_head_dim,
            qk_rope_head_dim: a.qk_rope_head_dim,
            v_head_dim: a.v_head_dim,
            scale: a.scale,
            kv_b_proj: &kv_b_proj,
            dtype: kernels.activations,
            kv_cache_dtype: kernels.kv_cache_dtype,
            kv_scale: 1.0,
        });
        let LayerKernel::Mla(kernel) = (kernels.make)(layer, &args)? else {
            return Err(wrong_kind(loader.checkpoint.describe(), layer, "latent attention"));
        };
        let up = match &a.q {
            MlaQueryPlan::Direct => None,
            MlaQueryPlan::Compressed { norm, up } => {
                Some((loader.norm(norm, up.in_features)?, loader.linear(up)?))
            }
        };
        Ok(Self {
            layer,
            kernel,
            down: loader.linear(&a.down)?,
            up,
            kv_norm: loader.norm(&a.kv_norm, a.kv_lora_rank)?,
            o: loader.linear(&a.o)?,
            rope: (a.rope, model.ropes[a.rope].style),
            num_heads: a.num_heads,
            nope: a.qk_nope_head_dim,
            rotated: a.qk_rope_head_dim,
            rank: a.kv_lora_rank,
        })
    }

    /// From the layer's input to `mixed`.
    pub fn run(
        &self,
        s: &Step<'_>,
        b: &mut Buffers,
        normed: bool,
        kv: &mut KvPool,
    ) -> Result<(), ModelError> {
        self.project(s, b, normed)?;
        self.attend(s, b, kv)
    }

    fn head(&self) -> usize {
        self.nope + self.rotated
    }

    /// Columns of the first projection: queries in either form, latent, rotated part.
    fn columns(&self) -> [Range<usize>; 3] {
        let end = self.down.out_features();
        let rotated = end - self.rotated;
        [0..rotated - self.rank, rotated - self.rank..rotated, rotated..end]
    }

    /// Queries and latent rows: projected, normed, rotated.
    fn project(&self, s: &Step<'_>, b: &mut Buffers, normed: bool) -> Result<(), ModelError> {
        s.project_in(b, normed, &*self.down)?;
        let (shape, queries) = ([s.n, self.down.out_features()], [s.n, self.num_heads * self.head()]);
        let [q, latent, rotated] = self.columns();
        s.ops.rms_norm_in_place(b.qkv.view_mut_as(&shape)?.cols(latent)?, &self.kv_norm, s.eps)?;
        self.rotate(s, b.qkv.view_mut_as(&shape)?.cols(rotated)?.heads(1)?)?;
        if let Some((norm, up)) = &self.up {
            s.ops.rms_norm_in_place(b.qkv.view_mut_as(&shape)?.cols(q.clone())?, norm, s.eps)?;
            s.ops.linear(&**up, b.qkv.view_as(&shape)?.cols(q)?, b.queries.view_mut_as(&queries)?)?;
            let heads = b.queries.view_mut_as(&queries)?.heads(self.num_heads)?;
            return self.rotate(s, heads.within_heads(self.nope..self.head())?);
        }
        let heads = b.qkv.view_mut_as(&shape)?.cols(q)?.heads(self.num_heads)?;
        self.rotate(s, heads.within_heads(self.nope..self.head())?)
    }

    fn rotate(&self, s: &Step<'_>, x: TensorMut<'_>) -> Result<(), ModelError> {
        let (table, style) = self.rope;
        Ok(s.ops.rope(x, s.positions, &s.ropes[table], style)?)
    }

    /// Cache write, kernel, output projection.
    fn attend(&self, s: &Step<'_>, b: &mut Buffers, kv: &mut KvPool) -> Result<(), ModelError> {
        let (width, queries) = ([s.n, self.down.out_features()], [s.n, self.num_heads * self.head()]);
        let (out, cache) = ([s.n, self.o.in_features()], &mut kv.layer(self.layer)?);
        let [q, latent, rotated] = self.columns();
        s.kernel(self.layer, |cx, rows, entry| {
            let down = b.qkv.view_as(&width)?.rows(rows.clone())?;
            let q = match &self.up {
                Some(_) => b.queries.view_as(&queries)?.rows(rows.clone())?,
                None => down.cols(q.clone())?,
            };
            let (q, latent) = (q.heads(self.num_heads)?, down.cols(latent.start..rotated.end)?);
            self.kernel.run(cx, q, latent, cache, entry, b.heads.view_mut_as(&out)?.rows(rows)?)
        })?;
        s.project_out(b, &*self.o, 1.0)
    }
}
