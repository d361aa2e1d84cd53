//! Sampling among the tokens that a grammar allows.

use super::{Row, Sampler, SamplingError, SamplingParams, model_like};

/// Bits of some tokens.
fn bits(tokens: &[usize], vocab_size: usize) -> Vec<u32> {
    let mut words = vec![0; vocab_size.div_ceil(32)];
    tokens.iter().for_each(|t| words[t / 32] |= 1 << (t % 32));
    words
}

fn among(params: &SamplingParams, seed: u64, allowed: &[u32]) -> Result<super::Sampled, SamplingError> {
    let row = Row::new(params, &[1, 2], seed);
    Sampler::new().sample_among(&mut model_like(1000, 3), &row, Some(allowed))
}

#[test]
fn the_most_likely_of_the_allowed_is_taken() {
    let logits = model_like(1000, 3);
    let tokens = [7, 31, 32, 500, 999];
    let best = *tokens.iter().max_by(|a, b| logits[**a].total_cmp(&logits[**b])).unwrap();
    let found = among(&SamplingParams::greedy(), 0, &bits(&tokens, 1000)).unwrap();
    assert_eq!(found.token as usize, best);
    // Everything allowed is nothing left out.
    let all = among(&SamplingParams::greedy(), 0, &[u32::MAX; 32]).unwrap();
    let greedy = SamplingParams::greedy();
    let plain = Row::new(&greedy, &[1, 2], 0);
    assert_eq!(all, Sampler::new().sample(&mut logits.clone(), &plain).unwrap());
}

#[test]
fn draws_stay_among_the_allowed_whatever_the_parameters() {
    let tokens = [3, 64, 65, 700];
    let allowed = bits(&tokens, 1000);
    for params in [
        SamplingParams { temperature: 5.0, ..SamplingParams::default() },
        SamplingParams { top_k: 2, ..SamplingParams::default() },
        SamplingParams { top_p: 0.5, min_p: 0.1, ..SamplingParams::default() },
        SamplingParams { repetition_penalty: 3.0, ..SamplingParams::default() },
        SamplingParams { logit_bias: [(5, 100.0), (64, -100.0)].into(), ..SamplingParams::default() },
    ] {
        for seed in 0..200 {
            let token = among(&params, seed, &allowed).unwrap().token as usize;
            assert!(tokens.contains(&token), "{token} with {params:?}");
        }
    }
}

#[test]
fn tokens_beyond_the_bits_may_not_follow() {
    let allowed = bits(&[5], 32);
    for seed in 0..50 {
        assert_eq!(among(&SamplingParams::default(), seed, &allowed).unwrap().token, 5);
    }
}

#[test]
fn log_probabilities_are_those_of_the_raw_logits() {
    let params = SamplingParams { logprobs: Some(3), ..SamplingParams::greedy() };
    let row = Row::new(&params, &[], 0);
    let free = Sampler::new().sample(&mut model_like(1000, 3), &row).unwrap().logprobs.unwrap();
    let held = Sampler::new().sample_among(&mut model_like(1000, 3), &row, Some(&bits(&[5], 1000))).unwrap();
    let (own, all) = held.logprobs.unwrap();
    assert_eq!(all, free.1);
    let expected = f64::from(model_like(1000, 3)[5]) - all.log_sum_exp;
    assert!((f64::from(own.logprob) - expected).abs() < 1e-6);
}

#[test]
fn nothing_allowed_is_an_error() {
    assert_eq!(
        among(&SamplingParams::greedy(), 0, &[0; 32]).unwrap_err(),
        SamplingError::NothingPossible { vocab_size: 1000 }
    );
    assert_eq!(
        among(&SamplingParams::greedy(), 0, &[]).unwrap_err(),
        SamplingError::NothingPossible { vocab_size: 1000 }
    );
}

#[test]
fn an_answer_is_held_open_until_its_grammar_is_complete() {
    let params = SamplingParams { min_tokens: 5, stop_token_ids: vec![9], ..SamplingParams::greedy() };
    let among = |tokens: &[u32], allowed: &[usize]| {
        let row = Row { prompt_len: 1, eos_ids: &[9, 2], ..Row::new(&params, tokens, 0) };
        let mut logits = vec![0.0; 10];
        (logits[2], logits[9], logits[4]) = (8.0, 7.0, 1.0);
        Sampler::new().sample_among(&mut logits, &row, Some(&bits(allowed, 10))).unwrap().token
    };
    assert_eq!(among(&[0, 1], &[2, 3, 4, 9]), 4, "neither end nor stop token");
    assert_eq!(among(&[0, 1], &[2, 9]), 2, "nothing else may follow");
    assert_eq!(among(&[0, 1, 1, 1, 1], &[2, 4]), 4, "four tokens so far");
    assert_eq!(among(&[0, 1, 1, 1, 1, 1], &[2, 4]), 2, "five");
}
