//! What a mixture of experts is to a device: the rule that chooses experts, their weights, and the buffers that
//! a step works in. Not for shared experts: those are an ordinary feed-forward, whose output is added to.

use crate::{Activation, LinearPart, TensorError};
use std::any::Any;

/// How router logits become scores.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RouterScores {
    /// Softmax over all experts; the chosen ones' shares are the weights (Mixtral, Qwen3-MoE, DeepSeek V2).
    Softmax,
    /// Sigmoid of each (DeepSeek V3).
    Sigmoid,
    /// The logits themselves choose; softmax over the chosen gives the weights (gpt-oss, Granite).
    SoftmaxOfChosen,
}

/// What a group of experts is worth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GroupScore {
    /// The best score in it (DeepSeek V2, `group_limited_greedy`).
    Best,
    /// The sum of its two best (DeepSeek V3).
    SumOfTwoBest,
}

/// Experts in groups of the same size, of which a token may use some.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpertGroups {
    /// Groups there are.
    pub count: usize,
    /// Groups that a token may use.
    pub chosen: usize,
    /// How they are chosen.
    pub score: GroupScore,
}

/// How a token's router logits become the experts it goes to and their weights. Of equal scores the lower
/// index wins.
///
/// ```
/// use headway_tensor::{RouterScores, Routing};
/// let rule = Routing::top_k(8, 2, RouterScores::Softmax);
/// assert!(rule.check().is_ok());
/// let wrong = Routing { top_k: 9, ..rule }.check().unwrap_err();
/// assert!(wrong.to_string().contains("9 of 8 experts"), "{wrong}");
/// ```
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Routing {
    /// Experts there are.
    pub experts: usize,
    /// Experts that a token goes to.
    pub top_k: usize,
    /// From logits to scores.
    pub scores: RouterScores,
    /// Experts in groups; `None`: any may be chosen.
    pub groups: Option<ExpertGroups>,
    /// Whether the chosen experts' weights are divided by their sum.
    pub renormalize: bool,
    /// Factor on the weights, last.
    pub scale: f32,
}

/// Groups of experts that are supported, at most.
pub const MAX_EXPERT_GROUPS: usize = 64;

impl Routing {
    /// The `top_k` best of `experts`, in no groups, their weights as they are.
    pub fn top_k(experts: usize, top_k: usize, scores: RouterScores) -> Self {
        Self { experts, top_k, scores, groups: None, renormalize: false, scale: 1.0 }
    }

    /// Whether the numbers fit each other.
    ///
    /// # Errors
    /// A sentence that names the ones that don't.
    pub fn check(&self) -> Result<(), TensorError> {
        let wrong = |why: String| Err(TensorError::Unsupported(format!("a mixture of experts: {why}")));
        let Self { experts, top_k, .. } = *self;
        if top_k == 0 || top_k > experts {
            return wrong(format!("a token can't go to {top_k} of {experts} experts"));
        }
        let Some(ExpertGroups { count, chosen, score }) = self.groups else { return Ok(()) };
        if count == 0 || !experts.is_multiple_of(count) || count > MAX_EXPERT_GROUPS {
            return wrong(format!(
                "{experts} experts can't be in {count} groups; a divisor of them, at most {MAX_EXPERT_GROUPS}, is needed"
            ));
        }
        if chosen == 0 || chosen > count || top_k > experts / count * chosen {
            return wrong(format!(
                "{chosen} of {count} groups of {} can't give {top_k} experts",
                experts / count
            ));
        }
        if score == GroupScore::SumOfTwoBest && experts / count < 2 {
            return wrong(format!("groups of {} have no two best", experts / count));
        }
        Ok(())
    }
}

/// One expert's weights.
pub struct ExpertParts {
    /// Gate, then up: `[intermediate, hidden]` each, or both in one part of `[2 x intermediate, hidden]`.
    pub gate_up: Vec<LinearPart>,
    /// `[hidden, intermediate]`.
    pub down: LinearPart,
}

/// Everything that [`Ops::load_experts`](crate::Ops::load_experts) takes in.
pub struct ExpertsSpec {
    /// Who goes where.
    pub routing: Routing,
    /// Added to the scores where experts and groups are chosen, and not to the weights: `[experts]`.
    pub correction: Option<Vec<f32>>,
    /// Between gate and up.
    pub activation: Activation,
    /// One an expert, all of the same shapes.
    pub experts: Vec<ExpertParts>,
}

/// Loaded experts in a device's own form. Only the device that made them looks inside.
///
/// ```
/// use headway_tensor::{Experts, RouterScores, Routing};
/// /// Experts that say what they are, and no more.
/// struct Empty(Routing);
/// impl Experts for Empty {
///     fn routing(&self) -> &Routing {
///         &self.0
///     }
///     fn limits(&self) -> headway_tensor::ExpertLimits {
///         headway_tensor::ExpertLimits { experts: 4, top_k: 2, hidden: 8, intermediate: 16 }
///     }
///     fn bytes(&self) -> usize {
///         0
///     }
/// }
/// let experts: Box<dyn Experts> = Box::new(Empty(Routing::top_k(4, 2, RouterScores::Softmax)));
/// assert_eq!(experts.limits().experts, experts.routing().experts);
/// ```
pub trait Experts: Any + Send + Sync {
    /// The rule that chooses them.
    fn routing(&self) -> &Routing;
    /// Their sizes.
    fn limits(&self) -> ExpertLimits;
    /// Bytes held, beyond what a memory-mapped file holds.
    fn bytes(&self) -> usize;
}

