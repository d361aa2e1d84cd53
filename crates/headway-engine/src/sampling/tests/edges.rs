//! Edges of every option, and logits that are none.

use super::{Row, Sampler, SamplingError, SamplingParams, distribution, kept, model_like, sample};
use crate::sampling::{MAX_LOGPROBS, logprobs};

fn base() -> SamplingParams {
    SamplingParams::default()
}

#[test]
fn greedy_takes_the_lowest_id_of_equals() {
    let greedy = SamplingParams::greedy();
    assert_eq!(sample(&[1.0, 3.0, 3.0, 2.0], &greedy, &[], 1).unwrap().token, 1);
    let mut long = vec![0.0; 1000];
    (long[700], long[999]) = (5.0, 5.0);
    assert_eq!(sample(&long, &greedy, &[], 1).unwrap().token, 700);
    assert_eq!(sample(&[0.0, -0.0], &greedy, &[], 1).unwrap().token, 0);
    for seed in 0..50 {
        let one = SamplingParams { top_k: 1, temperature: 5.0, ..base() };
        assert_eq!(sample(&long, &one, &[], seed).unwrap().token, 700, "top_k 1 is greedy");
    }
}

#[test]
fn a_vocabulary_of_one_and_a_single_possible_token() {
    let mut only = vec![f32::NEG_INFINITY; 5000];
    only[3210] = -1e30;
    for params in [
        base(),
        SamplingParams::greedy(),
        SamplingParams { top_p: 1e-9, top_k: 10, min_p: 1.0, ..base() },
        SamplingParams { top_k: 6000, ..base() },
    ] {
        assert_eq!(sample(&[0.5], &params, &[0], 3).unwrap().token, 0);
        for seed in 0..20 {
            assert_eq!(sample(&only, &params, &[], seed).unwrap().token, 3210);
        }
    }
}

#[test]
fn top_p_keeps_the_fewest_that_reach_it() {
    // Probabilities 1/2, 1/4, 1/8, 1/8, as single precision has them.
    let logits: Vec<f32> = [0.5f32, 0.25, 0.125, 0.125].iter().map(|p| p.ln()).collect();
    let keeps = |top_p| kept(&distribution(&logits, &SamplingParams { top_p, ..base() }, &[]));
    assert_eq!(keeps(1.0), [0, 1, 2, 3]);
    assert_eq!(keeps(0.9), [0, 1, 2, 3]);
    assert_eq!(keeps(0.8), [0, 1, 2], "of equals the lower id");
    assert_eq!(keeps(0.74), [0, 1]);
    assert_eq!(keeps(0.51), [0, 1]);
    assert_eq!(keeps(0.49), [0]);
    assert_eq!(keeps(f32::MIN_POSITIVE), [0]);
    // Equal probabilities are exact: a sum that is reached exactly needs no further token.
    let equal =
        |n: usize, top_p| kept(&distribution(&vec![2.0; n], &SamplingParams { top_p, ..base() }, &[]));
    assert_eq!(equal(4, 0.5), [0, 1]);
    assert_eq!(equal(4096, 0.25).len(), 1024);
    assert_eq!(equal(4096, 0.25).last(), Some(&1023));
}

#[test]
fn top_p_counts_what_top_k_and_min_p_left() {
    let logits: Vec<f32> = [0.4f32, 0.3, 0.2, 0.1].iter().map(|p| p.ln()).collect();
    let keeps = |p: SamplingParams| kept(&distribution(&logits, &p, &[]));
    assert_eq!(keeps(SamplingParams { top_p: 0.5, ..base() }), [0, 1]);
    // Of the two that top_k leaves, the first has 4/7.
    assert_eq!(keeps(SamplingParams { top_p: 0.5, top_k: 2, ..base() }), [0]);
    assert_eq!(keeps(SamplingParams { min_p: 0.6, ..base() }), [0, 1]);
    assert_eq!(keeps(SamplingParams { min_p: 0.6, top_p: 0.5, ..base() }), [0]);
    // min_p looks at probabilities after temperature.
    assert_eq!(keeps(SamplingParams { min_p: 0.6, temperature: 100.0, ..base() }), [0, 1, 2, 3]);
    assert_eq!(keeps(SamplingParams { min_p: 1.0, ..base() }), [0]);
    assert_eq!(keeps(SamplingParams { top_k: 400, ..base() }), [0, 1, 2, 3]);
}

