//! What every block of a step needs, and how a block's output joins the residual stream.

use super::{Pieces, buffers::Buffers};
use crate::models::{ModelError, ModelPlan};
use headway_attention::{AttentionError, AttnLayer, StepEntry, StepMetadata};
use headway_tensor::{Exec, Linear, Ops, Tensor, View};
use std::ops::Range;

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
    /// Where the pass is cut at its mixers' kernels.
    pub pieces: Option<&'a dyn Pieces>,
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
        let (hidden, eps) = (plan.hidden_size, plan.norm_eps);
        Self { ops, n, hidden, eps, encoded, positions, ropes, metadata, pieces: None }
    }

    /// Runs a mixer's kernel over the rows that the step's metadata is of. Where there are more, it writes zeros to
    /// these: a step's padding that its metadata knows nothing of.
    pub fn kernel(
        &self,
        layer: AttnLayer,
        mut run: impl FnMut(&dyn Exec, Range<usize>, &StepEntry) -> Result<(), AttentionError>,
    ) -> Result<(), ModelError> {
        let entry = self.metadata.layer(layer)?;
        let (live, n) = (entry.num_tokens(), self.n);
        let mut run = |cx: &dyn Exec| {
            run(cx, 0..live, entry)?;
            match n.saturating_sub(live) {
                0 => Ok(()),
                padding => run(cx, live..n, &StepEntry::profile_run(padding)),
            }
        };
        Ok(match self.pieces {
            None => run(self.ops),
            Some(pieces) => pieces.kernel(&mut run),
        }?)
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
