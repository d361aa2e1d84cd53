//! The operations that models call, on the CPU. Activations are float32; weights keep the type of
//! their file. Here: checks of shapes and types, and the split over threads. The arithmetic is in
//! `kernels`. Not for attention.

mod check;
mod codes;
mod experts;

use crate::{
    CpuExec,
    kernels::{elementwise as kernel, linear::CpuLinear},
};
use check::{expect, f32_mut, f32_ref, host_ids, in_range, same_rows, width_of};
use headway_tensor::{
    Activation, DType, ExpertBuffers, ExpertLimits, Experts, ExpertsSpec, GatedNorm, Linear, LinearPart, Ops,
    Result, RopeStyle, RowQuant, Tensor, TensorError, TensorMut, TensorRef, View,
};
use std::{any::Any, sync::Arc};

fn cpu_linear<'a>(w: &'a dyn Linear, what: &str) -> Result<&'a CpuLinear> {
    (w as &dyn Any).downcast_ref().ok_or_else(|| {
        TensorError::Unsupported(format!("{what}: the weight was loaded for another device than the CPU"))
    })
}

/// 1 / sqrt(mean of squares + eps).
fn rms_scale(isa: crate::Isa, x: &[f32], eps: f32) -> f32 {
    1.0 / (kernel::sum_of_squares(isa, x) / x.len() as f32 + eps).sqrt()
}

/// `out` from a row of gate and up, side by side.
fn activate(isa: crate::Isa, activation: Activation, out: &mut [f32], gate_up: &[f32]) {
    let (gate, up) = gate_up.split_at(out.len());
    match activation {
        Activation::Silu => kernel::silu(isa, out, gate, up),
        Activation::GeluTanh => kernel::gelu_tanh(isa, out, gate, up),
        Activation::Gelu => kernel::gelu(isa, out, gate, up),
        Activation::ClampedSwiglu { alpha, limit } => {
            kernel::clamped_swiglu(isa, out, gate, up, alpha, limit);
        }
        Activation::Relu2 => kernel::relu2(isa, out, gate, up),
    }
}

impl Ops for CpuExec {
    fn load_linear(&self, parts: Vec<LinearPart>, compute: Option<DType>) -> Result<Arc<dyn Linear>> {
        Ok(Arc::new(CpuLinear::new(self, parts, compute)?))
    }

    fn linear(&self, w: &dyn Linear, x: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
        let w = cpu_linear(w, "linear")?;
        if x.dtype() == DType::F8E4M3 {
            return codes::linear(self, w, x, out);
        }
        let (xs, x) = f32_ref("linear input", x)?;
        let (rows, out) = f32_mut("linear output", out)?;
        expect("linear input", &[xs.heads(), xs.width()], &[1, w.in_features()])?;
        expect("linear output", &[rows.count(), rows.width()], &[xs.count(), w.out_features()])?;
        w.forward(self, x, &xs, out, &rows);
        Ok(())
    }

    fn embed(&self, table: &dyn Linear, ids: &View<i32>, scale: f32, out: TensorMut<'_>) -> Result<()> {
        let table = cpu_linear(table, "embed")?;
        let ids = host_ids("embed", ids)?;
        let (rows, out) = f32_mut("embed output", out)?;
        expect("embed output", &[rows.count(), rows.width()], &[ids.len(), table.in_features()])?;
        in_range("embed: token id", ids, table.out_features())?;
        let isa = self.isa();
        rows.for_each(self.pool(), out, &|i, row| {
            table.row(ids[i] as usize, row);
            if scale != 1.0 {
                kernel::scale(isa, row, scale);
            }
        });
        Ok(())
    }

    fn rms_norm(&self, x: TensorRef<'_>, weight: &Tensor, eps: f32, out: TensorMut<'_>) -> Result<()> {
        let (xs, x) = f32_ref("rms_norm", x)?;
        let (rows, out) = f32_mut("rms_norm", out)?;
        same_rows("rms_norm", &xs, &rows)?;
        let weight = width_of("rms_norm", weight, rows.width())?;
        let isa = self.isa();
        rows.for_each(self.pool(), out, &|i, out| {
            let x = xs.of(x, i);
            kernel::scaled(isa, out, x, rms_scale(isa, x, eps), weight);
        });
        Ok(())
    }

