//! A mixture of experts as data: the router, the rule, and where the experts' matrices lie in the files.

use super::{FeedForwardPlan, LinearPlan};
use headway_tensor::{Activation, ExpertLimits, Routing};

/// A mixture of experts, and what every token goes through beside it.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsPlan {
    /// From the stream to a logit an expert.
    pub router: LinearPlan,
    /// Added to the scores where experts are chosen: `[experts]`.
    pub correction: Option<String>,
    /// Who goes where.
    pub routing: Routing,
    /// The experts' matrices.
    pub weights: ExpertWeights,
    /// Width between an expert's gate and down.
    pub intermediate: usize,
    /// Between an expert's gate and up.
    pub activation: Activation,
    /// A feed-forward of every token, whose output is added.
    pub shared: Option<Box<FeedForwardPlan>>,
}

/// Where the experts' matrices lie.
#[derive(Clone, Debug, PartialEq)]
pub enum ExpertWeights {
    /// In tensors of its own for every expert: gate and up, then down.
    Each(Vec<(LinearPlan, LinearPlan)>),
    /// In one tensor for all experts.
    Stacked {
        /// Gate and up, in that order of the output, or one tensor with both.
        gate_up: Vec<StackedPlan>,
        /// Whether the tensor has gate and up in turns, output by output.
        interleaved: bool,
        /// Down.
        down: StackedPlan,
    },
}

/// One tensor that holds a matrix of every expert.
#[derive(Clone, Debug, PartialEq)]
pub struct StackedPlan {
    /// Name of the weight tensor.
    pub weight: String,
    /// Name of the bias tensor, `[experts, out]`.
    pub bias: Option<String>,
    /// `[experts, in, out]` instead of `[experts, out, in]`.
    pub transposed: bool,
    /// Width of the input.
    pub in_features: usize,
    /// Width of the output.
    pub out_features: usize,
}

impl StackedPlan {
    /// The shape of the weight tensor.
    pub fn shape(&self, experts: usize) -> [usize; 3] {
        let (rows, cols) = (self.out_features, self.in_features);
        if self.transposed { [experts, cols, rows] } else { [experts, rows, cols] }
    }
}

impl ExpertsPlan {
    /// The sizes that a device's buffers depend on.
    pub fn limits(&self) -> ExpertLimits {
        ExpertLimits {
            experts: self.routing.experts,
            top_k: self.routing.top_k,
            hidden: self.router.in_features,
            intermediate: self.intermediate,
        }
    }
}
