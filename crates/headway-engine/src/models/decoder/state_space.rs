//! A Mamba-2 mixer: projection, the backend's convolution and scan, gated norm, output projection.

use super::{
    buffers::Buffers,
    kernels::{Kernels, wrong_kind},
    step::Step,
};
use crate::models::{ModelError, load::Loader, plan::StateSpacePlan};
use headway_attention::{AttnLayer, DynStateSpace, KvPool, LayerArgs, LayerKernel, StateSpaceArgs};
use headway_tensor::{GatedNorm, Linear, Tensor};
use std::{ops::Range, sync::Arc};

pub(super) struct StateSpace {
    layer: AttnLayer,
    kernel: Box<dyn DynStateSpace>,
    in_proj: Arc<dyn Linear>,
    out_proj: Arc<dyn Linear>,
    norm: Option<Norm>,
    /// Columns of the projected input with another factor than 1.
    scales: Vec<(Range<usize>, f32)>,
    /// Elements of a token between scan and output projection.
    inner: usize,
    output_scale: f32,
}

struct Norm {
    weight: Tensor,
    groups: usize,
    before_gate: bool,
}

impl StateSpace {
    pub fn load(
        loader: &Loader<'_>,
        m: &StateSpacePlan,
        layer: AttnLayer,
        kernels: &mut Kernels<'_>,
    ) -> Result<Self, ModelError> {
        let (channels, taps, heads) = (m.conv_dim(), m.conv_kernel, [m.num_heads]);
        let conv_weight = loader.values(&m.conv_weight, &[channels, 1, taps])?;
        let conv_weight = Tensor::from_slice(loader.ops, &conv_weight, &[channels, taps])?;
        let tensor = |name: &str, shape: &[usize], f: fn(f32) -> f32| {
            let values: Vec<f32> = loader.values(name, shape)?.into_iter().map(f).collect();
            Ok::<_, ModelError>(Tensor::from_slice(loader.ops, &values, shape)?)
        };
        let conv_bias = m.conv_bias.as_ref().map(|b| tensor(b, &[channels], |x| x)).transpose()?;
        let (a, d, dt_bias) = (
            tensor(&m.a_log, &heads, |x| -x.exp())?,
            tensor(&m.d, &heads, |x| x)?,
            tensor(&m.dt_bias, &heads, |x| x)?,
        );
        let args = LayerArgs::StateSpace(StateSpaceArgs {
            layer,
            num_heads: m.num_heads,
            head_dim: m.head_dim,
            n_groups: m.groups,
            state_size: m.state_size,
            conv_kernel: taps,
            chunk_size: m.chunk_size,
            conv_weight: &conv_weight,
            conv_bias: conv_bias.as_ref(),
            a: &a,
            d: &d,
            dt_bias: &dt_bias,
            time_step_limit: m.time_step_limit,
            dtype: kernels.activations,
        });
        let LayerKernel::StateSpace(kernel) = (kernels.make)(layer, &args)? else {
            return Err(wrong_kind(loader.checkpoint.describe(), layer, "a state-space mixer"));
        };
        let norm = |n: &crate::models::plan::GatedNormPlan| {
            let weight = loader.norm(&n.norm, m.inner())?;
            Ok::<_, ModelError>(Norm { weight, groups: n.groups, before_gate: n.before_gate })
        };
        Ok(Self {
            layer,
            kernel,
            in_proj: loader.linear(&m.in_proj)?,
            out_proj: loader.linear(&m.out_proj)?,
            norm: m.norm.as_ref().map(norm).transpose()?,
            scales: scales(m),
            inner: m.inner(),
            output_scale: m.output_scale,
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
        s.project_in(b, normed, &*self.in_proj)?;
        let wide = [s.n, self.in_proj.out_features()];
        for (cols, factor) in &self.scales {
            s.ops.scale_and_cap(b.qkv.view_mut_as(&wide)?.cols(cols.clone())?, *factor, None)?;
        }
        let (inner, state) = ([s.n, self.inner], &mut kv.layer(self.layer)?);
        s.kernel(self.layer, |cx, rows, entry| {
            let x = b.qkv.view_as(&wide)?.rows(rows.clone())?.cols(self.inner..wide[1])?;
            self.kernel.run(cx, x, state, entry, b.heads.view_mut_as(&inner)?.rows(rows)?)
        })?;
        let gate = b.qkv.view_as(&wide)?.cols(0..self.inner)?;
        let norm = match &self.norm {
            None => GatedNorm::None,
            Some(n) => {
                GatedNorm::Rms { weight: &n.weight, groups: n.groups, eps: s.eps, before_gate: n.before_gate }
            }
        };
        s.ops.gated_norm(b.heads.view_mut_as(&inner)?, gate, norm)?;
        s.project_out(b, &*self.out_proj, self.output_scale)
    }
}

/// The parts of the projected input that are scaled; neighbours with one factor are one part.
fn scales(m: &StateSpacePlan) -> Vec<(Range<usize>, f32)> {
    let shared = m.groups * m.state_size;
    let mut parts: Vec<(Range<usize>, f32)> = vec![];
    let mut from = 0;
    for (width, factor) in [m.inner(), m.inner(), shared, shared, m.num_heads].into_iter().zip(m.in_scales) {
        match parts.last_mut().filter(|p| p.1 == factor) {
            Some(p) => p.0.end += width,
            None => parts.push((from..from + width, factor)),
        }
        from += width;
    }
    parts.retain(|p| p.1 != 1.0);
    parts
}
