//! Lifetime: the model, per layer. Class 3 of 3: a layer's numbers, and the call of the kernels.

use super::{Mamba2Config, Mamba2Metadata, rules::refuse};
use crate::{
    CudaExec,
    kernels::state_space::{LayerKernels, MAX_CONV_KERNEL, Numbers, StateCache, StatePage, mix},
};
use headway_attention::{
    AttentionError, KvBuf, KvMut, LayerImpl, Result, StateSpaceArgs, StateSpaceImpl,
    group::arith::mamba2_dims::Mamba2Dims,
};
use headway_tensor::{DType, Device, DeviceMem, Tensor, TensorError, TensorMut, TensorRef};
use std::sync::{Arc, OnceLock};

/// One layer of `MAMBA2_ATTN`.
#[derive(Debug)]
pub struct Mamba2Layer {
    dims: Mamba2Dims,
    dtype: DType,
    /// As the model has them: the convolution's weights are `[conv_dim, conv_kernel]`.
    given: Numbers,
    numbers: OnceLock<Numbers>,
    /// Loaded at the first step, which says what types the states have.
    kernels: OnceLock<LayerKernels>,
}

impl LayerImpl for Mamba2Layer {
    type Exec = CudaExec;
    type Config = Mamba2Config;
    type Metadata = Mamba2Metadata;

    fn fill_zero(&self, cx: &CudaExec, out: &mut TensorMut<'_>) -> Result<()> {
        self.numbers(cx)?;
        Ok(cx.fill_zero(out)?)
    }
}

/// The memory of a float32 weight of this shape on a device.
fn weight(what: &'static str, w: &Tensor, shape: &[usize]) -> Result<Arc<dyn DeviceMem>> {
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
    w.device_mem().cloned().ok_or_else(|| {
        let expected = Device { kind: "cuda", index: 0 };
        TensorError::WrongDevice { what, found: w.view().device(), expected }.into()
    })
}

impl Mamba2Layer {
    /// The numbers as the kernels take them; made at the first call, which is the profile run's.
    fn numbers(&self, cx: &CudaExec) -> Result<&Numbers> {
        if let Some(n) = self.numbers.get() {
            return Ok(n);
        }
        let g = &self.given;
        let read = |mem: &Arc<dyn DeviceMem>| -> Result<Vec<f32>> {
            let mut bytes = vec![0; mem.bytes()];
            cx.read(mem, 0, &mut bytes)?;
            Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        };
        if let Some(a) = read(&g.a)?.iter().find(|a| a.is_nan() || **a > 0.0) {
            return Err(refuse(
                format!("a decay A of {a}"),
                "it must not be above 0: is A_log what the file has?",
            ));
        }
        let (by_channel, taps) = (read(&g.conv_weight)?, self.dims.conv_kernel);
        let channels = self.dims.conv_dim();
        let by_tap: Vec<f32> =
            (0..taps * channels).map(|i| by_channel[i % channels * taps + i / channels]).collect();
        let turned = Tensor::from_slice(cx, &by_tap, &[taps, channels])?;
        let conv_weight = weight("convolution weight", &turned, &[taps, channels])?;
        Ok(self.numbers.get_or_init(|| Numbers { conv_weight, ..g.clone() }))
    }

    fn kernels(&self, cx: &CudaExec, page: &StatePage) -> Result<&LayerKernels> {
        if let Some(k) = self.kernels.get() {
            return Ok(k);
        }
        if cx.batch_invariant() && ![DType::F32, self.dtype].contains(&page.conv) {
            return Err(refuse(
                format!(
                    "--batch-invariant with a convolution state of {} beside {} activations",
                    page.conv, self.dtype
                ),
                "keep that state in the activations' type, or leave the option out",
            ));
        }
        let loaded = LayerKernels::new(cx, page, self.dtype)?;
        Ok(self.kernels.get_or_init(|| loaded))
    }
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
        let another = "choose another backend for this layer";
        let dims = dims.check(MAX_CONV_KERNEL).map_err(|why| refuse(why, another))?;
        StatePage::new(dims, DType::F32, DType::F32).map_err(|why| refuse(why, another))?;
        if !matches!(args.dtype, DType::BF16 | DType::F16) {
            return Err(refuse(format!("{} activations", args.dtype), "use bfloat16 or float16"));
        }
        let (least, most) = args.time_step_limit;
        if least.is_nan() || most.is_nan() || least > most || least < 0.0 {
            return Err(refuse(
                format!("a time_step_limit from {least} to {most}"),
                "give two numbers of at least 0, the smaller first",
            ));
        }
        let (channels, heads) = (dims.conv_dim(), &[dims.heads]);
        let given = Numbers {
            conv_weight: weight("convolution weight", args.conv_weight, &[channels, dims.conv_kernel])?,
            conv_bias: args.conv_bias.map(|b| weight("convolution bias", b, &[channels])).transpose()?,
            a: weight("A", args.a, heads)?,
            d: weight("D", args.d, heads)?,
            dt_bias: weight("dt_bias", args.dt_bias, heads)?,
            dt_limit: args.time_step_limit,
        };
        Ok(Self { dims, dtype: args.dtype, given, numbers: OnceLock::new(), kernels: OnceLock::new() })
    }

    fn forward(
        &self,
        cx: &CudaExec,
        x: TensorRef<'_>,
        state: &mut KvMut<'_>,
        metadata: &Mamba2Metadata,
        out: TensorMut<'_>,
    ) -> Result<()> {
        if metadata.page.dims != self.dims {
            return Err(AttentionError::Inputs(
                "a layer was given metadata of a group of other sizes".into(),
            ));
        }
        let KvBuf::Dev(memory) = &*state.buf else {
            return Err(AttentionError::KvCache("the states are on the host, not on a CUDA device".into()));
        };
        let cache = StateCache {
            memory,
            offset: state.offset,
            block_stride: state.block_stride,
            num_blocks: state.num_blocks,
            page: metadata.page,
        };
        let (numbers, kernels) = (self.numbers(cx)?, self.kernels(cx, &metadata.page)?);
        Ok(mix(cx, kernels, &metadata.batch(), numbers, x, &cache, out)?)
    }
}
