//! What follows the mixers.

use super::{buffers::Buffers, step::Step};
use crate::models::{ModelError, load::Loader, plan::FeedForwardPlan};
use headway_tensor::{Activation, Linear};
use std::sync::Arc;

pub(super) enum FeedForward {
    Gated(Gated),
}

/// `down(activation(gate(x)) · up(x))`.
pub(super) struct Gated {
    gate_up: Arc<dyn Linear>,
    down: Arc<dyn Linear>,
    activation: Activation,
}

impl FeedForward {
    pub fn load(loader: &Loader<'_>, plan: &FeedForwardPlan) -> Result<Self, ModelError> {
        Ok(match plan {
            FeedForwardPlan::Gated { gate_up, down, activation } => Self::Gated(Gated {
                gate_up: loader.linear(gate_up)?,
                down: loader.linear(down)?,
                activation: *activation,
            }),
        })
    }

    /// From the stream (`normed` says which) to `mixed`.
    pub fn run(&self, s: &Step<'_>, b: &mut Buffers, normed: bool) -> Result<(), ModelError> {
        match self {
            Self::Gated(f) => f.run(s, b, normed),
        }
    }
}

impl Gated {
    fn run(&self, s: &Step<'_>, b: &mut Buffers, normed: bool) -> Result<(), ModelError> {
        let x = if normed { &b.normed } else { &b.hidden };
        let both = self.gate_up.out_features();
        let (wide, half) = ([s.n, both], [s.n, both / 2]);
        s.ops.linear(&*self.gate_up, x.view_as(&[s.n, s.hidden])?, b.gate_up.view_mut_as(&wide)?)?;
        s.ops.gated(self.activation, b.gate_up.view_as(&wide)?, b.gated.view_mut_as(&half)?)?;
        Ok(s.ops.linear(&*self.down, b.gated.view_as(&half)?, b.mixed.view_mut_as(&[s.n, s.hidden])?)?)
    }
}
