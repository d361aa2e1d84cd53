//! The operations that models call, on CUDA. Activations are bfloat16, float16 or float32, one type in a call; norms'
//! weights and rotation tables are float32; sums are float32.
//!
//! Indices (token ids, rows, positions) are read by kernels: one that is out of range is an error from the next call
//! that waits for the device or is made after it. The checks and launches are in `kernels::ops`. Not for attention.

mod experts;
mod linear;
mod sampler;
mod upload;

pub(crate) use experts::{CudaExpertBuffers, CudaExperts, Matrices};
pub use linear::CudaLinear;
use sampler::CudaSampler;

use crate::{
    CudaExec,
    device::CudaError,
    kernels::ops::{codes, elementwise, experts as mixture, gated, gather, linear as product, norm, rope},
};
use headway_tensor::{
    Activation, DType, ExpertBuffers, ExpertLimits, Experts, ExpertsSpec, GatedNorm, Linear, LinearPart, Ops,
    Result, RopeStyle, RowQuant, RowSampler, Tensor, TensorMut, TensorRef, View,
};
use std::{any::Any, sync::Arc};

fn cuda_linear<'a>(w: &'a dyn Linear, what: &str) -> Result<&'a CudaLinear, CudaError> {
    (w as &dyn Any).downcast_ref().ok_or_else(|| {
        CudaError::Argument(format!("{what}: the weight was loaded for another device than CUDA"))
    })
}

impl Ops for CudaExec {
    /// `compute` may be any type that activations have: a layer takes inputs of its weight's type alone.
    fn load_linear(&self, parts: Vec<LinearPart>, compute: Option<DType>) -> Result<Arc<dyn Linear>> {
        Ok(Arc::new(CudaLinear::load(self, parts, compute)?))
    }

    /// The output may be float32 whatever the input is.
    fn linear(&self, w: &dyn Linear, x: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
        Ok(product::linear(self, cuda_linear(w, "linear")?, x, out)?)
    }

    fn embed(&self, table: &dyn Linear, ids: &View<i32>, scale: f32, out: TensorMut<'_>) -> Result<()> {
        Ok(gather::embed(self, cuda_linear(table, "embed")?, ids, scale, out)?)
    }

    fn rms_norm(&self, x: TensorRef<'_>, weight: &Tensor, eps: f32, out: TensorMut<'_>) -> Result<()> {
        Ok(norm::rms_norm(self, x, weight, eps, out)?)
    }

    fn rms_norm_in_place(&self, x: TensorMut<'_>, weight: &Tensor, eps: f32) -> Result<()> {
        Ok(norm::rms_norm_in_place(self, x, weight, eps)?)
    }

    fn layer_norm_in_place(&self, x: TensorMut<'_>, weight: &Tensor, bias: &Tensor, eps: f32) -> Result<()> {
        Ok(norm::layer_norm_in_place(self, x, weight, bias, eps)?)
    }

    fn add_rms_norm(
        &self,
        residual: TensorMut<'_>,
        x: TensorRef<'_>,
        weight: &Tensor,
        eps: f32,
        out: TensorMut<'_>,
    ) -> Result<()> {
        Ok(norm::add_rms_norm(self, residual, x, weight, eps, out)?)
    }

    fn add(&self, acc: TensorMut<'_>, x: TensorRef<'_>) -> Result<()> {
        Ok(elementwise::add(self, acc, x)?)
    }

    fn multiply(&self, x: TensorMut<'_>, y: TensorRef<'_>) -> Result<()> {
        Ok(elementwise::multiply(self, x, y)?)
    }

    fn rope(&self, x: TensorMut<'_>, positions: &View<i32>, table: &Tensor, style: RopeStyle) -> Result<()> {
        Ok(rope::rope(self, x, positions, table, style)?)
    }

    fn gated(&self, activation: Activation, gate_up: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
        Ok(gated::gated(self, activation, gate_up, out)?)
    }

    fn activate(&self, activation: Activation, x: TensorMut<'_>) -> Result<()> {
        Ok(elementwise::activate(self, activation, x)?)
    }

    fn gated_norm(&self, x: TensorMut<'_>, gate: TensorRef<'_>, norm: GatedNorm<'_>) -> Result<()> {
        match norm {
            GatedNorm::None => elementwise::times_silu(self, x, gate)?,
            GatedNorm::Rms { weight, groups, eps, before_gate } => {
                norm::gated_norm(self, x, gate, weight, groups, eps, before_gate)?;
            }
        }
        Ok(())
    }

    fn quantise_rows(&self, quant: &RowQuant, x: TensorRef<'_>, codes: TensorMut<'_>) -> Result<()> {
        Ok(codes::quantise(self, quant, x, codes)?)
    }

    fn gather_rows(&self, x: TensorRef<'_>, rows: &View<i32>, out: TensorMut<'_>) -> Result<()> {
        Ok(gather::gather_rows(self, x, rows, out)?)
    }

    fn read(&self, x: TensorRef<'_>, to: &mut [u8]) -> Result<()> {
        Ok(self.read_tensor_into(x, to)?)
    }

    fn row_sampler(&self, max_rows: usize, vocab_size: usize) -> Result<Option<Box<dyn RowSampler>>> {
        let sampler = CudaSampler::new(self, max_rows, vocab_size)?;
        Ok(sampler.map(|s| Box::new(s) as Box<dyn RowSampler>))
    }

    fn scale_and_cap(&self, x: TensorMut<'_>, factor: f32, cap: Option<f32>) -> Result<()> {
        Ok(elementwise::scale_and_cap(self, x, factor, cap)?)
    }

    /// In bfloat16 or float16; blocks of GGUF become bfloat16.
    fn load_experts(&self, spec: ExpertsSpec, compute: Option<DType>) -> Result<Box<dyn Experts>> {
        Ok(Box::new(CudaExperts::load(self, spec, compute)?))
    }

    fn expert_buffers(&self, limits: ExpertLimits, max_tokens: usize) -> Result<Box<dyn ExpertBuffers>> {
        Ok(Box::new(CudaExpertBuffers::new(self, limits, max_tokens)?))
    }

    /// x and out in the weights' type, logits in float32.
    fn mixture_of_experts(
        &self,
        experts: &dyn Experts,
        x: TensorRef<'_>,
        logits: TensorRef<'_>,
        buffers: &mut dyn ExpertBuffers,
        accumulate: bool,
        out: TensorMut<'_>,
    ) -> Result<()> {
        let foreign =
            |what| CudaError::Argument(format!("a mixture of experts: {what} of another device than CUDA"));
        let experts = (experts as &dyn Any).downcast_ref().ok_or_else(|| foreign("experts"))?;
        let buffers = (buffers as &mut dyn Any).downcast_mut().ok_or_else(|| foreign("buffers"))?;
        Ok(mixture::run(self, experts, x, logits, buffers, accumulate, out)?)
    }
}
