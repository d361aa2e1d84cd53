//! `headway serve` as a process: answers are those of `generate`, a grammar holds, and it ends as asked.

use super::{
    serving::Serving,
    support::{generate, llama, without_tokenizer},
};
use serde_json::{Value, json};

#[test]
fn answers_are_those_of_generate_and_the_end_is_a_good_one() {
    let serving = Serving::start(&llama(), &["--log-format", "json"]);
    let expected =
        generate(&llama(), &["Hello you", "--max-tokens", "12", "--ignore-eos", "--json"]).fine().object();
    let ask = json!({"prompt": "Hello you", "max_tokens": 12, "ignore_eos": true, "temperature": 0});
    let (status, answer) = serving.ask("/v1/completions", &ask);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["choices"][0]["text"], expected["text"]);
    assert_eq!(answer["usage"]["completion_tokens"], 12);
    let (status, answer) = serving.ask("/v1/completions", &json!({"prompt": [1, 999_999]}));
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("prompt")), "{answer}");
    let (code, log) = serving.end();
    assert_eq!(code, Some(0), "{log}");
    let lines: Vec<Value> =
        log.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}"))).collect();
    assert!(lines.iter().any(|l| l["endpoint"] == "completions" && l["completion_tokens"] == 12), "{log}");
    // What was asked is nobody's business.
    assert!(!log.contains("Hello"), "{log}");
}

/// Random weights say anything; within a grammar it is JSON of the schema all the same.
#[test]
fn a_grammar_holds() {
    let serving = Serving::start(&llama(), &[]);
    let schema = json!({
        // Random weights would fill an answer with white space, which JSON lets them.
        "x-guidance": {"whitespace_flexible": false},
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "green"]},
            "big": {"type": "boolean"},
            "size": {"type": "integer", "minimum": 1, "maximum": 99},
        },
        "required": ["colour", "big", "size"],
        "additionalProperties": false,
    });
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "thing", "strict": true, "schema": schema}});
    for seed in 0..9 {
        // Penalties, a bias and a fewest number of tokens pull, and the grammar holds. The bias is for the tokenizer's bytes.
        let bias: serde_json::Map<String, Value> = (0..250).map(|id| (id.to_string(), json!(20))).collect();
        let more = match seed % 3 {
            0 => json!({}),
            1 => json!({"presence_penalty": -2, "frequency_penalty": -2, "min_tokens": 100}),
            _ => {
                json!({"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1.5, "logit_bias": bias})
            }
        };
        let mut ask = json!({
            "messages": [{"role": "user", "content": "A thing"}],
            "response_format": format,
            "seed": seed,
            "max_tokens": 120,
            "logprobs": true,
        });
        ask.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let (status, answer) = serving.ask("/v1/chat/completions", &ask);
        assert_eq!(status, 200, "{answer}");
        let text = answer["choices"][0]["message"]["content"].as_str().expect("text");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
        let thing: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert!(["red", "green"].contains(&thing["colour"].as_str().expect("a colour")), "{thing}");
        assert!(thing["big"].is_boolean(), "{thing}");
        assert!((1..100).contains(&thing["size"].as_i64().expect("a size")), "{thing}");
        assert_eq!(thing.as_object().map(serde_json::Map::len), Some(3), "{thing}");
    }
}

#[test]
fn a_model_without_a_tokenizer_takes_ids() {
    let serving = Serving::start(&without_tokenizer(), &[]);
    let (status, answer) = serving.ask("/v1/completions", &json!({"prompt": [1, 2, 3], "max_tokens": 4}));
    assert_eq!((status, &answer["usage"]["completion_tokens"]), (200, &json!(4)), "{answer}");
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "text"})),
        ("/tokenize", json!({"prompt": "text"})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "Hi"}]})),
    ] {
        let (status, answer) = serving.ask(path, &body);
        assert_eq!(status, 422, "{path}: {answer}");
    }
}

#[test]
fn what_can_not_be_served_ends_with_one_line() {
    let run = |args: &[&str]| super::support::run([&["serve", "--port", "0"], args].concat());
    run(&["--model", "/no/such/model"]).refused(&["/no/such/model"]);
    run(&["--cors-origin", "example.org"]).refused(&["--cors-origin example.org", "https://example.org"]);
    run(&["--api-key", " "]).refused(&["the API key is empty"]);
    run(&["--api-key-file", "/no/such/file"]).refused(&["/no/such/file", "--api-key-file"]);
    run(&["--host", "nowhere"]).refused(&["--host"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let model = llama();
    let args = ["serve", "--port", &port, "--model", model.to_str().expect("UTF-8")];
    super::support::run(args).refused(&["can't be listened on", "--port"]);
}
