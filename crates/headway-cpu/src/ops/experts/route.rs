//! From a token's scores to its experts and their weights, one token at a time. Lives for one call; not for
//! logits: softmax and sigmoid are applied before.

use crate::{Isa, kernels::elementwise as kernel};
use headway_tensor::experts::MAX_EXPERT_GROUPS;
use headway_tensor::{ExpertGroups, GroupScore, RouterScores, Routing};

/// An expert that a token goes to, and what its output counts.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub(super) struct Choice {
    pub expert: u32,
    pub weight: f32,
}

/// A row of router logits as scores, in place.
pub(super) fn scores(isa: Isa, rule: &Routing, logits: &mut [f32]) {
    match rule.scores {
        RouterScores::Softmax => kernel::softmax(isa, logits),
        RouterScores::Sigmoid => kernel::sigmoid(isa, logits),
        RouterScores::SoftmaxOfChosen => {}
    }
}

/// Fills `choices` with the experts of a token, the best first, and their weights.
pub(super) fn choose(rule: &Routing, scores: &[f32], correction: Option<&[f32]>, choices: &mut [Choice]) {
    let key = |e: usize| scores[e] + correction.map_or(0.0, |c| c[e]);
    let size = rule.groups.map_or(scores.len(), |g| rule.experts / g.count);
    let allowed = rule.groups.map_or(u64::MAX, |g| allowed_groups(&g, size, &key));
    let candidates = (0..scores.len()).filter(|e| allowed >> (e / size) & 1 == 1);
    best(candidates.map(|e| (e, key(e))), choices);
    for c in &mut *choices {
        c.weight = scores[c.expert as usize];
    }
    if rule.scores == RouterScores::SoftmaxOfChosen {
        let max = choices.iter().fold(f32::NEG_INFINITY, |m, c| m.max(c.weight));
        choices.iter_mut().for_each(|c| c.weight = kernel::exp(c.weight - max));
    }
    if rule.renormalize || rule.scores == RouterScores::SoftmaxOfChosen {
        // The addend keeps a sum of zeros from giving NaN.
        let sum = choices.iter().map(|c| c.weight).sum::<f32>() + 1e-20;
        choices.iter_mut().for_each(|c| c.weight /= sum);
    }
    if rule.scale != 1.0 {
        choices.iter_mut().for_each(|c| c.weight *= rule.scale);
    }
}

/// The groups that a token may use, one bit each.
fn allowed_groups(groups: &ExpertGroups, size: usize, key: &dyn Fn(usize) -> f32) -> u64 {
    let worth = |g: usize| {
        let mut two = [Choice { expert: 0, weight: f32::NEG_INFINITY }; 2];
        let two = &mut two[..if groups.score == GroupScore::Best { 1 } else { 2 }];
        best((g * size..(g + 1) * size).map(|e| (e, key(e))), two);
        two.iter().map(|c| c.weight).sum::<f32>()
    };
    let mut chosen = [Choice::default(); MAX_EXPERT_GROUPS];
    let chosen = &mut chosen[..groups.chosen];
    best((0..groups.count).map(|g| (g, worth(g))), chosen);
    chosen.iter().fold(0, |bits, c| bits | 1 << c.expert)
}

/// The candidates with the highest keys, highest first; of equal ones the earlier. All different, whatever the
/// keys are, NaN too.
fn best(candidates: impl Iterator<Item = (usize, f32)>, best: &mut [Choice]) {
    let mut n = 0;
    for (expert, key) in candidates {
        let mut at = if n < best.len() {
            n += 1;
            n - 1
        } else if best.last().is_some_and(|last| key > last.weight) {
            n - 1
        } else {
            continue;
        };
        while at > 0 && key > best[at - 1].weight {
            best[at] = best[at - 1];
            at -= 1;
        }
        best[at] = Choice { expert: expert as u32, weight: key };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(rule: &Routing, scores: &[f32], correction: Option<&[f32]>) -> Vec<(u32, f32)> {
        let mut out = vec![Choice::default(); rule.top_k];
        choose(rule, scores, correction, &mut out);
        out.iter().map(|c| (c.expert, c.weight)).collect()
    }

    #[test]
    fn the_best_come_first_and_ties_go_to_the_lower_index() {
        let rule = Routing::top_k(5, 3, RouterScores::Softmax);
        assert_eq!(chosen(&rule, &[0.1, 0.3, 0.1, 0.3, 0.2], None), [(1, 0.3), (3, 0.3), (4, 0.2)]);
        let nan = chosen(&rule, &[f32::NAN; 5], None);
        assert_eq!(nan.iter().map(|c| c.0).collect::<Vec<_>>(), [0, 1, 2], "different even so");
    }

    #[test]
    fn a_correction_chooses_and_does_not_weigh() {
        let rule = Routing { renormalize: true, scale: 2.0, ..Routing::top_k(3, 2, RouterScores::Sigmoid) };
        let got = chosen(&rule, &[0.5, 0.25, 0.25], Some(&[-1.0, 0.0, 0.1]));
        assert_eq!(got, [(2, 1.0), (1, 1.0)]);
    }

    #[test]
    fn groups_by_their_best_and_by_their_two_best() {
        let of = |score| Routing {
            groups: Some(ExpertGroups { count: 2, chosen: 1, score }),
            ..Routing::top_k(6, 2, RouterScores::Softmax)
        };
        let scores = [0.9, 0.1, 0.1, 0.6, 0.5, 0.5];
        assert_eq!(chosen(&of(GroupScore::Best), &scores, None), [(0, 0.9), (1, 0.1)]);
        assert_eq!(chosen(&of(GroupScore::SumOfTwoBest), &scores, None), [(3, 0.6), (4, 0.5)]);
        // Negative keys too are better than those of a group that is not chosen.
        let correction = [-2.0, -2.0, -2.0, -1.0, -1.0, -1.0];
        let got = chosen(&of(GroupScore::SumOfTwoBest), &scores, Some(&correction));
        assert_eq!(got, [(3, 0.6), (4, 0.5)]);
    }

    #[test]
    fn softmax_of_the_chosen_logits() {
        let rule = Routing::top_k(3, 2, RouterScores::SoftmaxOfChosen);
        let got = chosen(&rule, &[1.0, 1000.0, 1000.0], None);
        assert_eq!(got, [(1, 0.5), (2, 0.5)]);
    }
}
