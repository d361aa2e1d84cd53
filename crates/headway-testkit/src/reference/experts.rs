//! A mixture of experts in float64: every token by itself, experts in the order of their choice.
//!
//! Written from the published rules (arXiv 2405.04434 and 2412.19437 for the groups, gpt-oss's model card for its
//! activation), with sorts where kernels keep lists. Not for speed.

use headway_tensor::{Activation, ExpertGroups, GroupScore, RouterScores, Routing};

/// The rules that published models use, over few experts, and one that chooses all.
pub fn published_rules() -> Vec<(&'static str, Routing)> {
    let groups = |count, chosen, score| Some(ExpertGroups { count, chosen, score });
    let of = Routing::top_k;
    vec![
        ("Qwen3-MoE", Routing { renormalize: true, ..of(8, 3, RouterScores::Softmax) }),
        ("DeepSeek V2 Lite", of(12, 4, RouterScores::Softmax)),
        (
            "DeepSeek V2",
            Routing {
                groups: groups(4, 2, GroupScore::Best),
                scale: 16.0,
                ..of(12, 5, RouterScores::Softmax)
            },
        ),
        (
            "DeepSeek V3",
            Routing {
                groups: groups(4, 2, GroupScore::SumOfTwoBest),
                renormalize: true,
                scale: 2.5,
                ..of(16, 4, RouterScores::Sigmoid)
            },
        ),
        ("gpt-oss", of(8, 2, RouterScores::SoftmaxOfChosen)),
        ("all of one", of(1, 1, RouterScores::Softmax)),
    ]
}

/// What a token's logits come to.
#[derive(Clone, Debug, PartialEq)]
pub struct Routed {
    /// Experts and weights, the best first.
    pub choices: Vec<(usize, f64)>,
    /// The least difference between what was chosen and what was not, over groups and experts: below a few units
    /// of rounding, another arithmetic may choose otherwise.
    pub margin: f64,
}

/// Candidates by falling key, equal ones in their order.
fn ranked(mut candidates: Vec<(usize, f64)>) -> Vec<(usize, f64)> {
    candidates.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    candidates
}

/// The difference between the last of `n` chosen and the first that is not.
fn gap(ranked: &[(usize, f64)], n: usize) -> f64 {
    if n == 0 || n >= ranked.len() { f64::INFINITY } else { ranked[n - 1].1 - ranked[n].1 }
}

/// Chooses a token's experts.
pub fn route(rule: &Routing, logits: &[f64], correction: Option<&[f32]>) -> Routed {
    let exp_sum = |of: &[f64]| of.iter().map(|x| x.exp()).sum::<f64>();
    let scores: Vec<f64> = match rule.scores {
        RouterScores::Softmax => logits.iter().map(|x| x.exp() / exp_sum(logits)).collect(),
        RouterScores::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        RouterScores::SoftmaxOfChosen => logits.to_vec(),
    };
    let key = |e: usize| scores[e] + correction.map_or(0.0, |c| f64::from(c[e]));
    let mut margin = f64::INFINITY;
    let groups = rule.groups.map_or(vec![0], |g| {
        let size = rule.experts / g.count;
        let worth = |group: usize| {
            let keys: Vec<_> = (group * size..(group + 1) * size).map(|e| (e, key(e))).collect();
            let best = if g.score == GroupScore::Best { 1 } else { 2 };
            ranked(keys)[..best].iter().map(|k| k.1).sum::<f64>()
        };
        let all = ranked((0..g.count).map(|i| (i, worth(i))).collect());
        margin = gap(&all, g.chosen);
        all[..g.chosen].iter().map(|g| g.0).collect()
    });
    let size = rule.experts / rule.groups.map_or(1, |g| g.count);
    let candidates = (0..rule.experts).filter(|e| groups.contains(&(e / size))).map(|e| (e, key(e)));
    let all = ranked(candidates.collect());
    margin = margin.min(gap(&all, rule.top_k));
    let chosen: Vec<usize> = all[..rule.top_k].iter().map(|c| c.0).collect();
    let mut weights: Vec<f64> = chosen.iter().map(|e| scores[*e]).collect();
    if rule.scores == RouterScores::SoftmaxOfChosen {
        let sum = exp_sum(&weights);
        weights.iter_mut().for_each(|w| *w = w.exp() / sum);
    }
    if rule.renormalize {
        let sum: f64 = weights.iter().sum();
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    let choices = chosen.into_iter().zip(weights.iter().map(|w| w * f64::from(rule.scale))).collect();
    Routed { choices, margin }
}

/// The error function: `2 / √π · e^(−x²) · Σ 2ⁿ x^(2n + 1) / (2n + 1)!!` (Abramowitz and Stegun 7.1.6), whose terms all have
/// one sign; 1 to the last bit beyond 6.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

/// The value between gate and down.
pub fn gate(activation: Activation, gate: f64, up: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match activation {
        Activation::Silu => gate * sigmoid(gate) * up,
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044_715 * gate.powi(3));
            0.5 * gate * (1.0 + inner.tanh()) * up
        }
        Activation::Relu2 => gate.max(0.0).powi(2) * up,
        Activation::Gelu => 0.5 * gate * (1.0 + erf(gate * std::f64::consts::FRAC_1_SQRT_2)) * up,
        Activation::ClampedSwiglu { alpha, limit } => {
            let (g, u) = (gate.min(limit.into()), up.clamp(-f64::from(limit), limit.into()));
            g * sigmoid(f64::from(alpha) * g) * (u + 1.0)
        }
    }
}

