//! The operations that models call, one trait with an implementation a device. Outputs belong to
//! the caller, so a step allocates nothing and can be captured. Attention is not among them: that
//! is what `headway-attention` is for.

use crate::{
    DType, Exec, ExpertBuffers, ExpertLimits, Experts, ExpertsSpec, Result, RowQuant, RowSampler, Tensor,
    TensorError, TensorMut, TensorRef, View, weight::Weight,
};
use std::{any::Any, sync::Arc};

/// How rotary positions pair the elements of a head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RopeStyle {
    /// Element i with element i + r/2 (GPT-NeoX; Hugging Face checkpoints).
    Halves,
    /// Element 2i with element 2i + 1 (the original RoPE; GGUF files of the `llama` architecture).
    Interleaved,
}

/// The activation of a feed-forward.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Activation {
    /// x · sigmoid(x).
    Silu,
    /// GELU by its tanh approximation.
    GeluTanh,
    /// GELU by the error function.
    Gelu,
    /// gpt-oss: with g = min(gate, limit) and u = up held to ±limit, `g · sigmoid(alpha · g) · (u + 1)`.
    ClampedSwiglu {
        /// Factor in the sigmoid.
        alpha: f32,
        /// Bound of gate and up.
        limit: f32,
    },
    /// max(x, 0)².
    Relu2,
}

/// How a mixer's output is gated: `x · silu(gate)`, normed before or after it or not at all.
#[derive(Clone, Copy, Debug)]
pub enum GatedNorm<'a> {
    /// The gate alone.
    None,
    /// A root-mean-square norm over each of `groups` equal parts of a row, times `weight` `[width]`.
    Rms {
        /// Over all parts.
        weight: &'a Tensor,
        /// Parts of a row.
        groups: usize,
        /// Added to the mean square.
        eps: f32,
        /// The norm comes first, then the gate.
        before_gate: bool,
    },
}

/// One weight of a linear layer, with its bias: `[out, in]` and `[out]`.
pub struct LinearPart {
    /// The matrix, `[out, in]`, in the file's format.
    pub weight: Weight,
    /// The bias, `[out]`.
    pub bias: Option<Weight>,
}

/// A loaded linear layer in a device's own form (packed, or as in the file).
///
/// Only the device that made it looks inside: it downcasts. `Host` is the one of [`example`](crate::example).
///
/// ```
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// use example::{Host, Matrix};
/// use headway_tensor::{Linear, LinearPart, Ops, Weight};
/// use std::any::Any;
/// let part = |name, rows: usize| -> Result<_, Box<dyn std::error::Error>> {
///     Ok(LinearPart { weight: Weight::from_f32(name, vec![rows, 3], &vec![0.5; rows * 3])?, bias: None })
/// };
/// let stacked = Host.load_linear(vec![part("q", 4)?, part("k", 2)?, part("v", 2)?], None)?;
/// assert_eq!((stacked.in_features(), stacked.out_features(), stacked.bytes()), (3, 8, 96));
/// assert!((&*stacked as &dyn Any).is::<Matrix>());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Linear: Any + Send + Sync {
    /// Width of an input row.
    fn in_features(&self) -> usize;
    /// Width of an output row: the sum over all parts.
    fn out_features(&self) -> usize;
    /// Bytes held, beyond what a memory-mapped file holds.
    fn bytes(&self) -> usize;
}

