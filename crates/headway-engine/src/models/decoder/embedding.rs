//! What enters the first layer: rows of the embedding, positions added to them and normed where the model does so.

use super::{buffers::Buffers, step::Step};
use crate::models::{
    ModelError,
    load::Loader,
    plan::{LayerNormPlan, PositionsPlan},
};
use headway_tensor::{Linear, LinearPart, Tensor, View, Weight};
use std::sync::Arc;

/// A norm to mean 0 and variance 1.
pub(super) struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
}

impl LayerNorm {
    pub fn load(loader: &Loader<'_>, plan: &LayerNormPlan, width: usize) -> Result<Self, ModelError> {
        let vector = |name: &str| -> Result<Tensor, ModelError> {
            Ok(Tensor::from_slice(loader.ops, &loader.values(name, &[width])?, &[width])?)
        };
        Ok(Self { weight: vector(&plan.weight)?, bias: vector(&plan.bias)? })
    }

    /// Norms the stream.
    pub fn run(&self, s: &Step<'_>, b: &mut Buffers) -> Result<(), ModelError> {
        let stream = b.hidden.view_mut_as(&[s.n, s.hidden])?;
        Ok(s.ops.layer_norm_in_place(stream, &self.weight, &self.bias, s.eps)?)
    }
}

/// A vector for each position.
pub(super) struct Positions(Arc<dyn Linear>);

impl Positions {
    /// The table from its first position on, with the row that every position gets added in.
    pub fn load(loader: &Loader<'_>, plan: &PositionsPlan, hidden: usize) -> Result<Self, ModelError> {
        let mut table = loader.values(&plan.weight, &[plan.rows, hidden])?.split_off(plan.first * hidden);
        if let Some((name, rows)) = &plan.types {
            let types = loader.values(name, &[*rows, hidden])?;
            let rows = table.chunks_exact_mut(hidden);
            rows.for_each(|row| row.iter_mut().zip(&types).for_each(|(x, t)| *x += t));
        }
        let weight = Weight::from_f32(&plan.weight, vec![plan.rows - plan.first, hidden], &table);
        let weight = weight.map_err(|e| headway_tensor::TensorError::Unsupported(e.to_string()))?;
        Ok(Self(loader.take_parts(vec![LinearPart { weight, bias: None }])?))
    }

    /// Adds to the stream what belongs to the step's positions.
    pub fn run(&self, s: &Step<'_>, b: &mut Buffers) -> Result<(), ModelError> {
        let shape = [s.n, s.hidden];
        let positions: &View<i32> = s.positions;
        s.ops.embed(&*self.0, positions, 1.0, b.mixed.view_mut_as(&shape)?)?;
        Ok(s.ops.add(b.hidden.view_mut_as(&shape)?, b.mixed.view_as(&shape)?)?)
    }
}
