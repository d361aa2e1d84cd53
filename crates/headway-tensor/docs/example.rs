// Float32 on the host without threads: the operations of a gated feed-forward. What it doesn't offer it refuses.
use headway_tensor::*;
use std::{any::Any, sync::Arc};

pub struct Host;

impl Exec for Host {
    fn device(&self) -> Device {
        Device::CPU
    }
    fn alloc(&self, _bytes: usize) -> Result<Option<Arc<dyn DeviceMem>>> {
        Ok(None)
    }
    fn upload(&self, _to: &Arc<dyn DeviceMem>, _offset: usize, _from: &[u8]) {}
}

// A matrix `[out, in]`, row by row.
pub struct Matrix {
    rows: Vec<f32>,
    width: usize,
}

impl Linear for Matrix {
    fn in_features(&self) -> usize {
        self.width
    }
    fn out_features(&self) -> usize {
        self.rows.len() / self.width
    }
    fn bytes(&self) -> usize {
        size_of_val(&self.rows[..])
    }
}

fn refused(what: &str) -> TensorError {
    TensorError::Unsupported(format!("{what} is not offered by the host of the examples; use headway-cpu's"))
}

impl Ops for Host {
    fn load_linear(&self, parts: Vec<LinearPart>, _compute: Option<DType>) -> Result<Arc<dyn Linear>> {
        if parts.is_empty() || parts.iter().any(|p| p.bias.is_some()) {
            return Err(refused("a bias, or no part,"));
        }
        let width = parts[0].weight.cols();
        if parts.iter().any(|p| p.weight.cols() != width) {
            return Err(refused("a stack of parts with different inputs"));
        }
        Ok(Arc::new(Matrix { rows: parts.iter().flat_map(|p| p.weight.to_f32()).collect(), width }))
    }

    fn linear(&self, w: &dyn Linear, x: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
        let w: &Matrix = (w as &dyn Any).downcast_ref().ok_or_else(|| refused("another device's weight"))?;
        let (x, out) = (x.into_host::<f32>()?, out.into_host::<f32>()?);
        for (x, out) in x.chunks_exact(w.width).zip(out.chunks_exact_mut(w.out_features())) {
            for (row, y) in w.rows.chunks_exact(w.width).zip(out) {
                *y = row.iter().zip(x).map(|(w, x)| w * x).sum();
            }
        }
        Ok(())
    }

    fn add(&self, acc: TensorMut<'_>, x: TensorRef<'_>) -> Result<()> {
        for (a, x) in acc.into_host::<f32>()?.iter_mut().zip(x.into_host::<f32>()?) {
            *a += x;
        }
        Ok(())
    }

    fn gated(&self, activation: Activation, gate_up: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
        if activation != Activation::Silu {
            return Err(refused("an activation other than SiLU"));
        }
        let width = out.shape()[1];
        let rows = gate_up.into_host::<f32>()?.chunks_exact(2 * width);
        for (row, out) in rows.zip(out.into_host::<f32>()?.chunks_exact_mut(width)) {
            for (i, y) in out.iter_mut().enumerate() {
                *y = row[i] / (1.0 + (-row[i]).exp()) * row[width + i];
            }
        }
        Ok(())
    }

    fn embed(&self, _: &dyn Linear, _: &View<i32>, _: f32, _: TensorMut<'_>) -> Result<()> {
        Err(refused("embed"))
    }
    fn rms_norm(&self, _: TensorRef<'_>, _: &Tensor, _: f32, _: TensorMut<'_>) -> Result<()> {
        Err(refused("rms_norm"))
    }
    fn rms_norm_in_place(&self, _: TensorMut<'_>, _: &Tensor, _: f32) -> Result<()> {
        Err(refused("rms_norm_in_place"))
    }
    fn add_rms_norm(
        &self,
        _: TensorMut<'_>,
        _: TensorRef<'_>,
        _: &Tensor,
        _: f32,
        _: TensorMut<'_>,
    ) -> Result<()> {
        Err(refused("add_rms_norm"))
    }
    fn rope(&self, _: TensorMut<'_>, _: &View<i32>, _: &Tensor, _: RopeStyle) -> Result<()> {
        Err(refused("rope"))
    }
    fn gather_rows(&self, _: TensorRef<'_>, _: &View<i32>, _: TensorMut<'_>) -> Result<()> {
        Err(refused("gather_rows"))
    }
    fn scale_and_cap(&self, _: TensorMut<'_>, _: f32, _: Option<f32>) -> Result<()> {
        Err(refused("scale_and_cap"))
    }
}