/// The operations of a device. Activations are `[tokens, width]` with contiguous rows.
///
/// A feed-forward written for any device, run on the `Host` of [`example`](crate::example):
///
/// ```
/// # mod example { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/example.rs")); }
/// use example::Host;
/// use headway_tensor::*;
/// /// x += down · (silu(gate · x) * (up · x)), with gate and up stacked.
/// fn feed_forward(
///     ops: &dyn Ops, gate_up: &dyn Linear, down: &dyn Linear, x: &mut Tensor,
/// ) -> Result<()> {
///     let (tokens, width) = (x.shape()[0], down.in_features());
///     let mut both = Tensor::zeros(ops, DType::F32, &[tokens, 2 * width])?;
///     let mut gated = Tensor::zeros(ops, DType::F32, &[tokens, width])?;
///     let mut out = Tensor::zeros(ops, DType::F32, &[tokens, down.out_features()])?;
///     ops.linear(gate_up, x.view(), both.view_mut())?;
///     ops.gated(Activation::Silu, both.view(), gated.view_mut())?;
///     ops.linear(down, gated.view(), out.view_mut())?;
///     ops.add(x.view_mut(), out.view())
/// }
///
/// let load = |name, shape: [usize; 2], values: &[f32]| -> Result<_, Box<dyn std::error::Error>> {
///     let weight = Weight::from_f32(name, shape.to_vec(), values)?;
///     Ok(Host.load_linear(vec![LinearPart { weight, bias: None }], None)?)
/// };
/// let (gate_up, down) = (load("gate_up", [2, 1], &[0.0, 1.0])?, load("down", [1, 1], &[1.0])?);
/// let mut x = Tensor::from_slice(&Host, &[3f32, 4.0], &[2, 1])?;
/// feed_forward(&Host, &*gate_up, &*down, &mut x)?;
/// assert_eq!(x.host::<f32>()?, [3.0, 4.0]); // the gate is shut: silu(0) = 0
/// let gate_up = load("gate_up", [2, 1], &[1.0, 1.0])?;
/// feed_forward(&Host, &*gate_up, &*down, &mut x)?;
/// assert!((x.host::<f32>()?[0] - (3.0 + 9.0 / (1.0 + (-3f32).exp()))).abs() < 1e-5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Ops: Exec {
    /// Takes a weight into the device's form. Several parts with the same input are stacked along
    /// the output (q, k, v in one call). `compute`: [`DType::F32`] dequantises block-quantised
    /// weights and computes in float32; `None` computes in the weight's own form.
    ///
    /// # Errors
    /// Shapes that don't fit each other, formats without a kernel, no memory.
    fn load_linear(&self, parts: Vec<LinearPart>, compute: Option<DType>) -> Result<Arc<dyn Linear>>;

    /// `out[t] = x[t] · wᵀ + bias`: x `[tokens, in]`, out `[tokens, out]`. x may be e4m3 codes where the device takes
    /// them: their values are multiplied, and the scale is the caller's.
    ///
    /// # Errors
    /// Shapes, dtypes, devices.
    fn linear(&self, w: &dyn Linear, x: TensorRef<'_>, out: TensorMut<'_>) -> Result<()>;

    /// `out[t] = table[ids[t]] · scale`: the table is a linear layer's weight `[vocabulary, width]`.
    ///
    /// # Errors
    /// An id outside the table.
    fn embed(&self, table: &dyn Linear, ids: &View<i32>, scale: f32, out: TensorMut<'_>) -> Result<()>;

    /// Root-mean-square norm over the last dimension, times `weight` `[width]`.
    /// x and out are `[tokens, width]` or `[tokens, heads, width]`.
    ///
    /// # Errors
    /// Shapes, dtypes.
    fn rms_norm(&self, x: TensorRef<'_>, weight: &Tensor, eps: f32, out: TensorMut<'_>) -> Result<()>;

    /// [`Ops::rms_norm`] with its input as output.
    ///
    /// # Errors
    /// Shapes, dtypes.
    fn rms_norm_in_place(&self, x: TensorMut<'_>, weight: &Tensor, eps: f32) -> Result<()>;

    /// Norm of x `[tokens, width]` to mean 0 and variance 1 over the last dimension, times `weight` plus `bias`,
    /// `[width]` both.
    ///
    /// # Errors
    /// Shapes, dtypes; a device without this operation.
    fn layer_norm_in_place(&self, x: TensorMut<'_>, weight: &Tensor, bias: &Tensor, eps: f32) -> Result<()> {
        let _ = (x, weight, bias, eps);
        Err(crate::TensorError::Unsupported(format!("layer norms on {}", self.device())))
    }

    /// `residual += x`, then `out = rms_norm(residual)`, in one pass.
    ///
    /// # Errors
    /// Shapes, dtypes.
    fn add_rms_norm(
        &self,
        residual: TensorMut<'_>,
        x: TensorRef<'_>,
        weight: &Tensor,
        eps: f32,
        out: TensorMut<'_>,
    ) -> Result<()>;

    /// `acc += x`.
    ///
    /// # Errors
    /// Shapes, dtypes.
    fn add(&self, acc: TensorMut<'_>, x: TensorRef<'_>) -> Result<()>;

    /// `x *= y`, element by element.
    ///
    /// # Errors
    /// Shapes, dtypes; a device without this operation.
    fn multiply(&self, x: TensorMut<'_>, y: TensorRef<'_>) -> Result<()> {
        let _ = (x, y);
        Err(crate::TensorError::Unsupported(format!("products of activations on {}", self.device())))
    }

    /// Rotates the first `2 * table.shape()[1]` elements of each head of x `[tokens, heads, size]`
    /// by the token's position. `table` is `[positions, rotary / 2, 2]`: cosine, then sine (any
    /// scaling of the rotation's length is in it).
    ///
    /// # Errors
    /// Shapes; a position past the table.
    fn rope(&self, x: TensorMut<'_>, positions: &View<i32>, table: &Tensor, style: RopeStyle) -> Result<()>;

    /// `out = activation(gate) · up` (or as the activation says) with gate and up side by side in `gate_up` `[tokens, 2 x width]`.
    ///
    /// # Errors
    /// Shapes, dtypes.
    fn gated(&self, activation: Activation, gate_up: TensorRef<'_>, out: TensorMut<'_>) -> Result<()>;

    /// `x = activation(x)`.
    ///
    /// # Errors
    /// Dtypes; a device without this operation.
    fn activate(&self, activation: Activation, x: TensorMut<'_>) -> Result<()> {
        let _ = x;
        Err(crate::TensorError::Unsupported(format!("{activation:?} in place on {}", self.device())))
    }

    /// `x = x · silu(gate)`, with a norm: x and gate are `[tokens, width]`.
    ///
    /// # Errors
    /// Shapes, dtypes; a device without this operation.
    fn gated_norm(&self, x: TensorMut<'_>, gate: TensorRef<'_>, norm: GatedNorm<'_>) -> Result<()> {
        let _ = (x, gate);
        Err(crate::TensorError::Unsupported(format!("the gated norm {norm:?} on {}", self.device())))
    }

    /// `codes = quant(x)` for rules whose scales are given: x `[tokens, width]` in float32, codes of the rule's type.
    ///
    /// # Errors
    /// Shapes, dtypes; a rule that makes scales; a device without this operation.
    fn quantise_rows(&self, quant: &RowQuant, x: TensorRef<'_>, codes: TensorMut<'_>) -> Result<()> {
        let _ = (x, codes);
        Err(TensorError::Unsupported(format!("rows as {} on {}", quant.kind(), self.device())))
    }

    /// `out[i] = x[rows[i]]`.
    ///
    /// # Errors
    /// A row past the end.
    fn gather_rows(&self, x: TensorRef<'_>, rows: &View<i32>, out: TensorMut<'_>) -> Result<()>;

    /// Copies a contiguous tensor's bytes to the host, after everything that was queued.
    ///
    /// # Errors
    /// A tensor elsewhere, or of another length; the device's own.
    fn read(&self, x: TensorRef<'_>, to: &mut [u8]) -> Result<()> {
        let (what, found) = ("a tensor to read", x.shape().to_vec());
        let expected = format!("{} bytes", to.len());
        let bytes = x.shape().iter().product::<usize>() * x.dtype().size();
        match x.into_host_bytes()?.get(..bytes).filter(|b| b.len() == to.len()) {
            Some(from) => to.copy_from_slice(from),
            None => return Err(TensorError::WrongShape { what: what.into(), found, expected }),
        }
        Ok(())
    }

    /// What chooses tokens from up to `max_rows` rows of `[rows, vocab_size]` logits on the device. `None`: the host
    /// does.
    ///
    /// # Errors
    /// No memory; the device's own.
    fn row_sampler(&self, _max_rows: usize, _vocab_size: usize) -> Result<Option<Box<dyn RowSampler>>> {
        Ok(None)
    }

    /// `x = x · factor`, then `cap · tanh(x / cap)` where a cap is given.
    ///
    /// # Errors
    /// Dtypes.
    fn scale_and_cap(&self, x: TensorMut<'_>, factor: f32, cap: Option<f32>) -> Result<()>;

    /// Takes a layer's experts into the device's form; `compute` as in [`Ops::load_linear`].
    ///
    /// # Errors
    /// Shapes that don't fit each other, a routing that can't be, formats without a kernel, no memory; a device
    /// that doesn't offer it.
    fn load_experts(&self, _spec: ExpertsSpec, _compute: Option<DType>) -> Result<Box<dyn Experts>> {
        Err(no_experts(self.device()))
    }

    /// Buffers for layers of up to these sizes and steps of up to `max_tokens` tokens.
    ///
    /// # Errors
    /// No memory; a device that doesn't offer it.
    fn expert_buffers(&self, _limits: ExpertLimits, _max_tokens: usize) -> Result<Box<dyn ExpertBuffers>> {
        Err(no_experts(self.device()))
    }

    /// Sends each row of x `[tokens, hidden]` to the experts that its router logits `[tokens, experts]` choose:
    /// `out[t] = Σ weight · down(activation(gate(x[t])) · up(x[t]))` over them, on top of what `out`
    /// `[tokens, hidden]` holds where `accumulate` says so. Only the chosen experts' rows are computed; a row's
    /// result does not depend on the other rows.
    ///
    /// # Errors
    /// Shapes, dtypes, buffers of smaller sizes; a device that doesn't offer it.
    fn mixture_of_experts(
        &self,
        _experts: &dyn Experts,
        _x: TensorRef<'_>,
        _logits: TensorRef<'_>,
        _buffers: &mut dyn ExpertBuffers,
        _accumulate: bool,
        _out: TensorMut<'_>,
    ) -> Result<()> {
        Err(no_experts(self.device()))
    }
}

fn no_experts(device: crate::Device) -> TensorError {
    TensorError::Unsupported(format!(
        "a mixture of experts on {device} is not supported; run the model on the CPU"
    ))
}
