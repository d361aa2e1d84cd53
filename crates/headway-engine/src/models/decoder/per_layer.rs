//! Inputs that every layer gets of its own from the tokens: made once a step, gated into the stream after
//! each layer's feed-forward.

use super::{buffers::Buffers, step::Step};
use crate::models::{
    ModelError,
    load::Loader,
    plan::{LinearPlan, PerLayerBlockPlan, PerLayerInputsPlan},
};
use headway_tensor::{Activation, Linear, Tensor, View};
use std::sync::Arc;

/// Makes the inputs of all layers.
pub(super) struct PerLayerInputs {
    table: Arc<dyn Linear>,
    table_scale: f32,
    projection: Arc<dyn Linear>,
    projection_scale: f32,
    /// With the factor on the sum in it.
    norm: Tensor,
    layers: usize,
}

impl PerLayerInputs {
    pub fn load(
        loader: &Loader<'_>,
        plan: &PerLayerInputsPlan,
        vocabulary: usize,
    ) -> Result<Self, ModelError> {
        let table = LinearPlan::single(plan.table.clone(), None, plan.all(), vocabulary);
        Ok(Self {
            table: loader.table(&table)?,
            table_scale: plan.table_scale * plan.scale,
            projection: loader.linear(&plan.projection)?,
            projection_scale: plan.projection_scale,
            norm: loader.scaled_norm(&plan.norm, plan.width, plan.scale)?,
            layers: plan.layers,
        })
    }

    /// From what enters layer 0 to `per_layer`.
    pub fn run(&self, s: &Step<'_>, b: &mut Buffers, token_ids: &View<i32>) -> Result<(), ModelError> {
        let shape = [s.n, self.projection.out_features()];
        let x = b.hidden.view_as(&[s.n, s.hidden])?;
        s.ops.linear(&*self.projection, x, b.per_layer.view_mut_as(&shape)?)?;
        s.ops.scale_and_cap(b.per_layer.view_mut_as(&shape)?, self.projection_scale, None)?;
        s.ops.rms_norm_in_place(b.per_layer.view_mut_as(&shape)?.heads(self.layers)?, &self.norm, s.eps)?;
        s.ops.embed(&*self.table, token_ids, self.table_scale, b.per_token.view_mut_as(&shape)?)?;
        Ok(s.ops.add(b.per_layer.view_mut_as(&shape)?, b.per_token.view_as(&shape)?)?)
    }
}

/// A layer's use of its input.
pub(super) struct PerLayerBlock {
    /// The layer's place among all inputs.
    layer: usize,
    gate: Arc<dyn Linear>,
    activation: Activation,
    projection: Arc<dyn Linear>,
    norm: Tensor,
}

impl PerLayerBlock {
    pub fn load(
        loader: &Loader<'_>,
        plan: &PerLayerBlockPlan,
        layer: usize,
        hidden: usize,
    ) -> Result<Self, ModelError> {
        Ok(Self {
            layer,
            gate: loader.linear(&plan.gate)?,
            activation: plan.activation,
            projection: loader.linear(&plan.projection)?,
            norm: loader.norm(&plan.norm, hidden)?,
        })
    }

    /// Gates the input into the stream.
    pub fn run(&self, s: &Step<'_>, b: &mut Buffers) -> Result<(), ModelError> {
        let width = self.gate.out_features();
        let (stream, shape) = ([s.n, s.hidden], [s.n, width]);
        let all = b.per_layer.shape()[1];
        s.ops.linear(&*self.gate, b.hidden.view_as(&stream)?, b.per_token.view_mut_as(&shape)?)?;
        s.ops.activate(self.activation, b.per_token.view_mut_as(&shape)?)?;
        let input = b.per_layer.view_as(&[s.n, all])?.cols(self.layer * width..(self.layer + 1) * width)?;
        s.ops.multiply(b.per_token.view_mut_as(&shape)?, input)?;
        s.ops.linear(&*self.projection, b.per_token.view_as(&shape)?, b.mixed.view_mut_as(&stream)?)?;
        s.join(b, Some(&self.norm), None)
    }
}
