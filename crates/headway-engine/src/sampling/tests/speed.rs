//! Sampling from a vocabulary of 262,144 must not be felt beside the forward pass: the goal is 2 ms a row. The test fails
//! at twice that, so that a busy machine does not fail it. Limits hold for optimised builds.

use std::time::{Duration, Instant};

use super::{Row, Sampler, SamplingParams, model_like};

const GOAL: Duration = Duration::from_millis(2);

/// The best of several runs, so that other load on the machine does not fail the test; more of them while it is over
/// the goal.
fn best_of(params: &SamplingParams, logits: &[f32]) -> Duration {
    let mut sampler = Sampler::new();
    let mut row = logits.to_vec();
    let mut best = Duration::MAX;
    for run in 0..300 {
        row.copy_from_slice(logits);
        let start = Instant::now();
        sampler
            .sample(&mut row, &Row { prompt_len: 1, ..Row::new(params, &[1, 2, 3], run) })
            .expect("good logits");
        best = best.min(start.elapsed());
        if run >= 20 && best < GOAL {
            break;
        }
    }
    best
}

#[test]
fn a_large_vocabulary_takes_little_time() {
    let base = SamplingParams::default();
    let peaked = model_like(262_144, 3);
    let flat: Vec<f32> = peaked.iter().map(|x| x * 0.1).collect();
    let all = [
        ("greedy", SamplingParams::greedy()),
        ("plain", base.clone()),
        ("top-p 0.95", SamplingParams { top_p: 0.95, ..base.clone() }),
        ("top-k 50, top-p 0.9", SamplingParams { top_k: 50, top_p: 0.9, ..base.clone() }),
        (
            "top-k 1000, min-p, penalty",
            SamplingParams { top_k: 1000, min_p: 0.01, repetition_penalty: 1.1, ..base.clone() },
        ),
        (
            "bias and every penalty",
            SamplingParams {
                repetition_penalty: 1.1,
                presence_penalty: 0.5,
                frequency_penalty: 0.5,
                logit_bias: [(5, -100.0), (9, 3.0)].into(),
                top_p: 0.95,
                ..base.clone()
            },
        ),
        ("logprobs 20", SamplingParams { logprobs: Some(20), temperature: 0.0, ..base }),
    ];
    for (name, params) in &all {
        for (kind, logits) in [("peaked", &peaked), ("flat", &flat)] {
            let best = best_of(params, logits);
            println!("{name:28} {kind:8} {best:?}");
            assert!(cfg!(debug_assertions) || best < 2 * GOAL, "{name}, {kind}: {best:?}");
        }
    }
}
