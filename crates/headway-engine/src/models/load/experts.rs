//! A layer's experts: from tensors of their own, or cut out of one that holds them all.

use super::{Loader, convert};
use crate::models::{
    ModelError,
    plan::{ExpertWeights, ExpertsPlan, LinearPlan, StackedPlan},
};
use headway_tensor::{
    ExpertParts, Experts, ExpertsSpec, Linear, LinearPart, SharedBytes, TensorError, Weight, WeightType,
};
use std::{sync::Arc, time::Instant};

impl Loader<'_> {
    /// A router. Its logits are float32, whatever `--dtype` says: one that rounds to another expert is another answer.
    /// Where activations are float32 it keeps the file's type and computes in float32; a device whose activations are
    /// narrow takes its weights in their type, and adds up in float32.
    pub fn router(&self, plan: &LinearPlan) -> Result<Arc<dyn Linear>, ModelError> {
        let part = |p: &crate::models::plan::LinearPartPlan| {
            let weight = self.weight(&p.weight, &[p.out_features, plan.in_features])?;
            let bias = p.bias.as_ref().map(|b| self.weight(b, &[p.out_features])).transpose()?;
            Ok(LinearPart { weight, bias })
        };
        let parts = plan.parts.iter().map(part).collect::<Result<Vec<_>, ModelError>>()?;
        let start = Instant::now();
        let layer = self.ops.load_linear(parts, Some(self.activations))?;
        self.took(layer.bytes(), start);
        Ok(layer)
    }

    /// The experts of a layer.
    pub fn experts(&self, plan: &ExpertsPlan) -> Result<Box<dyn Experts>, ModelError> {
        let n = plan.routing.experts;
        let start = Instant::now();
        let experts = match &plan.weights {
            ExpertWeights::Each(all) => {
                all.iter().map(|(g, d)| self.expert(g, d)).collect::<Result<_, _>>()?
            }
            ExpertWeights::Stacked { gate_up, interleaved, down } => {
                let gate_up = gate_up.iter().map(|p| self.stack(p, n)).collect::<Result<Vec<_>, _>>()?;
                let down = self.stack(down, n)?;
                let one = |e| -> Result<ExpertParts, ModelError> {
                    let gate_up = gate_up.iter().map(|s| s.expert(self, e, *interleaved));
                    Ok(ExpertParts {
                        gate_up: gate_up.collect::<Result<_, _>>()?,
                        down: down.expert(self, e, false)?,
                    })
                };
                (0..n).map(one).collect::<Result<_, _>>()?
            }
        };
        let correction = match &plan.correction {
            Some(name) => Some(self.finite(name, &[n])?),
            None => None,
        };
        let spec = ExpertsSpec { routing: plan.routing, correction, activation: plan.activation, experts };
        let experts = self.ops.load_experts(spec, self.compute())?;
        self.took(experts.bytes(), start);
        Ok(experts)
    }

    fn expert(&self, gate_up: &LinearPlan, down: &LinearPlan) -> Result<ExpertParts, ModelError> {
        let mut parts = self.parts(down)?;
        match (parts.pop(), parts.is_empty()) {
            (Some(down), true) => Ok(ExpertParts { gate_up: self.parts(gate_up)?, down }),
            _ => {
                Err(TensorError::Unsupported("an expert whose down projection is not one tensor".into())
                    .into())
            }
        }
    }

    fn stack<'a>(&self, plan: &'a StackedPlan, experts: usize) -> Result<Stack<'a>, ModelError> {
        let weight = self.weight(&plan.weight, &plan.shape(experts))?;
        let bias = plan.bias.as_ref().map(|b| self.weight(b, &[experts, plan.out_features])).transpose()?;
        Ok(Stack { plan, weight, bias })
    }
}

/// One tensor with a matrix of every expert.
struct Stack<'a> {
    plan: &'a StackedPlan,
    weight: Weight,
    bias: Option<Weight>,
}

