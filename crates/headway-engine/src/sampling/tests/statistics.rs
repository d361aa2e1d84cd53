//! Frequencies of many draws with fixed seeds against the distribution (chi-square), and the random stream.

use std::collections::HashSet;

use super::{SamplingParams, distribution, sample};
use crate::sampling::{fresh_seed, uniform};

/// Pearson's statistic of `draws` draws at different positions of one stream, and its degrees of freedom.
fn chi_square(logits: &[f32], params: &SamplingParams, seed: u64, draws: usize) -> (f64, f64) {
    let expected = distribution(logits, params, &[]);
    let mut counts = vec![0usize; logits.len()];
    let tokens = vec![0u32; draws];
    for position in 0..draws {
        counts[sample(logits, params, &tokens[..position], seed).unwrap().token as usize] += 1;
    }
    let mut statistic = 0.0;
    let mut cells = 0.0;
    for (count, p) in counts.iter().zip(&expected) {
        if *p == 0.0 {
            assert_eq!(*count, 0, "a token of probability 0 was drawn");
            continue;
        }
        let mean = p * draws as f64;
        assert!(mean > 5.0, "the test needs more draws");
        statistic += (*count as f64 - mean).powi(2) / mean;
        cells += 1.0;
    }
    (statistic, cells - 1.0)
}

#[test]
fn draws_follow_the_distribution() {
    let logits = [0.0, 1.0, 2.0, -1.0, 0.5, 1.5, f32::NEG_INFINITY, 0.25];
    let base = SamplingParams::default();
    let all = [
        base.clone(),
        SamplingParams { temperature: 0.6, ..base.clone() },
        SamplingParams { temperature: 2.5, top_k: 4, ..base.clone() },
        SamplingParams { top_p: 0.8, ..base.clone() },
        SamplingParams { min_p: 0.2, temperature: 1.5, ..base },
    ];
    for (seed, params) in (1..).zip(&all) {
        let (statistic, freedom) = chi_square(&logits, params, seed, 20_000);
        // Mean `freedom`, variance twice that: five standard deviations.
        assert!(statistic < freedom + 5.0 * (2.0 * freedom).sqrt(), "{params:?}: {statistic} of {freedom}");
        assert!(freedom >= 2.0);
    }
}

#[test]
fn uniform_numbers_are_uniform_over_positions_and_over_seeds() {
    for stream in [|i: u64| uniform(7, i), |i: u64| uniform(i, 7), |i: u64| uniform(i, i)] {
        let (n, cells) = (20_000u64, 50usize);
        let mut counts = vec![0.0f64; cells];
        for i in 0..n {
            let u = stream(i);
            assert!((0.0..1.0).contains(&u));
            counts[(u * cells as f64) as usize] += 1.0;
        }
        let mean = n as f64 / cells as f64;
        let statistic: f64 = counts.iter().map(|c| (c - mean).powi(2) / mean).sum();
        assert!(statistic < 49.0 + 5.0 * 98.0f64.sqrt(), "{statistic}");
    }
}

#[test]
fn the_stream_is_a_function_of_seed_and_position() {
    // The first eight bytes of ChaCha8 with a zero key and nonce are 3e 00 ef 2f 89 5f 40 d6 (published test vector).
    let first = u64::from_le_bytes([0x3e, 0x00, 0xef, 0x2f, 0x89, 0x5f, 0x40, 0xd6]);
    assert_eq!(uniform(0, 0), (first >> 11) as f64 / (1u64 << 53) as f64);
    let pairs = (0..100).flat_map(|seed| (0..100).map(move |position| uniform(seed, position).to_bits()));
    assert_eq!(pairs.collect::<HashSet<_>>().len(), 10_000);
}

#[test]
fn fresh_seeds_differ_and_survive_json() {
    let seeds: HashSet<u64> = (0..1000).map(|_| fresh_seed()).collect();
    assert_eq!(seeds.len(), 1000);
    assert!(seeds.iter().all(|seed| *seed < 1 << 53));
}