/// One expert's weights, row-major: gate and then up `[2 x intermediate, hidden]`, down `[hidden, intermediate]`.
#[derive(Clone, Debug, Default)]
pub struct Expert {
    /// Gate, then up.
    pub gate_up: Vec<f32>,
    /// `[2 x intermediate]`, or none.
    pub gate_up_bias: Vec<f32>,
    /// Down.
    pub down: Vec<f32>,
    /// `[hidden]`, or none.
    pub down_bias: Vec<f32>,
}

fn linear(w: &[f32], bias: &[f32], x: &[f64]) -> Vec<f64> {
    let dot = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
    let bias = |i: usize| bias.get(i).copied().map_or(0.0, f64::from);
    w.chunks_exact(x.len()).enumerate().map(|(i, row)| dot(row) + bias(i)).collect()
}

/// What the experts of `choices` give for one token.
pub fn mixture(choices: &[(usize, f64)], activation: Activation, experts: &[Expert], x: &[f64]) -> Vec<f64> {
    let mut out = vec![0.0; x.len()];
    for (e, weight) in choices {
        let both = linear(&experts[*e].gate_up, &experts[*e].gate_up_bias, x);
        let (g, u) = both.split_at(both.len() / 2);
        let inner: Vec<f64> = g.iter().zip(u).map(|(g, u)| gate(activation, *g, *u)).collect();
        let result = linear(&experts[*e].down, &experts[*e].down_bias, &inner);
        out.iter_mut().zip(result).for_each(|(o, r)| *o += weight * r);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_tensor::ExpertGroups;

    #[test]
    fn routing_by_hand() {
        let rule = Routing { renormalize: true, scale: 2.0, ..Routing::top_k(4, 2, RouterScores::Softmax) };
        let logits = [1f64.ln(), 2f64.ln(), 4f64.ln(), 3f64.ln()];
        let got = route(&rule, &logits, None);
        assert_eq!(got.choices.iter().map(|c| c.0).collect::<Vec<_>>(), [2, 3]);
        assert!((got.choices[0].1 - 8.0 / 7.0).abs() < 1e-12 && (got.margin - 0.1).abs() < 1e-12);
        let grouped = Routing {
            groups: Some(ExpertGroups { count: 2, chosen: 1, score: GroupScore::SumOfTwoBest }),
            ..rule
        };
        let got = route(&grouped, &logits, Some(&[2.0, 0.0, 0.0, 0.0]));
        assert_eq!(got.choices.iter().map(|c| c.0).collect::<Vec<_>>(), [0, 1]);
        assert!((got.choices[0].1 - 2.0 / 3.0).abs() < 1e-12, "the correction does not weigh");
    }

    #[test]
    fn one_expert_by_hand() {
        let expert = Expert {
            gate_up: vec![1.0, 1.0],
            gate_up_bias: vec![0.0, 1.0],
            down: vec![2.0],
            down_bias: vec![0.5],
        };
        let swiglu = Activation::ClampedSwiglu { alpha: 0.0, limit: 7.0 };
        // Gate 9 becomes 7, up 10 becomes 7: 7 · ½ · 8 = 28.
        assert_eq!(mixture(&[(0, 0.5)], swiglu, &[expert], &[9.0]), [0.5 * (2.0 * 28.0 + 0.5)]);
    }

    /// Abramowitz and Stegun, table 7.1.
    #[test]
    fn the_error_function_has_the_tables_values() {
        for (x, expected) in
            [(0.0, 0.0), (0.5, 0.520_499_877_8), (1.0, 0.842_700_792_9), (2.0, 0.995_322_265_0), (7.0, 1.0)]
        {
            assert!((erf(x) - expected).abs() < 1e-10 && (erf(-x) + expected).abs() < 1e-10, "{x}");
        }
        let half = gate(Activation::Gelu, 1.0, 0.5);
        assert!((half - 0.5 * 0.841_344_746_1).abs() < 1e-10, "{half}");
    }
}
