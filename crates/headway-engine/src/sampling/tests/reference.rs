//! A plain double precision version of the whole chain, with a full sort, and random rows against it.

use proptest::prelude::*;

use super::{Row, Sampler, SamplingParams, distribution};
use crate::sampling::{logprobs, uniform};

/// The distribution by the definition of each step, in vLLM's order. `margin` receives how far any decision was from
/// falling the other way.
fn plain(logits: &[f32], params: &SamplingParams, tokens: &[u32], margin: &mut f64) -> Vec<f64> {
    let mut x: Vec<f64> = logits.iter().map(|l| f64::from(*l)).collect();
    let penalty = f64::from(params.repetition_penalty);
    for (i, x) in x.iter_mut().enumerate().filter(|(i, _)| tokens.contains(&(*i as u32))) {
        *x = if logits[i] > 0.0 { *x / penalty } else { *x * penalty };
    }
    x.iter_mut().for_each(|x| *x /= f64::from(params.temperature));
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|a, b| x[*b].total_cmp(&x[*a]).then(a.cmp(b)));
    let top = x[order[0]];
    let mut weights: Vec<f64> = x.iter().map(|x| (x - top).exp()).collect();
    let min_p = f64::from(params.min_p);
    for w in &mut weights {
        *margin = margin.min((*w - min_p).abs() / min_p.max(1e-30));
        *w = if *w >= min_p { *w } else { 0.0 };
    }
    if params.top_k > 0 && params.top_k < order.len() {
        let (last, next) = (x[order[params.top_k - 1]], x[order[params.top_k]]);
        *margin = margin.min(if last == next { 1.0 } else { last - next });
        order[params.top_k..].iter().for_each(|i| weights[*i] = 0.0);
    }
    let total: f64 = weights.iter().sum();
    let (mut before, need) = (0.0, f64::from(params.top_p) * total);
    for &i in order.iter().filter(|_| params.top_p < 1.0) {
        if before >= need {
            weights[i] = 0.0;
        }
        before += weights[i];
        *margin = margin.min((before - need).abs() / total);
    }
    let total: f64 = weights.iter().sum();
    weights.iter().map(|w| w / total).collect()
}

prop_compose! {
    fn params()(
        temperature in 0.1f32..3.0,
        top_k in prop_oneof![Just(0usize), 1usize..400],
        top_p in prop_oneof![Just(1.0f32), 0.01f32..1.0],
        min_p in prop_oneof![Just(0.0f32), 0.001f32..0.5],
        repetition_penalty in prop_oneof![Just(1.0f32), 0.5f32..2.0],
    ) -> SamplingParams {
        SamplingParams { temperature, top_k, top_p, min_p, repetition_penalty, ..SamplingParams::default() }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]
    #[test]
    fn the_distribution_is_that_of_the_plain_version(
        params in params(),
        logits in prop::collection::vec(-12.0f32..12.0, 1..300),
        tokens in prop::collection::vec(0u32..300, 0..20),
    ) {
        let tokens: Vec<u32> = tokens.into_iter().filter(|t| (*t as usize) < logits.len()).collect();
        let mut margin = f64::INFINITY;
        let expected = plain(&logits, &params, &tokens, &mut margin);
        // Where single precision may decide the other way, there is nothing to compare.
        prop_assume!(margin > 1e-4);
        let got = distribution(&logits, &params, &tokens);
        for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
            // Logits of up to 12, twice that with the penalty, are rounded to 2^-24 of themselves before they are
            // divided by the temperature.
            let tolerance = 2e-6 + 4e-6 / f64::from(params.temperature);
            let close = (got - expected).abs() <= tolerance * expected.max(1e-3);
            prop_assert!(close && (*got == 0.0) == (*expected < 1e-37), "token {}: {} for {}", i, got, expected);
        }
    }

    /// Few distinct values: ties everywhere, and each is broken by the lower id. Powers of two keep sums exact.
    #[test]
    fn ties_are_broken_by_the_lower_id(
        levels in prop::collection::vec(0u8..3, 1..300),
        top_k in 0usize..320,
        scale in any::<bool>(),
    ) {
        let logits: Vec<f32> = levels.iter().map(|l| f32::from(*l) - if scale { 1.0 } else { 0.0 }).collect();
        let params = SamplingParams { top_k, ..SamplingParams::default() };
        let expected = plain(&logits, &params, &[], &mut f64::INFINITY.clone());
        let got = distribution(&logits, &params, &[]);
        for (got, expected) in got.iter().zip(&expected) {
            prop_assert!((got - expected).abs() <= 1e-6);
        }
    }

    /// The token that is drawn is the one at the stream's number on the distribution laid out by token id.
    #[test]
    fn the_draw_is_the_inverse_of_the_distribution(
        params in params(),
        logits in prop::collection::vec(-6.0f32..6.0, 1..3000),
        seed in any::<u64>(),
        position in 0usize..50,
    ) {
        let tokens = vec![0; position];
        let row = Row { params: &params, tokens: &tokens, drafted: &[], seed };
        let token = Sampler::new().sample(&mut logits.clone(), &row).unwrap().token as usize;
        let distribution = distribution(&logits, &params, &tokens);
        let u = uniform(seed, position as u64);
        let before: f64 = distribution[..token].iter().sum();
        prop_assert!(distribution[token] > 0.0);
        prop_assert!(before <= u + 1e-6 && u - 1e-6 <= before + distribution[token]);
    }

    #[test]
    fn logprobs_are_those_of_the_plain_version(
        logits in prop::collection::vec(-30.0f32..30.0, 1..300),
        n in 0usize..310,
    ) {
        let total: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        let got = logprobs(&logits, n).unwrap();
        prop_assert_eq!(got.top.len(), n.min(logits.len()));
        for (entry, i) in got.top.iter().zip(order) {
            prop_assert_eq!(entry.token_id as usize, i);
            prop_assert!((f64::from(entry.logprob) - (f64::from(logits[i]) - total.ln())).abs() < 1e-5);
        }
    }
}
