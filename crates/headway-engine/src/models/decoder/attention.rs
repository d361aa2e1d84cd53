//! Softmax attention: projections, norms, rotary embedding, the backend's kernel, output projection.

use super::{
    buffers::Buffers,
    kernels::{Kernels, wrong_kind},
    step::Step,
};
use crate::models::{
    ModelError, ModelPlan,
    load::{CodedInput, Loader},
    plan::AttentionPlan,
};
use headway_attention::{
    AttentionArgs, AttnLayer, DynAttention, KvPool, LayerArgs, LayerKernel, Qkv, QuantisedOut,
};
use headway_tensor::{Linear, RopeStyle, RowQuant, Tensor, TensorMut, TensorRef};
use std::{ops::Range, sync::Arc};

struct QkNorm {
    q: Tensor,
    k: Option<Tensor>,
    per_head: bool,
}

pub(super) struct Attention {
    layer: AttnLayer,
    kernel: Box<dyn DynAttention>,
    qkv: Arc<dyn Linear>,
    o: Arc<dyn Linear>,
    /// The projection takes codes; the kernel writes them itself, or they are made of its output.
    coded: Option<(CodedInput, bool)>,
    qk_norm: Option<QkNorm>,
    /// A weight of ones, where values are normed without one.
    v_norm: Option<Tensor>,
    rope: Option<(usize, RopeStyle)>,
    num_heads: usize,
    num_kv_heads: usize,
    /// Those that the layer computes: none where its cache is another layer's.
    own_kv_heads: usize,
    head_size: usize,
    output_scale: f32,
}