    fn rms_norm_in_place(&self, x: TensorMut<'_>, weight: &Tensor, eps: f32) -> Result<()> {
        let (rows, x) = f32_mut("rms_norm", x)?;
        let weight = width_of("rms_norm", weight, rows.width())?;
        let isa = self.isa();
        rows.for_each(self.pool(), x, &|_, x| {
            let scale = rms_scale(isa, x, eps);
            kernel::scaled_in_place(isa, x, scale, weight);
        });
        Ok(())
    }

    fn layer_norm_in_place(&self, x: TensorMut<'_>, weight: &Tensor, bias: &Tensor, eps: f32) -> Result<()> {
        let (rows, x) = f32_mut("layer_norm", x)?;
        let weight = width_of("layer_norm", weight, rows.width())?;
        let bias = width_of("layer_norm", bias, rows.width())?;
        let isa = self.isa();
        rows.for_each(self.pool(), x, &|_, x| kernel::layer_norm(isa, x, weight, bias, eps));
        Ok(())
    }

    fn add_rms_norm(
        &self,
        residual: TensorMut<'_>,
        x: TensorRef<'_>,
        weight: &Tensor,
        eps: f32,
        out: TensorMut<'_>,
    ) -> Result<()> {
        let (xs, x) = f32_ref("add_rms_norm", x)?;
        let (residual_rows, residual) = f32_mut("add_rms_norm residual", residual)?;
        let (rows, out) = f32_mut("add_rms_norm", out)?;
        same_rows("add_rms_norm", &xs, &rows)?;
        same_rows("add_rms_norm residual", &residual_rows, &rows)?;
        let weight = width_of("add_rms_norm", weight, rows.width())?;
        let isa = self.isa();
        rows.for_each_pair(self.pool(), out, &residual_rows, residual, &|i, out, residual| {
            kernel::add(isa, residual, xs.of(x, i));
            kernel::scaled(isa, out, residual, rms_scale(isa, residual, eps), weight);
        });
        Ok(())
    }

    fn add(&self, acc: TensorMut<'_>, x: TensorRef<'_>) -> Result<()> {
        let (xs, x) = f32_ref("add", x)?;
        let (rows, acc) = f32_mut("add", acc)?;
        same_rows("add", &xs, &rows)?;
        let isa = self.isa();
        rows.for_each(self.pool(), acc, &|i, acc| kernel::add(isa, acc, xs.of(x, i)));
        Ok(())
    }

    fn multiply(&self, x: TensorMut<'_>, y: TensorRef<'_>) -> Result<()> {
        let (ys, y) = f32_ref("multiply", y)?;
        let (rows, x) = f32_mut("multiply", x)?;
        same_rows("multiply", &ys, &rows)?;
        let isa = self.isa();
        rows.for_each(self.pool(), x, &|i, x| kernel::scaled_in_place(isa, x, 1.0, ys.of(y, i)));
        Ok(())
    }

    fn rope(&self, x: TensorMut<'_>, positions: &View<i32>, table: &Tensor, style: RopeStyle) -> Result<()> {
        let (rows, x) = f32_mut("rope", x)?;
        let positions = host_ids("rope", positions)?;
        let heads = rows.heads().max(1);
        expect("rope positions", &[positions.len()], &[rows.count() / heads])?;
        let (table_rows, half, pairs) = check::rope_table(table, rows.width())?;
        in_range("rope: position", positions, table_rows)?;
        let isa = self.isa();
        rows.for_each(self.pool(), x, &|i, head| {
            let first = positions[i / heads] as usize * half;
            let table = &pairs[first..first + half];
            match style {
                RopeStyle::Halves => kernel::rope_halves(isa, head, table),
                RopeStyle::Interleaved => kernel::rope_interleaved(isa, head, table),
            }
        });
        Ok(())
    }

    fn gated(&self, activation: Activation, gate_up: TensorRef<'_>, out: TensorMut<'_>) -> Result<()> {
        let (xs, x) = f32_ref("gated", gate_up)?;
        let (rows, out) = f32_mut("gated", out)?;
        expect("gated output", &[rows.count(), 2 * rows.width()], &[xs.count(), xs.width()])?;
        let isa = self.isa();
        rows.for_each(self.pool(), out, &|i, out| activate(isa, activation, out, xs.of(x, i)));
        Ok(())
    }