#[test]
fn extreme_temperatures_and_logits_stay_finite() {
    let logits = [3e38, -3e38, 2.9e38, 0.0];
    for temperature in [f32::from_bits(1), f32::MIN_POSITIVE, 1e-5, 1.0, 1e30, f32::MAX] {
        let p = distribution(&logits, &SamplingParams { temperature, ..base() }, &[]);
        assert!(p.iter().all(|p| p.is_finite()), "{temperature}: {p:?}");
        assert!((p.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        assert!(temperature > 1.0 || kept(&p) == [0]);
    }
}

#[test]
fn the_repetition_penalty_counts_each_token_once() {
    let params = SamplingParams { repetition_penalty: 2.0, temperature: 0.0, ..base() };
    let mut sampler = Sampler::new();
    let mut logits = [4.0, -1.0, 3.0, 0.0, 2.5];
    let row = Row::new(&params, &[0, 1, 0, 0, 1, 3], 0);
    assert_eq!(sampler.sample(&mut logits, &row).unwrap().token, 2);
    assert_eq!(logits, [2.0, -2.0, 3.0, 0.0, 2.5]);
    // Nothing of one row is left in the next.
    let mut logits = [4.0, -1.0, 3.0, 0.0, 2.5];
    let row = Row::new(&params, &[2, 1], 0);
    assert_eq!(sampler.sample(&mut logits, &row).unwrap().token, 0);
    assert_eq!(logits, [4.0, -2.0, 1.5, 0.0, 2.5]);
    let far = sample(&[0.0; 4], &params, &[9], 0);
    assert_eq!(far, Err(SamplingError::TokenOutOfRange { token_id: 9, vocab_size: 4 }));
}

#[test]
fn bad_logits_are_named() {
    for params in [base(), SamplingParams::greedy(), SamplingParams { logprobs: Some(2), ..base() }] {
        for at in [0, 17, 39] {
            let mut logits = vec![0.0; 40];
            logits[at] = f32::NAN;
            let nan = SamplingError::Nan { token_id: at, count: 1, vocab_size: 40 };
            assert_eq!(sample(&logits, &params, &[], 0), Err(nan));
            logits[at] = f32::INFINITY;
            assert_eq!(sample(&logits, &params, &[], 0), Err(SamplingError::Infinite { token_id: at }));
        }
        let none = SamplingError::NothingPossible { vocab_size: 40 };
        assert_eq!(sample(&[f32::NEG_INFINITY; 40], &params, &[], 0), Err(none));
        assert_eq!(sample(&[], &params, &[], 0), Err(SamplingError::Empty));
        let nan = SamplingError::Nan { token_id: 0, count: 20, vocab_size: 20 };
        assert_eq!(sample(&[f32::NAN; 20], &params, &[], 0), Err(nan));
    }
}

#[test]
fn logprobs_are_of_the_raw_logits() {
    let logits = [1.0, 3.0, 2.0, 3.0];
    let params =
        SamplingParams { logprobs: Some(3), repetition_penalty: 5.0, temperature: 0.1, top_k: 1, ..base() };
    let sampled = sample(&logits, &params, &[1, 3], 0).unwrap();
    assert_eq!(sampled.token, 2, "the penalty decides the token");
    let (own, all) = sampled.logprobs.unwrap();
    assert_eq!(all, logprobs(&logits, 3).unwrap());
    assert_eq!(all.top.iter().map(|t| t.token_id).collect::<Vec<_>>(), [1, 3, 2]);
    assert_eq!(own, all.top[2]);
    let total: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
    assert!((f64::from(own.logprob) - (2.0 - total.ln())).abs() < 1e-6);
    assert_eq!(
        sample(&logits, &SamplingParams { logprobs: None, ..params.clone() }, &[], 0).unwrap().logprobs,
        None
    );
    let (_, none) =
        sample(&logits, &SamplingParams { logprobs: Some(0), ..params }, &[], 0).unwrap().logprobs.unwrap();
    assert!(none.top.is_empty());
}

#[test]
fn a_row_does_not_depend_on_the_rows_before_it() {
    let rows: Vec<Vec<f32>> = (0..20).map(|i| model_like(100 + 377 * i, i as u64)).collect();
    let params =
        SamplingParams { top_p: 0.9, top_k: 50, repetition_penalty: 1.3, logprobs: Some(4), ..base() };
    let mut sampler = Sampler::new();
    let mut one = |i: usize| {
        let row = Row::new(&params, &[1, 2, 3], i as u64);
        sampler.sample(&mut rows[i].clone(), &row).unwrap()
    };
    let forward: Vec<_> = (0..20).map(&mut one).collect();
    let mut backward: Vec<_> = (0..20).rev().map(&mut one).collect();
    backward.reverse();
    assert_eq!(forward, backward);
    let alone = |i: usize| sample(&rows[i], &params, &[1, 2, 3], i as u64).unwrap();
    assert_eq!(forward, (0..20).map(alone).collect::<Vec<_>>());
}

#[test]
fn options_out_of_range_are_refused_by_name() {
    let refused = |p: SamplingParams| p.validate().unwrap_err().to_string();
    for (value, text) in [(-0.1, "-0.1"), (f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let error = refused(SamplingParams { temperature: value, ..base() });
        assert_eq!(error, format!("--temperature must be a finite number of at least 0, got {text}"));
    }
    for value in [0.0, -1.0, 1.01, f32::NAN] {
        assert!(
            refused(SamplingParams { top_p: value, ..base() })
                .starts_with("--top-p must be above 0 and at most 1")
        );
    }
    for value in [-0.01, 1.01, f32::NAN] {
        assert!(
            refused(SamplingParams { min_p: value, ..base() }).starts_with("--min-p must be from 0 to 1")
        );
    }
    for value in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let error = refused(SamplingParams { repetition_penalty: value, ..base() });
        assert!(error.starts_with("--repetition-penalty must be from 0.01 to 100"), "{error}");
    }
    assert!(refused(SamplingParams { max_tokens: Some(0), ..base() }).starts_with("--max-tokens"));
    assert!(
        refused(SamplingParams { logprobs: Some(MAX_LOGPROBS + 1), ..base() })
            .contains("at most 1024, got 1025")
    );
    assert!(
        refused(SamplingParams { stop: vec!["a".into(), String::new()], ..base() }).starts_with("--stop")
    );
    assert_eq!(base().validate(), Ok(()));
    assert_eq!(SamplingParams::greedy().validate(), Ok(()));
}

#[test]
fn stop_tokens_end_the_answer() {
    let params = SamplingParams { stop_token_ids: vec![7], ..base() };
    assert!(params.is_stop_token(7, &[2]) && params.is_stop_token(2, &[2]) && !params.is_stop_token(3, &[2]));
    let on = SamplingParams { ignore_eos: true, ..params };
    assert!(on.is_stop_token(7, &[2]) && !on.is_stop_token(2, &[2]));
}
