//! Bias, presence and frequency penalty, and answers that may not end yet: numbers that are exact.

use super::{Row, Sampler, SamplingError, SamplingParams, sample};
use crate::sampling::logprobs;

fn greedy() -> SamplingParams {
    SamplingParams::greedy()
}

/// The logits after sampling, and the token.
fn processed(params: &SamplingParams, logits: &[f32], prompt: &[u32], answer: &[u32]) -> (Vec<f32>, u32) {
    let mut logits = logits.to_vec();
    // Generated tokens count alike, drafted in this step or not.
    let both = [prompt, answer].concat();
    let row = Row { prompt_len: prompt.len(), ..Row::new(params, &both, 0) };
    let token = Sampler::new().sample(&mut logits.clone(), &row).unwrap().token;
    let row = Row { drafted: answer, ..Row::new(params, prompt, 0) };
    assert_eq!(Sampler::new().sample(&mut logits, &row).unwrap().token, token);
    (logits, token)
}

#[test]
fn presence_and_frequency_count_generated_tokens_alone() {
    let logits = [4.0, 3.5, 1.0, -1.0, 0.0];
    let presence = SamplingParams { presence_penalty: 1.0, ..greedy() };
    assert_eq!(processed(&presence, &logits, &[0, 1, 0], &[]), (logits.to_vec(), 0), "the prompt is free");
    let (after, token) = processed(&presence, &logits, &[1], &[0, 3, 0, 0]);
    assert_eq!((after, token), (vec![3.0, 3.5, 1.0, -2.0, 0.0], 1), "once, however often");
    let frequency = SamplingParams { frequency_penalty: 0.5, ..greedy() };
    let (after, token) = processed(&frequency, &logits, &[0, 0, 0, 0], &[0, 3, 0, 0]);
    assert_eq!((after, token), (vec![2.5, 3.5, 1.0, -1.5, 0.0], 1));
    let rewards = SamplingParams { presence_penalty: -2.0, frequency_penalty: -1.0, ..greedy() };
    let (after, token) = processed(&rewards, &logits, &[0], &[2, 2]);
    assert_eq!((after, token), (vec![4.0, 3.5, 5.0, -1.0, 0.0], 2));
}

/// Bias, repetition, frequency, presence: in another order the numbers are others.
#[test]
fn the_order_is_bias_repetition_frequency_presence() {
    let params = SamplingParams {
        logit_bias: [(0, 3.0), (2, -5.0)].into(),
        repetition_penalty: 2.0,
        frequency_penalty: 0.5,
        presence_penalty: 0.25,
        ..greedy()
    };
    let (after, _) = processed(&params, &[-1.0, 4.0, 3.0, 8.0], &[2, 1], &[0, 0]);
    assert_eq!(after, [2.0 / 2.0 - 1.0 - 0.25, 2.0, -4.0, 8.0]);
}

#[test]
fn a_bias_of_100_decides() {
    let logits = [1.0, 9.0, 2.0, 3.0];
    let with = |bias: &[(u32, f32)], temperature| SamplingParams {
        logit_bias: bias.into(),
        temperature,
        ..SamplingParams::default()
    };
    for seed in 0..30 {
        assert_eq!(sample(&logits, &with(&[(2, 100.0)], 1.0), &[], seed).unwrap().token, 2);
        let token = sample(&logits, &with(&[(1, -100.0), (3, -100.0)], 1.0), &[], seed).unwrap().token;
        assert!(token == 0 || token == 2, "{token}");
    }
    assert_eq!(sample(&logits, &with(&[(1, -100.0)], 0.0), &[], 0).unwrap().token, 3);
    let outside = sample(&logits, &with(&[(4, 1.0)], 0.0), &[], 0);
    assert_eq!(outside, Err(SamplingError::TokenOutOfRange { token_id: 4, vocab_size: 4 }));
}

