//! Verified answers of a small made-up model against plain decoding: the same tokens for the same seed, and over many
//! seeds the distribution that plain sampling has.

use crate::sampling::{Row, Sampler, SamplingError, SamplingParams};
use crate::speculation::{SpeculationStats, verify};

const VOCAB: usize = 5;

/// The logits that follow `tokens`: another row after every pair of tokens.
fn model(tokens: &[u32]) -> Vec<f32> {
    let mix = |h: u64, t: &u32| (h ^ u64::from(*t)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let seed = tokens.iter().rev().take(2).fold(11, mix);
    (0..VOCAB as u64).map(|i| (crate::sampling::uniform(seed, i) * 3.0) as f32).collect()
}

fn plain(params: &SamplingParams, seed: u64, prompt: &[u32], len: usize) -> Vec<u32> {
    let (mut sampler, mut tokens) = (Sampler::new(), prompt.to_vec());
    while tokens.len() < prompt.len() + len {
        let row = Row { prompt_len: prompt.len(), ..Row::new(params, &tokens, seed) };
        let sampled = sampler.sample(&mut model(&tokens), &row).expect("good logits");
        tokens.push(sampled.token);
    }
    tokens.split_off(prompt.len())
}

/// A draft that is neither always right nor always wrong.
fn guess(tokens: &[u32], most: usize) -> Vec<u32> {
    let mut all = tokens.to_vec();
    for i in 0..most {
        let row = model(&all);
        let best = (0..VOCAB).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap_or(0);
        all.push((best as u32 + u32::from(i % 3 == 2)) % VOCAB as u32);
    }
    all.split_off(tokens.len())
}

/// Steps with `k` drafts each; the first step has fewer where the answer is short.
fn drafted(
    params: &SamplingParams,
    seed: u64,
    prompt: &[u32],
    len: usize,
    k: usize,
    stats: &mut SpeculationStats,
) -> Vec<u32> {
    let (mut sampler, mut tokens) = (Sampler::new(), prompt.to_vec());
    while tokens.len() < prompt.len() + len {
        let drafts = guess(&tokens, k.min(prompt.len() + len - tokens.len() - 1));
        let history = |i: usize| [&tokens[..], &drafts[..i]].concat();
        let mut logits: Vec<f32> = (0..=drafts.len()).flat_map(|i| model(&history(i))).collect();
        let row = Row { prompt_len: prompt.len(), ..Row::new(params, &tokens, seed) };
        let mut new = vec![];
        let take = |s: crate::sampling::Sampled| {
            new.push(s.token);
            true
        };
        let sampled = verify(&mut sampler, &mut logits, &row, &drafts, |_| (), take).expect("good logits");
        assert_eq!(sampled, new.len());
        assert_eq!(new[..sampled - 1], drafts[..sampled - 1], "all but the last are drafts");
        stats.record(drafts.len(), sampled - 1);
        tokens.extend(new);
    }
    tokens.split_off(prompt.len())
}

fn all_params() -> Vec<SamplingParams> {
    let base = SamplingParams::default();
    vec![
        SamplingParams::greedy(),
        base.clone(),
        SamplingParams { temperature: 0.6, top_k: 3, ..base.clone() },
        SamplingParams { top_p: 0.7, repetition_penalty: 1.5, ..base.clone() },
        SamplingParams { min_p: 0.3, temperature: 1.7, repetition_penalty: 0.8, ..base.clone() },
        SamplingParams { presence_penalty: 0.8, frequency_penalty: 0.3, ..base.clone() },
        SamplingParams { frequency_penalty: -0.2, logit_bias: [(4, 0.7), (0, -1.0)].into(), ..base.clone() },
        SamplingParams { min_tokens: 9, stop_token_ids: vec![3], ..base },
    ]
}

#[test]
fn token_for_token_as_plain_decoding() {
    for params in all_params() {
        let mut stats = SpeculationStats::default();
        for seed in 0..40 {
            let expected = plain(&params, seed, &[1, 2], 50);
            for k in [1, 2, 5] {
                let got = drafted(&params, seed, &[1, 2], 50, k, &mut stats);
                assert_eq!(got, expected, "{params:?}, seed {seed}, k {k}");
            }
        }
        let s = stats.summary();
        assert!(s.acceptance_rate > 0.1 && s.acceptance_rate < 0.95, "a draft is right at times: {s}");
    }
}

/// The joint distribution of the first three tokens over 40,000 seeds against the product of the distributions that the
/// sampler draws from, each after its own history (Pearson's chi-square).
#[test]
fn over_many_seeds_as_the_processed_distribution() {
    const SEEDS: u64 = 40_000;
    let prompt = [1, 2];
    for params in all_params().into_iter().skip(1) {
        let mut counts = vec![0u32; VOCAB * VOCAB * VOCAB];
        let cell = |t: &[u32]| t.iter().fold(0, |c, t| c * VOCAB + *t as usize);
        let mut stats = SpeculationStats::default();
        for seed in 0..SEEDS {
            counts[cell(&drafted(&params, seed, &prompt, 3, 2, &mut stats))] += 1;
        }
        let mut sampler = Sampler::new();
        let mut after = |history: &[u32]| {
            let tokens = [&prompt, history].concat();
            let row = Row { prompt_len: prompt.len(), ..Row::new(&params, &tokens, 0) };
            sampler.distribution(&mut model(&tokens), &row).expect("good logits")
        };
        let mut expected = vec![0.0; counts.len()];
        for a in 0..VOCAB as u32 {
            for b in 0..VOCAB as u32 {
                let before = after(&[])[a as usize] * after(&[a])[b as usize];
                let last = after(&[a, b]);
                (0..VOCAB as u32).for_each(|c| expected[cell(&[a, b, c])] = before * last[c as usize]);
            }
        }
        assert!((expected.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        let (mut statistic, mut cells, mut rest) = (0.0, 0.0, (0.0, 0.0));
        for (count, p) in counts.iter().zip(&expected) {
            let (seen, mean) = (f64::from(*count), p * SEEDS as f64);
            if *p == 0.0 {
                assert_eq!(*count, 0, "a token of probability 0 was drawn");
            } else if mean < 8.0 {
                rest = (rest.0 + seen, rest.1 + mean);
            } else {
                statistic += (seen - mean).powi(2) / mean;
                cells += 1.0;
            }
        }
        if rest.1 > 8.0 {
            statistic += (rest.0 - rest.1).powi(2) / rest.1;
            cells += 1.0;
        }
        let freedom: f64 = cells - 1.0;
        println!(
            "{params:?}: chi-square {statistic:.1} of {freedom} degrees of freedom; {}",
            stats.summary()
        );
        assert!(freedom >= 5.0);
        // Mean `freedom`, variance twice that: five standard deviations.
        assert!(statistic < freedom + 5.0 * (2.0 * freedom).sqrt(), "{params:?}: {statistic} of {freedom}");
    }
}

/// Rejection sampling by its definition: a draft stands with its own probability, and the token in its place follows
/// what is left of the distribution without it.
#[test]
fn a_draft_stands_with_its_probability_and_is_replaced_from_the_rest() {
    const SEEDS: u32 = 40_000;
    let params = SamplingParams::default();
    let tokens = [3, 1];
    let row = |seed| Row::new(&params, &tokens, seed);
    let p = Sampler::new().distribution(&mut model(&tokens), &row(0)).expect("good logits");
    for draft in 0..VOCAB as u32 {
        let mut counts = [0u32; VOCAB];
        let mut stood = 0;
        for seed in 0..SEEDS {
            let mut logits = [model(&tokens), model(&[3, 1, draft])].concat();
            let mut first = None;
            let take = |s: crate::sampling::Sampled| {
                first.get_or_insert(s.token);
                true
            };
            let seed = row(u64::from(seed));
            let n =
                verify(&mut Sampler::new(), &mut logits, &seed, &[draft], |_| (), take).expect("good logits");
            match n {
                2 => stood += 1,
                _ => counts[first.expect("a token") as usize] += 1,
            }
        }
        let near = |seen: u32, of: u32, p: f64| {
            let (mean, deviation) = (p * f64::from(of), (p * (1.0 - p) * f64::from(of)).sqrt());
            assert!(
                (f64::from(seen) - mean).abs() < 5.0 * deviation.max(1.0),
                "{seen} of {of}, expected {mean}"
            );
        };
        let sure = p[draft as usize];
        near(stood, SEEDS, sure);
        assert_eq!(counts[draft as usize], 0, "a rejected draft does not come back");
        for (token, count) in counts.iter().enumerate().filter(|(t, _)| *t != draft as usize) {
            near(*count, SEEDS - stood, p[token] / (1.0 - sure));
        }
    }
}

#[test]
fn rows_after_a_rejected_draft_are_not_looked_at() {
    let params = SamplingParams::greedy();
    let row = Row::new(&params, &[0], 0);
    let best = |token: usize| (0..VOCAB).map(|i| if i == token { 1.0 } else { 0.0 }).collect::<Vec<f32>>();
    let run = |rows: &[Vec<f32>], drafts: &[u32], most: usize| {
        let (mut looked, mut taken) = (0, vec![]);
        let take = |s: crate::sampling::Sampled| {
            taken.push(s.token);
            taken.len() < most
        };
        let mut logits = rows.concat();
        let found = verify(&mut Sampler::new(), &mut logits, &row, drafts, |_| looked += 1, take);
        (found, looked, taken)
    };
    let nan = vec![f32::NAN; VOCAB];
    assert_eq!(run(&[best(2), best(3), nan.clone()], &[2, 4], 9), (Ok(2), 2, vec![2, 3]));
    assert_eq!(run(&[best(2), best(4), best(1)], &[2, 4], 9), (Ok(3), 3, vec![2, 4, 1]));
    assert_eq!(run(&[best(2), best(4), best(1)], &[2, 4], 1), (Ok(1), 1, vec![2]), "the request has ended");
    let (found, looked, taken) = run(&[best(2), nan], &[2], 9);
    assert!(matches!(found, Err(SamplingError::Nan { .. })));
    assert_eq!((looked, taken), (2, vec![2]));
    assert_eq!(run(&[], &[], 9).0, Err(SamplingError::Empty));
}

#[test]
fn statistics_are_by_position() {
    let mut stats = SpeculationStats::default();
    for (drafted, accepted) in [(3, 3), (3, 1), (0, 0), (2, 0), (1, 1)] {
        stats.record(drafted, accepted);
    }
    assert_eq!((stats.drafts, &stats.drafted[..], &stats.accepted[..]), (4, &[4, 3, 2][..], &[3, 1, 1][..]));
    let s = stats.summary();
    assert_eq!((s.drafted_tokens, s.accepted_tokens, s.mean_accepted_length), (9, 5, 2.25));
    assert_eq!(
        s.to_string(),
        "drafted 9 tokens in 4 drafts, accepted 5 (56 %); by position 75 33 50 %; 2.25 tokens a step with a draft"
    );
    let none = SpeculationStats::default();
    assert_eq!(none.summary().to_string(), "drafted 0 tokens in 0 drafts, accepted 0 (0 %)");
    let more = {
        let mut more = stats.clone();
        more.record(4, 4);
        more.since(&stats)
    };
    assert_eq!((more.drafts, &more.drafted[..], &more.accepted[..]), (1, &[1; 4][..], &[1; 4][..]));
}
