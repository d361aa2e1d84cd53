//! What follows the mixers.

use super::{buffers::Buffers, step::Step};
use crate::models::{
    ModelError,
    load::Loader,
    plan::{ExpertsPlan, FeedForwardPlan},
};
use headway_tensor::{Activation, Experts, Linear, TensorError};
use std::sync::Arc;

pub(super) enum FeedForward {
    Gated(Gated),
    Mixture(Mixture),
    Plain(Plain),
}

/// `down(activation(gate(x)) · up(x))`.
pub(super) struct Gated {
    gate_up: Arc<dyn Linear>,
    down: Arc<dyn Linear>,
    activation: Activation,
    gate_scale: f32,
}

/// `down(activation(up(x)))`.
pub(super) struct Plain {
    up: Arc<dyn Linear>,
    down: Arc<dyn Linear>,
    activation: Activation,
}

impl FeedForward {
    pub fn load(loader: &Loader<'_>, plan: &FeedForwardPlan) -> Result<Self, ModelError> {
        Ok(match plan {
            FeedForwardPlan::Gated { gate_up, down, activation, gate_scale } => Self::Gated(Gated {
                gate_up: loader.linear(gate_up)?,
                down: loader.linear(down)?,
                activation: *activation,
                gate_scale: *gate_scale,
            }),
            FeedForwardPlan::Plain { up, down, activation } => Self::Plain(Plain {
                up: loader.linear(up)?,
                down: loader.linear(down)?,
                activation: *activation,
            }),
            FeedForwardPlan::Experts(plan) => Self::Mixture(Mixture::load(loader, plan)?),
        })
    }

    /// From the stream (`normed` says which) to `mixed`.
    pub fn run(&self, s: &Step<'_>, b: &mut Buffers, normed: bool) -> Result<(), ModelError> {
        match self {
            Self::Gated(f) => f.run(s, b, normed),
            Self::Mixture(f) => f.run(s, b, normed),
            Self::Plain(f) => f.run(s, b, normed),
        }
    }
}

/// Some of many feed-forwards, chosen for each token, on top of one of every token.
pub(super) struct Mixture {
    router: Arc<dyn Linear>,
    experts: Box<dyn Experts>,
    shared: Option<Box<FeedForward>>,
}

impl Mixture {
    fn load(loader: &Loader<'_>, plan: &ExpertsPlan) -> Result<Self, ModelError> {
        let shared = plan.shared.as_ref().map(|f| FeedForward::load(loader, f).map(Box::new)).transpose()?;
        Ok(Self { router: loader.router(&plan.router)?, experts: loader.experts(plan)?, shared })
    }

    fn run(&self, s: &Step<'_>, b: &mut Buffers, normed: bool) -> Result<(), ModelError> {
        if let Some(shared) = &self.shared {
            shared.run(s, b, normed)?;
        }
        let x = if normed { &b.normed } else { &b.hidden };
        let (shape, scores) = ([s.n, s.hidden], [s.n, self.router.out_features()]);
        s.ops.linear(&*self.router, x.view_as(&shape)?, b.router.view_mut_as(&scores)?)?;
        let Some(buffers) = &mut b.experts else {
            return Err(TensorError::Unsupported("experts in a plan that counts none".into()).into());
        };
        let (x, logits, out) = (x.view_as(&shape)?, b.router.view_as(&scores)?, b.mixed.view_mut_as(&shape)?);
        let add = self.shared.is_some();
        Ok(s.ops.mixture_of_experts(&*self.experts, x, logits, &mut **buffers, add, out)?)
    }
}

impl Gated {
    fn run(&self, s: &Step<'_>, b: &mut Buffers, normed: bool) -> Result<(), ModelError> {
        let x = if normed { &b.normed } else { &b.hidden };
        let both = self.gate_up.out_features();
        let (wide, half) = ([s.n, both], [s.n, both / 2]);
        s.ops.linear(&*self.gate_up, x.view_as(&[s.n, s.hidden])?, b.gate_up.view_mut_as(&wide)?)?;
        if self.gate_scale != 1.0 {
            let gate = b.gate_up.view_mut_as(&wide)?.cols(0..both / 2)?;
            s.ops.scale_and_cap(gate, self.gate_scale, None)?;
        }
        s.ops.gated(self.activation, b.gate_up.view_as(&wide)?, b.gated.view_mut_as(&half)?)?;
        Ok(s.ops.linear(&*self.down, b.gated.view_as(&half)?, b.mixed.view_mut_as(&[s.n, s.hidden])?)?)
    }
}

impl Plain {
    fn run(&self, s: &Step<'_>, b: &mut Buffers, normed: bool) -> Result<(), ModelError> {
        let x = if normed { &b.normed } else { &b.hidden };
        let wide = [s.n, self.up.out_features()];
        s.ops.linear(&*self.up, x.view_as(&[s.n, s.hidden])?, b.gated.view_mut_as(&wide)?)?;
        s.ops.activate(self.activation, b.gated.view_mut_as(&wide)?)?;
        Ok(s.ops.linear(&*self.down, b.gated.view_as(&wide)?, b.mixed.view_mut_as(&[s.n, s.hidden])?)?)
    }
}
