//! A plain double precision version of the whole chain, with a full sort, and random rows against it.

use proptest::prelude::*;

use super::{Row, Sampler, SamplingParams, distribution_of};
use crate::sampling::{logprobs, uniform};

/// What the plain version found, and how sure it is of it.
struct Plain {
    distribution: Vec<f64>,
    /// How far any decision was from falling the other way.
    margin: f64,
    /// The largest magnitude that a logit had on its way: single precision rounds in proportion to it.
    size: f64,
}

/// The distribution by the definition of each step, in vLLM's order.
fn plain(logits: &[f32], row: &Row<'_>) -> Plain {
    let (params, mut margin, mut size) = (row.params, f64::INFINITY, 0f64);
    let all: Vec<usize> = row.tokens.iter().chain(row.drafted).map(|t| *t as usize).collect();
    let answer = &all[row.prompt_len..];
    let is_end = |i: usize| row.eos_ids.contains(&(i as u32)) || params.stop_token_ids.contains(&(i as u32));
    let held_open = answer.len() < params.min_tokens && !(0..logits.len()).all(is_end);
    let adjusted = |(i, logit): (usize, &f32)| {
        let count = answer.iter().filter(|t| **t == i).count();
        let biases = params.logit_bias.iter().filter(|(token, _)| *token as usize == i);
        let biased = f64::from(*logit) + biases.map(|(_, bias)| f64::from(*bias)).sum::<f64>();
        let repetition = f64::from(params.repetition_penalty);
        let repeated = match (all.contains(&i), biased > 0.0) {
            (true, true) => biased / repetition,
            (true, false) => biased * repetition,
            (false, _) => biased,
        };
        let counted = repeated - f64::from(params.frequency_penalty) * count as f64;
        let present = counted - if count > 0 { f64::from(params.presence_penalty) } else { 0.0 };
        size = [*logit as f64, biased, repeated, counted, present].iter().fold(size, |s, x| s.max(x.abs()));
        if held_open && is_end(i) { f64::NEG_INFINITY } else { present / f64::from(params.temperature) }
    };
    let x: Vec<f64> = logits.iter().enumerate().map(adjusted).collect();
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|a, b| x[*b].total_cmp(&x[*a]).then(a.cmp(b)));
    let top = x[order[0]];
    let mut weights: Vec<f64> = x.iter().map(|x| (x - top).exp()).collect();
    let min_p = f64::from(params.min_p);
    for w in weights.iter_mut().filter(|_| min_p > 0.0) {
        margin = margin.min((*w - min_p).abs() / min_p);
        *w = if *w >= min_p { *w } else { 0.0 };
    }
    if params.top_k > 0 && params.top_k < order.len() {
        let (last, next) = (x[order[params.top_k - 1]], x[order[params.top_k]]);
        margin = margin.min(if last == next { 1.0 } else { last - next });
        order[params.top_k..].iter().for_each(|i| weights[*i] = 0.0);
    }
    let total: f64 = weights.iter().sum();
    let (mut before, need) = (0.0, f64::from(params.top_p) * total);
    for &i in order.iter().filter(|_| params.top_p < 1.0) {
        if before >= need {
            weights[i] = 0.0;
        }
        before += weights[i];
        margin = margin.min((before - need).abs() / total);
    }
    let total: f64 = weights.iter().sum();
    Plain { distribution: weights.iter().map(|w| w / total).collect(), margin, size }
}

prop_compose! {
    fn params()(
        temperature in 0.1f32..3.0,
        top_k in prop_oneof![Just(0usize), 1usize..400],
        top_p in prop_oneof![Just(1.0f32), 0.01f32..1.0],
        min_p in prop_oneof![Just(0.0f32), 0.001f32..0.5],
        repetition_penalty in prop_oneof![Just(1.0f32), 0.5f32..2.0],
        presence_penalty in prop_oneof![Just(0.0f32), -2.0f32..=2.0],
        frequency_penalty in prop_oneof![Just(0.0f32), -2.0f32..=2.0],
        logit_bias in prop_oneof![Just(vec![]), prop::collection::vec((0u32..40, -100.0f32..=100.0), 0..6)],
        min_tokens in prop_oneof![Just(0usize), 0usize..12],
        stop_token_ids in prop::collection::vec(0u32..40, 0..4),
    ) -> SamplingParams {
        SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias: logit_bias.into(),
            min_tokens,
            stop_token_ids,
            ..SamplingParams::default()
        }
    }
}

/// The same parameters, biased within the vocabulary alone.
fn within(params: SamplingParams, vocab_size: usize) -> SamplingParams {
    let bias = params.logit_bias.iter().copied().filter(|(token, _)| (*token as usize) < vocab_size);
    SamplingParams { logit_bias: bias.collect(), ..params }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, max_global_rejects: 20_000, ..ProptestConfig::default() })]
    #[test]
    fn the_distribution_is_that_of_the_plain_version(
        params in params(),
        logits in prop::collection::vec(-12.0f32..12.0, 1..300),
        tokens in prop::collection::vec(prop_oneof![0u32..300, 0u32..6], 0..30),
        prompt_len in 0usize..30,
        num_drafted in 0usize..5,
        eos_ids in prop::collection::vec(0u32..40, 0..3),
    ) {
        let params = within(params, logits.len());
        let tokens: Vec<u32> = tokens.into_iter().filter(|t| (*t as usize) < logits.len()).collect();
        let (tokens, drafted) = tokens.split_at(tokens.len().saturating_sub(num_drafted));
        let prompt_len = prompt_len.min(tokens.len());
        let row = Row { prompt_len, drafted, eos_ids: &eos_ids, ..Row::new(&params, tokens, 0) };
        let expected = plain(&logits, &row);
        let error = 2e-6 + 2e-7 * expected.size / f64::from(params.temperature);
        // Where single precision may decide the other way, there is nothing to compare.
        prop_assume!(expected.margin > 5.0 * error);
        let got = distribution_of(&logits, &row);
        for (i, (got, expected)) in got.iter().zip(&expected.distribution).enumerate() {
            let close = (got - expected).abs() <= error * expected.max(1e-3);
            // The smallest weights are 0 in single precision.
            let both = (*got == 0.0) == (*expected == 0.0) || *expected < 1e-35;
            prop_assert!(close && both, "token {}: {} for {}", i, got, expected);
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
        let row = Row::new(&params, &[], 0);
        let expected = plain(&logits, &row).distribution;
        let got = distribution_of(&logits, &row);
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
        let params = within(params, logits.len());
        let tokens = vec![0; position];
        let row = Row { prompt_len: position / 2, ..Row::new(&params, &tokens, seed) };
        let token = Sampler::new().sample(&mut logits.clone(), &row).unwrap().token as usize;
        let distribution = distribution_of(&logits, &row);
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