#[test]
fn an_answer_does_not_end_before_its_time() {
    let params = SamplingParams { min_tokens: 2, stop_token_ids: vec![3], ignore_eos: true, ..greedy() };
    let token = |tokens: &[u32], drafted: &[u32]| {
        let row = Row { prompt_len: 3, drafted, eos_ids: &[1, 99], ..Row::new(&params, tokens, 0) };
        Sampler::new().sample(&mut [1.0, 5.0, 2.0, 4.0], &row).unwrap().token
    };
    assert_eq!(token(&[0, 0, 0], &[]), 2);
    assert_eq!(token(&[0, 0, 0, 0], &[]), 2);
    assert_eq!(token(&[0, 0, 0], &[0]), 2);
    assert_eq!(token(&[0, 0, 0, 0], &[0]), 1);
    assert_eq!(token(&[0, 0, 0, 0, 0], &[]), 1);
}

#[test]
fn nothing_of_one_row_is_left_in_the_next() {
    let params =
        SamplingParams { presence_penalty: 1.0, frequency_penalty: 1.0, repetition_penalty: 1.5, ..greedy() };
    let mut sampler = Sampler::new();
    for vocab in [40, 7, 40] {
        for answer in [&[1u32, 1, 2][..], &[], &[6]] {
            let row = Row { drafted: answer, ..Row::new(&params, &[3], 0) };
            let (mut again, mut fresh) = (vec![1.0; vocab], vec![1.0; vocab]);
            sampler.sample(&mut again, &row).unwrap();
            Sampler::new().sample(&mut fresh, &row).unwrap();
            assert_eq!(again, fresh);
        }
    }
    // Nor of one that failed.
    let bad = Row { drafted: &[1, 2, 9], ..Row::new(&params, &[], 0) };
    assert!(sampler.sample(&mut [0.0; 5], &bad).is_err());
    let mut logits = [1.0; 5];
    sampler.sample(&mut logits, &Row { drafted: &[4], ..Row::new(&params, &[], 0) }).unwrap();
    assert_eq!(logits[..4], [1.0; 4]);
}

#[test]
fn log_probabilities_are_those_of_the_raw_logits() {
    let logits = [1.0, 3.0, 2.0, 3.0];
    let params = SamplingParams {
        logprobs: Some(4),
        presence_penalty: 2.0,
        logit_bias: [(0, 50.0)].into(),
        ..greedy()
    };
    let (own, all) = sample(&logits, &params, &[], 0).unwrap().logprobs.unwrap();
    assert_eq!(all, logprobs(&logits, 4).unwrap());
    assert_eq!((own.token_id, own), (0, all.top[3]));
}

#[test]
fn values_out_of_range_are_refused_by_name() {
    let refused = |p: SamplingParams| p.validate().unwrap_err().to_string();
    for value in [-2.1, 2.5, f32::NAN, f32::INFINITY] {
        let e = refused(SamplingParams { presence_penalty: value, ..greedy() });
        assert!(e.starts_with("--presence-penalty must be from -2 to 2, got "), "{e}");
        let e = refused(SamplingParams { frequency_penalty: value, ..greedy() });
        assert!(e.starts_with("--frequency-penalty must be from -2 to 2, got "), "{e}");
    }
    for value in [-100.5, 101.0, f32::NAN] {
        let e = refused(SamplingParams { logit_bias: [(1, 100.0), (2, value)].into(), ..greedy() });
        assert_eq!(e, format!("--logit-bias must be from -100 to 100, got {value}"));
    }
    let e = refused(SamplingParams { min_tokens: 5, max_tokens: Some(4), ..greedy() });
    assert_eq!(e, "--min-tokens must be at most --max-tokens, got 5");
    let edge = SamplingParams {
        presence_penalty: -2.0,
        frequency_penalty: 2.0,
        logit_bias: [(0, -100.0), (1, 100.0)].into(),
        min_tokens: 4,
        max_tokens: Some(4),
        ..greedy()
    };
    assert_eq!(edge.validate(), Ok(()));
}
