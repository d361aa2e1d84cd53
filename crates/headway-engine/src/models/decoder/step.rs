//! What every block of a step needs, and how a block's output joins the residual stream.

use super::buffers::Buffers;
use crate::models::{ModelError, ModelPlan};
use headway_attention::StepMetadata;
use headway_tensor::{Linear, Ops, Tensor, View};

/// One step, as the blocks see it.
pub(super) struct Step<'a> {
    pub ops: &'a dyn Ops,
    /// New tokens.
    pub n: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Of every RMS norm.
    pub eps: f32,
    /// Tokens of the encoder's output that belong to this step.
    pub encoded: usize,
    /// `[n]`.
    pub positions: &'a View<i32>,
    /// Tables of the plan's rotary embeddings.
    pub ropes: &'a [Tensor],
    /// Every attention group's metadata.
    pub metadata: &'a StepMetadata,
}

impl<'a> Step<'a> {
    /// `n` new tokens of a model, beside `encoded` tokens of its encoder's output.
    pub fn new(
        ops: &'a dyn Ops,
        plan: &ModelPlan,
        ropes: &'a [Tensor],
        n: usize,
        positions: &'a View<i32>,
        metadata: &'a StepMetadata,
        encoded: usize,
    ) -> Self {
        Self { ops, n, hidden: plan.hidden_size, eps: plan.norm_eps, encoded, positions, ropes, metadata }
    }

    /// A mixer's first projection: the stream, `normed` or not, to `qkv`.
    pub fn project_in(&self, b: &mut Buffers, normed: bool, to: &dyn Linear) -> Result<(), ModelError> {
        let x = if normed { &b.normed } else { &b.hidden };
        let out = b.qkv.view_mut_as(&[self.n, to.out_features()])?;
        Ok(self.ops.linear(to, x.view_as(&[self.n, self.hidden])?, out)?)
    }

    /// A mixer's last projection: `heads` to `mixed`, times a factor.
    pub fn project_out(&self, b: &mut Buffers, from: &dyn Linear, factor: f32) -> Result<(), ModelError> {
        let x = b.heads.view_as(&[self.n, from.in_features()])?;
        self.ops.linear(from, x, b.mixed.view_mut_as(&[self.n, self.hidden])?)?;
        self.scale(b, factor)
    }

    /// As [`Step::project_out`], from `codes`.
    pub fn project_codes(&self, b: &mut Buffers, from: &dyn Linear, factor: f32) -> Result<(), ModelError> {
        let x = b.codes.view_as(&[self.n, from.in_features()])?;
        self.ops.linear(from, x, b.mixed.view_mut_as(&[self.n, self.hidden])?)?;
        self.scale(b, factor)
    }

    /// Adds a block's output (normed first, where the plan says so) to the residual stream, and norms
    /// the stream for the next block where that one reads it normed.
    pub fn join(
        &self,
        b: &mut Buffers,
        post: Option<&Tensor>,
        next: Option<&Tensor>,
    ) -> Result<(), ModelError> {
        let shape = [self.n, self.hidden];
        if let Some(w) = post {
            self.ops.rms_norm_in_place(b.mixed.view_mut_as(&shape)?, w, self.eps)?;
        }
        let (x, acc) = (b.mixed.view_as(&shape)?, b.hidden.view_mut_as(&shape)?);
        match next {
            Some(w) => self.ops.add_rms_norm(acc, x, w, self.eps, b.normed.view_mut_as(&shape)?)?,
            None => self.ops.add(acc, x)?,
        }
        Ok(())
    }

    /// Scales a block's output.
    pub fn scale(&self, b: &mut Buffers, factor: f32) -> Result<(), ModelError> {
        if factor == 1.0 {
            return Ok(());
        }
        Ok(self.ops.scale_and_cap(b.mixed.view_mut_as(&[self.n, self.hidden])?, factor, None)?)
    }

    /// Norms the stream for a block that follows no other.
    pub fn norm(&self, b: &mut Buffers, weight: &Tensor) -> Result<(), ModelError> {
        let shape = [self.n, self.hidden];
        let out = b.normed.view_mut_as(&shape)?;
        Ok(self.ops.rms_norm(b.hidden.view_as(&shape)?, weight, self.eps, out)?)
    }
}
