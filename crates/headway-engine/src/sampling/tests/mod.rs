//! Tests of sampling: edges of every option, bad logits, statistics with fixed seeds, comparison with a plain double
//! precision version, and speed.

mod allowed;
mod edges;
mod on_device;
mod penalties;
mod reference;
mod speed;
mod statistics;

use super::{Row, Sampled, Sampler, SamplingError, SamplingParams};

fn sample(
    logits: &[f32],
    params: &SamplingParams,
    tokens: &[u32],
    seed: u64,
) -> Result<Sampled, SamplingError> {
    Sampler::new().sample(&mut logits.to_vec(), &Row::new(params, tokens, seed))
}

fn distribution(logits: &[f32], params: &SamplingParams, tokens: &[u32]) -> Vec<f64> {
    distribution_of(logits, &Row::new(params, tokens, 0))
}

fn distribution_of(logits: &[f32], row: &Row<'_>) -> Vec<f64> {
    Sampler::new().distribution(&mut logits.to_vec(), row).expect("good logits")
}

fn kept(distribution: &[f64]) -> Vec<usize> {
    (0..distribution.len()).filter(|i| distribution[*i] > 0.0).collect()
}

/// Logits like a model's: a bell curve, a few tokens far ahead.
fn model_like(vocab_size: usize, seed: u64) -> Vec<f32> {
    let uniform = |i: usize, n: u64| super::uniform(seed, (i as u64) * 4 + n);
    let bell = |i: usize| (0..4).map(|n| uniform(i, n)).sum::<f64>() - 2.0;
    (0..vocab_size).map(|i| (bell(i) * 4.0 + if uniform(i, 0) > 0.999 { 9.0 } else { 0.0 }) as f32).collect()
}
