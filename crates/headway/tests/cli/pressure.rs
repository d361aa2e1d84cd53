//! A KV cache that the requests outgrow: every answer is the one of an idle server, and nothing is left behind.

use super::{
    serving::{Serving, until},
    support::llama,
};
use serde_json::{Value, json};

const TEXT: &str = "/v1/completions";

/// 15 pages of 16 tokens, the null page apart: three layers, keys and values of two heads of 64 in bfloat16. A request needs
/// up to ten.
const FEW_PAGES: usize = 16 * 3 * 2 * 16 * 128 * 2;

/// Requests of every kind; every second is streamed.
fn requests() -> Vec<Value> {
    let one = |i: usize| {
        let prompt: Vec<usize> = (0..20 + i * 11 % 70).map(|t| (t % (3 + i) * 13 + i) % 500).collect();
        let mut ask = json!({
            "prompt": prompt,
            "max_tokens": 30 + i * 7 % 40,
            "ignore_eos": true,
            "logprobs": 2,
            "stream": i % 2 == 1,
            "temperature": 0,
        });
        let more = match i % 4 {
            0 => json!({}),
            1 => json!({"temperature": 0.8, "seed": i, "n": 2}),
            2 => json!({"presence_penalty": 0.3, "frequency_penalty": 0.2}),
            _ => json!({"temperature": 0.6, "top_p": 0.9, "seed": i, "logit_bias": {"7": 2, "11": -100}}),
        };
        ask.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        ask
    };
    (0..24).map(one).collect()
}

/// Texts, ends and log-probabilities of an answer's choices, however it came.
fn said(serving: &Serving, ask: &Value) -> Vec<(String, Value, Vec<Value>)> {
    let parts = match ask["stream"] == true {
        true => serving.events(TEXT, ask),
        false => {
            let (status, answer) = serving.ask(TEXT, ask);
            assert_eq!(status, 200, "{answer}");
            vec![answer]
        }
    };
    let n = ask["n"].as_u64().unwrap_or(1) as usize;
    let mut choices = vec![(String::new(), Value::Null, vec![]); n];
    for choice in parts.iter().flat_map(|p| p["choices"].as_array().expect("choices")) {
        let (text, end, logprobs) = &mut choices[choice["index"].as_u64().expect("an index") as usize];
        text.push_str(choice["text"].as_str().expect("text"));
        logprobs.extend(choice["logprobs"]["top_logprobs"].as_array().cloned().unwrap_or_default());
        if !choice["finish_reason"].is_null() {
            end.clone_from(&choice["finish_reason"]);
        }
    }
    choices
}

#[test]
fn requests_that_outgrow_the_cache_get_the_answers_of_an_idle_server() {
    let requests = requests();
    let idle = Serving::start(&llama(), &["--batch-invariant"]);
    let expected: Vec<_> = requests.iter().map(|r| said(&idle, r)).collect();
    assert_eq!(idle.metric("num_preemptions_total"), 0.0);
    drop(idle);
    for more in [&[][..], &["--speculative-tokens", "4", "--prompt-lookup-min", "1"]] {
        let few = FEW_PAGES.to_string();
        let args = [&["--batch-invariant", "--kv-cache-memory", &few, "--max-num-seqs", "16"], more].concat();
        let serving = Serving::start(&llama(), &args);
        let wave = || {
            std::thread::scope(|scope| {
                let all: Vec<_> = requests.iter().map(|r| scope.spawn(|| said(&serving, r))).collect();
                for (i, (got, expected)) in all.into_iter().zip(&expected).enumerate() {
                    assert_eq!(&got.join().expect("an answer"), expected, "request {i}, {more:?}");
                }
            });
            until("all pages are free", || serving.metric("kv_cache_used_pages") == 0.0);
            for gauge in ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"] {
                assert_eq!(serving.metric(gauge), 0.0, "{gauge}");
            }
        };
        wave();
        let preemptions = serving.metric("num_preemptions_total");
        assert!(preemptions > 0.0, "{more:?}");
        let before = serving.memory();
        (0..3).for_each(|_| wave());
        assert!(serving.metric("num_preemptions_total") > preemptions);
        let grown = serving.memory().saturating_sub(before);
        assert!(grown < 8 << 20, "{grown} bytes more after three waves");
        let drafted = serving.metric("spec_decode_num_accepted_tokens_total");
        assert_eq!(drafted > 0.0, !more.is_empty(), "{drafted} drafted tokens stood, {more:?}");
    }
}

#[test]
fn a_prompt_that_came_before_is_found_in_the_cache_and_counted() {
    let serving = Serving::start(&llama(), &[]);
    let hits = || serving.metric("prefix_cache_hits_total");
    let queries = || serving.metric("prefix_cache_queries_total");
    let prompt: Vec<usize> = (0..50).map(|t| t * 7 % 500).collect();
    let ask = json!({"prompt": prompt, "max_tokens": 2, "temperature": 0});
    let cached = || {
        let usage = serving.ask(TEXT, &ask).1["usage"].clone();
        usage["prompt_tokens_details"]["cached_tokens"].as_f64().expect("a number")
    };
    assert_eq!((cached(), hits(), queries()), (0.0, 0.0, 50.0));
    // Three whole pages of 16.
    assert_eq!((cached(), hits(), queries()), (48.0, 48.0, 100.0));
    assert!(serving.metric("kv_cache_cached_pages") >= 3.0);
    assert_eq!(serving.metric("kv_cache_used_pages"), 0.0, "cached pages are free ones");
    // The prompt of another counts as far as it is the same.
    let other: Vec<usize> = (0..50).map(|t| if t < 40 { t * 7 % 500 } else { 3 }).collect();
    serving.ask(TEXT, &json!({"prompt": other, "max_tokens": 2}));
    assert_eq!((hits(), queries()), (80.0, 150.0));
}
