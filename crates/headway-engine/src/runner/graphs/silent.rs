//! Operations that do nothing: what walks a forward pass whose operations were recorded.

use headway_tensor::{
    Activation, DType, Device, DeviceMem, Exec, ExpertBuffers, Experts, GatedNorm, Linear, LinearPart, Ops,
    Result, RopeStyle, RowQuant, Tensor, TensorError, TensorMut, TensorRef, View,
};
use std::sync::Arc;

/// A device whose operations were queued by a graph already.
pub(super) struct Silent(pub Device);

fn refused<T>(what: &str) -> Result<T> {
    Err(TensorError::Unsupported(format!("{what} in a step that was recorded in pieces")))
}

impl Exec for Silent {
    fn device(&self) -> Device {
        self.0
    }

    fn alloc(&self, _: usize) -> Result<Option<Arc<dyn DeviceMem>>> {
        refused("an allocation")
    }

    fn upload(&self, _: &Arc<dyn DeviceMem>, _: usize, _: &[u8]) {}
}

impl Ops for Silent {
    fn load_linear(&self, _: Vec<LinearPart>, _: Option<DType>) -> Result<Arc<dyn Linear>> {
        refused("loading a weight")
    }

    fn read(&self, _: TensorRef<'_>, _: &mut [u8]) -> Result<()> {
        refused("reading a tensor")
    }

    fn linear(&self, _: &dyn Linear, _: TensorRef<'_>, _: TensorMut<'_>) -> Result<()> {
        Ok(())
    }

    fn embed(&self, _: &dyn Linear, _: &View<i32>, _: f32, _: TensorMut<'_>) -> Result<()> {
        Ok(())
    }

    fn rms_norm(&self, _: TensorRef<'_>, _: &Tensor, _: f32, _: TensorMut<'_>) -> Result<()> {
        Ok(())
    }

    fn rms_norm_in_place(&self, _: TensorMut<'_>, _: &Tensor, _: f32) -> Result<()> {
        Ok(())
    }

    fn layer_norm_in_place(&self, _: TensorMut<'_>, _: &Tensor, _: &Tensor, _: f32) -> Result<()> {
        Ok(())
    }

    fn add_rms_norm(
        &self,
        _: TensorMut<'_>,
        _: TensorRef<'_>,
        _: &Tensor,
        _: f32,
        _: TensorMut<'_>,
    ) -> Result<()> {
        Ok(())
    }

    fn add(&self, _: TensorMut<'_>, _: TensorRef<'_>) -> Result<()> {
        Ok(())
    }

    fn multiply(&self, _: TensorMut<'_>, _: TensorRef<'_>) -> Result<()> {
        Ok(())
    }

    fn rope(&self, _: TensorMut<'_>, _: &View<i32>, _: &Tensor, _: RopeStyle) -> Result<()> {
        Ok(())
    }

    fn gated(&self, _: Activation, _: TensorRef<'_>, _: TensorMut<'_>) -> Result<()> {
        Ok(())
    }

    fn activate(&self, _: Activation, _: TensorMut<'_>) -> Result<()> {
        Ok(())
    }

    fn gated_norm(&self, _: TensorMut<'_>, _: TensorRef<'_>, _: GatedNorm<'_>) -> Result<()> {
        Ok(())
    }

    fn quantise_rows(&self, _: &RowQuant, _: TensorRef<'_>, _: TensorMut<'_>) -> Result<()> {
        Ok(())
    }

    fn gather_rows(&self, _: TensorRef<'_>, _: &View<i32>, _: TensorMut<'_>) -> Result<()> {
        Ok(())
    }

    fn scale_and_cap(&self, _: TensorMut<'_>, _: f32, _: Option<f32>) -> Result<()> {
        Ok(())
    }

    fn mixture_of_experts(
        &self,
        _: &dyn Experts,
        _: TensorRef<'_>,
        _: TensorRef<'_>,
        _: &mut dyn ExpertBuffers,
        _: bool,
        _: TensorMut<'_>,
    ) -> Result<()> {
        Ok(())
    }
}