impl Stack<'_> {
    /// Expert `e`'s matrix, `[out, in]`: a view where the tensor has it so, and a copy where rows have to be put
    /// in another order.
    fn expert(&self, loader: &Loader<'_>, e: usize, interleaved: bool) -> Result<LinearPart, ModelError> {
        let wrong = |e: headway_tensor::WeightError| TensorError::Unsupported(e.to_string());
        let mut weight = self.weight.slice_outer(e).map_err(wrong)?;
        let mut bias = self.bias.as_ref().map(|b| b.slice_outer(e)).transpose().map_err(wrong)?;
        if self.plan.transposed || interleaved {
            let out = self.plan.out_features;
            let order = |row: usize| match interleaved {
                true if row < out / 2 => 2 * row,
                true => 2 * (row - out / 2) + 1,
                false => row,
            };
            weight = rearranged(&weight, self.plan.transposed, &order)?;
            bias = bias.map(|b| rearranged(&b, true, &order)).transpose()?;
            loader.took(weight.bytes().len(), Instant::now());
        }
        Ok(LinearPart { weight: convert(weight, loader.dtype), bias })
    }
}

/// The matrix `[out, in]` whose row r is output `order(r)` of `w`: a row of it, or a column where it is
/// `transposed`. A vector is a matrix of one input, transposed.
fn rearranged(w: &Weight, transposed: bool, order: &dyn Fn(usize) -> usize) -> Result<Weight, ModelError> {
    /// Rows that are written side by side while columns are read.
    const TILE: usize = 32;
    let (rows, cols) = (w.rows(), w.cols());
    let wrong = |what: String| TensorError::Unsupported(format!("tensor '{}': {what}", w.name()));
    let (out, inner) = if transposed { (cols, rows) } else { (rows, cols) };
    let shape = if w.shape().len() == 1 { vec![out] } else { vec![out, inner] };
    let size = w.dtype().block_bytes();
    let from = w.bytes().as_slice();
    let mut bytes = vec![0; from.len()];
    if !transposed {
        let row = w.row_bytes();
        for (r, to) in bytes.chunks_exact_mut(row).enumerate() {
            to.copy_from_slice(&from[order(r) * row..][..row]);
        }
    } else if matches!(w.dtype(), WeightType::Quant(_)) {
        return Err(
            wrong(format!("experts in {} can't be transposed; use BF16, F16 or F32", w.dtype())).into()
        );
    } else {
        for first in (0..out).step_by(TILE) {
            for c in 0..inner {
                for r in first..out.min(first + TILE) {
                    let (to, at) = ((r * inner + c) * size, (c * cols + order(r)) * size);
                    bytes[to..to + size].copy_from_slice(&from[at..at + size]);
                }
            }
        }
    }
    Ok(Weight::new(w.name(), w.dtype(), shape, SharedBytes::new(bytes)).map_err(|e| wrong(e.to_string()))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_columns_in_another_order() {
        let w = Weight::from_f32("w", vec![2, 4], &[0., 1., 2., 3., 10., 11., 12., 13.]).unwrap();
        let halves = |r: usize| if r < 2 { 2 * r } else { 2 * (r - 2) + 1 };
        let t = rearranged(&w, true, &halves).unwrap();
        assert_eq!((t.shape(), t.to_f32()), (&[4, 2][..], vec![0., 10., 2., 12., 1., 11., 3., 13.]));
        let t = rearranged(&w, false, &|r| 1 - r).unwrap();
        assert_eq!((t.shape(), t.to_f32()), (&[2, 4][..], vec![10., 11., 12., 13., 0., 1., 2., 3.]));
        let bias = Weight::from_f32("b", vec![4], &[0., 1., 2., 3.]).unwrap();
        let t = rearranged(&bias, true, &halves).unwrap();
        assert_eq!((t.shape(), t.to_f32()), (&[4][..], vec![0., 2., 1., 3.]));
        let quantised = WeightType::Quant(headway_tensor::quant::QuantFormat::Q8_0);
        let w = Weight::new("q", quantised, vec![2, 32], SharedBytes::new(vec![0; 68])).unwrap();
        let e = rearranged(&w, true, &|r| r).unwrap_err().to_string();
        assert!(e.contains("'q'") && e.contains("Q8_0"), "{e}");
    }
}