impl Attention {
    pub fn load(
        loader: &Loader<'_>,
        model: &ModelPlan,
        a: &AttentionPlan,
        layer: AttnLayer,
        kernels: &mut Kernels<'_>,
    ) -> Result<Self, ModelError> {
        let sinks = a.sinks.as_ref().map(|name| loader.vector(name, a.num_heads)).transpose()?;
        let args = LayerArgs::Standard(AttentionArgs {
            layer,
            num_heads: a.num_heads,
            num_kv_heads: a.num_kv_heads,
            head_size: a.head_size,
            head_size_v: a.head_size,
            scale: a.scale,
            sliding_window: a.sliding_window,
            logit_soft_cap: a.logit_soft_cap,
            alibi_slopes: None,
            sinks: sinks.as_ref(),
            dtype: kernels.activations,
            kv_cache_dtype: kernels.kv_cache_dtype,
            k_scale: 1.0,
            v_scale: 1.0,
        });
        let LayerKernel::Standard(kernel) = (kernels.make)(layer, &args)? else {
            return Err(wrong_kind(loader.checkpoint.describe(), layer, "standard attention"));
        };
        let qk_norm = match &a.qk_norm {
            None => None,
            Some(n) => {
                let width = |heads| a.head_size * if n.per_head { 1 } else { heads };
                let (q, k) = (width(a.num_heads), width(a.num_kv_heads));
                let k = n.k.as_ref().map(|norm| loader.norm(norm, k)).transpose()?;
                Some(QkNorm { q: loader.norm(&n.q, q)?, k, per_head: n.per_head })
            }
        };
        let qkv = loader.linear(&a.qkv)?;
        let (o, coded) = loader.output(&a.o)?;
        let coded = coded.map(|c| (c, (kernels.fuses)(layer, &c.quant, a.head_size)));
        Ok(Self {
            layer,
            kernel,
            qkv,
            o,
            coded,
            qk_norm,
            v_norm: a.v_norm.then(|| loader.ones(a.head_size)).transpose()?,
            own_kv_heads: if a.shares_cache_of.is_some() { 0 } else { a.num_kv_heads },
            rope: a.rope.map(|r| (r, model.ropes[r].style)),
            num_heads: a.num_heads,
            num_kv_heads: a.num_kv_heads,
            head_size: a.head_size,
            output_scale: a.output_scale,
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

    /// Elements of the fused projection's output.
    fn width(&self) -> usize {
        (self.num_heads + 2 * self.own_kv_heads) * self.head_size
    }

    /// Columns of q, k and v in the fused projection.
    fn columns(&self) -> [Range<usize>; 3] {
        let (q, kv) = (self.num_heads * self.head_size, self.own_kv_heads * self.head_size);
        [0..q, q..q + kv, q + kv..q + 2 * kv]
    }

    /// Queries, keys and values: projected, normed, rotated.
    fn project(&self, s: &Step<'_>, b: &mut Buffers, normed: bool) -> Result<(), ModelError> {
        s.project_in(b, normed, &*self.qkv)?;
        let shape = [s.n, self.width()];
        let [q, k, v] = self.columns();
        let mut norm = |cols: Range<usize>, heads: usize, w: &Tensor, per_head: bool| {
            let x = b.qkv.view_mut_as(&shape)?.cols(cols)?;
            s.ops.rms_norm_in_place(if per_head { x.heads(heads)? } else { x }, w, s.eps)
        };
        if let Some(n) = &self.qk_norm {
            norm(q, self.num_heads, &n.q, n.per_head)?;
            if let Some(w) = &n.k {
                norm(k.clone(), self.own_kv_heads, w, n.per_head)?;
            }
        }
        if let Some(w) = self.v_norm.as_ref().filter(|_| self.own_kv_heads > 0) {
            norm(v, self.own_kv_heads, w, true)?;
        }
        let Some((table, style)) = self.rope else { return Ok(()) };
        // q and k lie side by side, so one call rotates the heads of both.
        let x = b.qkv.view_mut_as(&shape)?.cols(0..k.end)?.heads(self.num_heads + self.own_kv_heads)?;
        Ok(s.ops.rope(x, s.positions, &s.ropes[table], style)?)
    }

    /// Queries, keys and values in `qkv` `[rows, width]`.
    fn split<'b>(&self, qkv: TensorRef<'b>) -> headway_tensor::Result<Qkv<'b>> {
        let [q, k, v] = self.columns();
        // A layer that reads another's cache has no rows of its own.
        let own = |cols: Range<usize>| match self.own_kv_heads {
            0 => qkv.cols(0..self.num_kv_heads * self.head_size)?.rows(0..0)?.heads(self.num_kv_heads),
            _ => qkv.cols(cols)?.heads(self.num_kv_heads),
        };
        Ok(Qkv { q: qkv.cols(q)?.heads(self.num_heads)?, k: own(k)?, v: own(v)? })
    }

    /// Cache write, kernel, output projection.
    fn attend(&self, s: &Step<'_>, b: &mut Buffers, kv: &mut KvPool) -> Result<(), ModelError> {
        let (width, heads) = ([s.n, self.width()], [s.n, self.num_heads, self.head_size]);
        let cache = &mut kv.layer(self.layer)?;
        let fused = self.coded.filter(|(_, fused)| *fused).map(|(c, _)| c.quant);
        s.kernel(self.layer, |cx, rows, entry| {
            let x = self.split(b.qkv.view_as(&width)?.rows(rows.clone())?)?;
            let Some(quant) = fused else {
                return self.kernel.run(cx, &x, cache, entry, b.heads.view_mut_as(&heads)?.rows(rows)?);
            };
            let scales = TensorMut::from_host::<f32>(&mut [], &[rows.len(), self.num_heads, 0])?;
            let out = QuantisedOut { quant, codes: b.codes.view_mut_as(&heads)?.rows(rows)?, scales };
            self.kernel.run_quantised(cx, &x, cache, entry, out)
        })?;
        let Some((CodedInput { quant, factor }, fused)) = self.coded else {
            return s.project_out(b, &*self.o, self.output_scale);
        };
        if !fused {
            let rows = [s.n, self.o.in_features()];
            s.ops.quantise_rows(&quant, b.heads.view_as(&rows)?, b.codes.view_mut_as(&rows)?)?;
        }
        s.project_codes(b, &*self.o, factor * self.output_scale)
    }

    /// How the projection's input is quantised, and whether the kernel does it.
    pub fn coded_output(&self) -> Option<(RowQuant, bool)> {
        self.coded.map(|(c, fused)| (c.quant, fused))
    }
}
