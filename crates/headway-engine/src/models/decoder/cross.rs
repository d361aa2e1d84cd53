//! Attention of a decoder to its encoder's output: keys and values come from the encoder's tokens of this step and
//! are kept; queries from the decoder's.

use super::{
    buffers::Buffers,
    kernels::{Kernels, wrong_kind},
    step::Step,
};
use crate::models::{ModelError, load::Loader, plan::CrossPlan};
use headway_attention::{AttentionArgs, AttnLayer, DynAttention, KvPool, LayerArgs, LayerKernel, Qkv};
use headway_tensor::Linear;
use std::sync::Arc;

pub(super) struct Cross {
    layer: AttnLayer,
    kernel: Box<dyn DynAttention>,
    q: Arc<dyn Linear>,
    kv: Arc<dyn Linear>,
    o: Arc<dyn Linear>,
    heads: usize,
    head_size: usize,
}

impl Cross {
    pub fn load(
        loader: &Loader<'_>,
        plan: &CrossPlan,
        layer: AttnLayer,
        kernels: &mut Kernels<'_>,
    ) -> Result<Self, ModelError> {
        let args = LayerArgs::Standard(AttentionArgs {
            layer,
            num_heads: plan.num_heads,
            num_kv_heads: plan.num_heads,
            head_size: plan.head_size,
            head_size_v: plan.head_size,
            scale: plan.scale,
            sliding_window: None,
            logit_soft_cap: None,
            alibi_slopes: None,
            sinks: None,
            dtype: kernels.activations,
            kv_cache_dtype: kernels.kv_cache_dtype,
            k_scale: 1.0,
            v_scale: 1.0,
        });
        let LayerKernel::Standard(kernel) = (kernels.make)(layer, &args)? else {
            return Err(wrong_kind(loader.checkpoint.describe(), layer, "standard attention"));
        };
        Ok(Self {
            layer,
            kernel,
            q: loader.linear(&plan.q)?,
            kv: loader.linear(&plan.kv)?,
            o: loader.linear(&plan.o)?,
            heads: plan.num_heads,
            head_size: plan.head_size,
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
        s.project_in(b, normed, &*self.q)?;
        let (width, n) = (self.heads * self.head_size, s.encoded);
        if n > 0 {
            let encoded = b.encoded.view_as(&[n, s.hidden])?;
            s.ops.linear(&*self.kv, encoded, b.encoded_kv.view_mut_as(&[n, 2 * width])?)?;
        }
        let (wide, out) = ([s.n, width], [s.n, self.heads, self.head_size]);
        let cache = &mut kv.layer(self.layer)?;
        s.kernel(self.layer, |cx, rows, entry| {
            let both = b.encoded_kv.view_as(&[n, 2 * width])?;
            let x = Qkv {
                q: b.qkv.view_as(&wide)?.rows(rows.clone())?.heads(self.heads)?,
                k: both.cols(0..width)?.heads(self.heads)?,
                v: both.cols(width..2 * width)?.heads(self.heads)?,
            };
            self.kernel.run(cx, &x, cache, entry, b.heads.view_mut_as(&out)?.rows(rows)?)
        })?;
        s.project_out(b, &*self.o, 1.0)
    }
}