    fn load_experts(&self, spec: ExpertsSpec, compute: Option<DType>) -> Result<Box<dyn Experts>> {
        Ok(Box::new(experts::CpuExperts::new(self, spec, compute)?))
    }

    fn expert_buffers(&self, limits: ExpertLimits, max_tokens: usize) -> Result<Box<dyn ExpertBuffers>> {
        Ok(Box::new(experts::CpuExpertBuffers::new(limits, max_tokens)))
    }

    fn mixture_of_experts(
        &self,
        experts: &dyn Experts,
        x: TensorRef<'_>,
        logits: TensorRef<'_>,
        buffers: &mut dyn ExpertBuffers,
        accumulate: bool,
        out: TensorMut<'_>,
    ) -> Result<()> {
        experts::run(self, experts, x, logits, buffers, accumulate, out)
    }

    fn activate(&self, activation: Activation, x: TensorMut<'_>) -> Result<()> {
        let (rows, x) = f32_mut("activate", x)?;
        let isa = self.isa();
        let f = match activation {
            Activation::Silu => kernel::silu_of,
            Activation::GeluTanh => kernel::gelu_tanh_of,
            Activation::Gelu => kernel::gelu_of,
            Activation::Relu2 => kernel::relu2_of,
            Activation::ClampedSwiglu { .. } => {
                return Err(TensorError::Unsupported(format!("{activation:?} without an up projection")));
            }
        };
        rows.for_each(self.pool(), x, &|_, x| f(isa, x));
        Ok(())
    }

    fn gated_norm(&self, x: TensorMut<'_>, gate: TensorRef<'_>, norm: GatedNorm<'_>) -> Result<()> {
        let (gates, gate) = f32_ref("gated norm, gate", gate)?;
        let (rows, x) = f32_mut("gated norm", x)?;
        same_rows("gated norm", &gates, &rows)?;
        let isa = self.isa();
        let GatedNorm::Rms { weight, groups, eps, before_gate } = norm else {
            rows.for_each(self.pool(), x, &|i, x| kernel::times_silu(isa, x, gates.of(gate, i)));
            return Ok(());
        };
        let (width, weight) = (rows.width(), width_of("gated norm", weight, rows.width())?);
        if groups == 0 || !width.is_multiple_of(groups) {
            return Err(TensorError::Unsupported(format!(
                "a norm over {groups} parts of {width} elements: the parts must be equal"
            )));
        }
        let part = (width / groups).max(1);
        rows.for_each(self.pool(), x, &|i, x| {
            if !before_gate {
                kernel::times_silu(isa, x, gates.of(gate, i));
            }
            for (x, weight) in x.chunks_exact_mut(part).zip(weight.chunks_exact(part)) {
                let scale = rms_scale(isa, x, eps);
                kernel::scaled_in_place(isa, x, scale, weight);
            }
            if before_gate {
                kernel::times_silu(isa, x, gates.of(gate, i));
            }
        });
        Ok(())
    }

    fn quantise_rows(&self, quant: &RowQuant, x: TensorRef<'_>, codes: TensorMut<'_>) -> Result<()> {
        codes::quantise(quant, x, codes)
    }

    fn gather_rows(&self, x: TensorRef<'_>, rows: &View<i32>, out: TensorMut<'_>) -> Result<()> {
        let (xs, x) = f32_ref("gather_rows", x)?;
        let ids = host_ids("gather_rows", rows)?;
        let (rows, out) = f32_mut("gather_rows", out)?;
        expect("gather_rows output", &[rows.count(), rows.width()], &[ids.len(), xs.width()])?;
        in_range("gather_rows: row", ids, xs.count())?;
        rows.for_each(self.pool(), out, &|i, out| out.copy_from_slice(xs.of(x, ids[i] as usize)));
        Ok(())
    }

    fn scale_and_cap(&self, x: TensorMut<'_>, factor: f32, cap: Option<f32>) -> Result<()> {
        let (rows, x) = f32_mut("scale_and_cap", x)?;
        let isa = self.isa();
        match cap {
            Some(cap) => rows.for_each(self.pool(), x, &|_, x| kernel::soft_cap(isa, x, factor, cap)),
            None if factor == 1.0 => {}
            None => rows.for_each(self.pool(), x, &|_, x| kernel::scale(isa, x, factor)),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
