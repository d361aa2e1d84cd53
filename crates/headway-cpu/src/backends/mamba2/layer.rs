//! Lifetime: the model, per layer. Class 3 of 3: a layer's numbers, and the call of the kernels.

use super::{Mamba2Config, Mamba2Metadata, rules::refuse};
use crate::{
    CpuExec,
    kernels::state_space::{Batch, MAX_CONV_KERNEL, Numbers, On, StateCache, mix},
};
use headway_attention::{
    AttentionError, KvMut, LayerImpl, Result, StateSpaceArgs, StateSpaceImpl,
    group::arith::mamba2_dims::Mamba2Dims,
};
use headway_tensor::{DType, Tensor, TensorError, TensorMut, TensorRef};

/// One layer of `MAMBA2_ATTN`.
#[derive(Clone, Debug)]
pub struct Mamba2Layer {
    dims: Mamba2Dims,
    numbers: Numbers,
}

impl LayerImpl for Mamba2Layer {
    type Exec = CpuExec;
    type Config = Mamba2Config;
    type Metadata = Mamba2Metadata;
}

/// The elements of a float32 weight of this shape.
fn weight(what: &'static str, w: &Tensor, shape: &[usize]) -> Result<Vec<f32>> {
    if w.dtype() != DType::F32 {
        return Err(TensorError::WrongDType { what, found: w.dtype(), supported: "float32" }.into());
    }
    if w.shape() != shape {
        return Err(TensorError::WrongShape {
            what: what.into(),
            found: w.shape().to_vec(),
            expected: format!("{shape:?}"),
        }
        .into());
    }
    Ok(w.host::<f32>()?.to_vec())
}

impl StateSpaceImpl for Mamba2Layer {
    fn new(args: &StateSpaceArgs<'_>, _: &Mamba2Config) -> Result<Self> {
        let dims = Mamba2Dims {
            heads: args.num_heads,
            head_dim: args.head_dim,
            groups: args.n_groups,
            state: args.state_size,
            conv_kernel: args.conv_kernel,
        };
        let dims = dims
            .check(MAX_CONV_KERNEL)
            .map_err(|why| refuse(why, "choose another backend for this layer"))?;
        if args.dtype != DType::F32 {
            return Err(refuse(format!("{} activations", args.dtype), "use float32"));
        }
        let (least, most) = args.time_step_limit;
        if least.is_nan() || most.is_nan() || least > most || least < 0.0 {
            return Err(refuse(
                format!("a time_step_limit from {least} to {most}"),
                "give two numbers of at least 0, the smaller first",
            ));
        }
        let (channels, taps) = (dims.conv_dim(), dims.conv_kernel);
        let by_channel = weight("convolution weight", args.conv_weight, &[channels, taps])?;
        let mut conv_weight = vec![0.0; channels * taps];
        for (c, row) in by_channel.chunks_exact(taps).enumerate() {
            row.iter().enumerate().for_each(|(k, w)| conv_weight[k * channels + c] = *w);
        }
        let heads = &[dims.heads];
        let a = weight("A", args.a, heads)?;
        if let Some(a) = a.iter().find(|a| a.is_nan() || **a > 0.0) {
            return Err(refuse(
                format!("a decay A of {a}"),
                "it must not be above 0: is A_log what the file has?",
            ));
        }
        let numbers = Numbers {
            conv_weight,
            conv_bias: match args.conv_bias {
                Some(b) => weight("convolution bias", b, &[channels])?,
                None => vec![0.0; channels],
            },
            a,
            d: weight("D", args.d, heads)?,
            dt_bias: weight("dt_bias", args.dt_bias, heads)?,
            dt_limit: args.time_step_limit,
        };
        Ok(Self { dims, numbers })
    }

    fn forward(
        &self,
        cx: &CpuExec,
        x: TensorRef<'_>,
        state: &mut KvMut<'_>,
        metadata: &Mamba2Metadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        if *metadata.page.dims() != self.dims {
            return Err(AttentionError::Inputs(
                "a layer was given metadata of a group of other sizes".into(),
            ));
        }
        let places = StateCache {
            offset: state.offset,
            block_stride: state.block_stride,
            num_blocks: state.num_blocks,
            page: metadata.page,
        };
        let on = On { pool: cx.pool(), isa: cx.isa(), stepwise: cx.batch_invariant() };
        let batch = Batch { plan: &metadata.plan, states: &metadata.states, workspace: &metadata.workspace };
        mix(on, &batch, &self.numbers, x, (&places, state.host_bytes()?), out)
    }
}