/// The sizes of a layer's experts; of several layers, the largest of each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ExpertLimits {
    /// Experts there are.
    pub experts: usize,
    /// Experts that a token goes to.
    pub top_k: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width between gate and down.
    pub intermediate: usize,
}

impl ExpertLimits {
    /// The larger of each.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            experts: self.experts.max(other.experts),
            top_k: self.top_k.max(other.top_k),
            hidden: self.hidden.max(other.hidden),
            intermediate: self.intermediate.max(other.intermediate),
        }
    }

    /// Tokens that are worked on at a time, in steps of up to `max_tokens`: as many as fit in 128 MiB of buffers,
    /// and one at least. A longer step takes several passes, which read the experts' weights once each.
    pub fn pass_tokens(self, max_tokens: usize) -> usize {
        const MOST: usize = 128 << 20;
        (MOST / self.bytes_of_token().max(1)).clamp(1, max_tokens.max(1))
    }

    /// Bytes of the buffers for steps of up to `max_tokens` tokens.
    pub fn buffer_bytes(self, max_tokens: usize) -> usize {
        self.pass_tokens(max_tokens).saturating_mul(self.bytes_of_token())
    }

    /// Scores, choices, and for each choice an input that the output takes the place of, gate and up, and the
    /// value between: float32.
    fn bytes_of_token(self) -> usize {
        let width = self.intermediate.saturating_mul(3).saturating_add(self.hidden).saturating_add(4);
        self.top_k.saturating_mul(width).saturating_add(self.experts).saturating_mul(4)
    }

    /// Whether buffers of these sizes serve a layer of `other`'s.
    pub fn covers(self, other: Self) -> bool {
        self.max(other) == self
    }
}

/// Buffers of a device that all layers with experts share, one after another.
///
/// ```
/// use headway_tensor::ExpertBuffers;
/// /// Room for some rows.
/// struct Room(Vec<f32>);
/// impl ExpertBuffers for Room {
///     fn bytes(&self) -> usize {
///         size_of_val(&self.0[..])
///     }
/// }
/// let buffers: Box<dyn ExpertBuffers> = Box::new(Room(vec![0.0; 64]));
/// assert_eq!(buffers.bytes(), 256);
/// ```
pub trait ExpertBuffers: Any + Send {
    /// Bytes held.
    fn bytes(&self) -> usize;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_that_can_not_be_say_why() {
        let groups = |count, chosen, score| Routing {
            groups: Some(ExpertGroups { count, chosen, score }),
            ..Routing::top_k(8, 3, RouterScores::Sigmoid)
        };
        assert!(groups(4, 2, GroupScore::SumOfTwoBest).check().is_ok());
        for (rule, words) in [
            (Routing::top_k(8, 0, RouterScores::Softmax), "0 of 8 experts"),
            (Routing::top_k(4, 5, RouterScores::Softmax), "5 of 4 experts"),
            (groups(3, 2, GroupScore::Best), "8 experts can't be in 3 groups"),
            (groups(0, 0, GroupScore::Best), "in 0 groups"),
            (groups(4, 1, GroupScore::Best), "1 of 4 groups of 2 can't give 3"),
            (groups(4, 5, GroupScore::Best), "5 of 4 groups"),
            (groups(8, 4, GroupScore::SumOfTwoBest), "groups of 1 have no two best"),
        ] {
            let e = rule.check().unwrap_err().to_string();
            assert!(e.contains(words), "{e}");
        }
    }

    #[test]
    fn limits_cover_what_is_no_larger() {
        let a = ExpertLimits { experts: 8, top_k: 2, hidden: 96, intermediate: 48 };
        let b = ExpertLimits { experts: 4, top_k: 3, hidden: 96, intermediate: 48 };
        assert!(a.covers(a) && !a.covers(b) && a.max(b).covers(b) && a.max(b).covers(a));
    }

    #[test]
    fn passes_are_as_long_as_the_buffers_allow() {
        let of = |hidden| ExpertLimits { experts: 128, top_k: 8, hidden, intermediate: 768 };
        assert_eq!(of(2048).pass_tokens(512), 512);
        assert_eq!(of(2048).pass_tokens(8192), (128 << 20) / (4 * (8 * (2048 + 3 * 768 + 4) + 128)));
        assert!(of(2048).buffer_bytes(8192) <= 128 << 20);
        assert_eq!((of(1 << 30).pass_tokens(512), of(usize::MAX).pass_tokens(0)), (1, 1));
    }
}
