//! What text comes out of `headway serve`: whole characters, nothing of stop strings, JSON where it is asked for.

use super::{serving::Serving, support::llama};
use headway_engine::text::Tokenizer;
use serde_json::{Map, Value, json};

const CHAT: &str = "/v1/chat/completions";

/// Random weights write mostly ASCII; this makes them write bytes of longer characters, and no special tokens.
fn beyond_ascii() -> Map<String, Value> {
    let tokenizer = Tokenizer::from_dir(&llama()).expect("a tokenizer");
    let bias = |id: u32| match tokenizer.is_special(id) {
        true => Some(-100),
        false => tokenizer.token_bytes(id).iter().any(|b| *b > 0x7f).then_some(2),
    };
    (0..tokenizer.vocab_size() as u32).filter_map(|id| Some((id.to_string(), json!(bias(id)?)))).collect()
}

fn ask(seed: u64, more: &Value) -> Value {
    let mut ask = json!({
        "messages": [{"role": "user", "content": "Über 7"}],
        "seed": seed,
        "temperature": 1.2,
        "max_tokens": 60,
        "ignore_eos": true,
        "logit_bias": beyond_ascii(),
    });
    ask.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    ask
}

/// The pieces of a streamed answer, and how it ended.
fn streamed(serving: &Serving, ask: &Value) -> (Vec<String>, String) {
    let mut ask = ask.clone();
    ask["stream"] = json!(true);
    let events = serving.events(CHAT, &ask);
    let choices = || events.iter().map(|e| &e["choices"][0]);
    let pieces = choices().filter_map(|c| c["delta"]["content"].as_str().map(str::to_owned)).collect();
    let end = choices().find_map(|c| c["finish_reason"].as_str()).expect("an end");
    (pieces, end.to_owned())
}

/// Text, end, and the bytes of all tokens.
fn whole(serving: &Serving, ask: &Value) -> (String, String, Vec<u8>) {
    let (status, answer) = serving.ask(CHAT, ask);
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    let tokens = choice["logprobs"]["content"].as_array().cloned().unwrap_or_default();
    let bytes = tokens.iter().flat_map(|t| t["bytes"].as_array().expect("bytes").clone());
    let text = |v: &Value| v.as_str().expect("text").to_owned();
    (
        text(&choice["message"]["content"]),
        text(&choice["finish_reason"]),
        bytes.map(|b| b.as_u64().expect("a byte") as u8).collect(),
    )
}

#[test]
fn characters_are_never_split() {
    let serving = Serving::start(&llama(), &["--batch-invariant"]);
    let (mut long, mut held) = (0, 0);
    for seed in 0..12 {
        let told = ask(seed, &json!({"logprobs": true}));
        let (text, _, bytes) = whole(&serving, &told);
        assert_eq!(String::from_utf8_lossy(&bytes), text, "what the tokens' bytes say");
        let (pieces, _) = streamed(&serving, &told);
        assert_eq!(pieces.concat(), text);
        long += text.chars().filter(|c| c.len_utf8() > 1 && *c != '\u{fffd}').count();
        // A piece without text: its token's bytes wait for the rest of their character.
        held += pieces.iter().skip(1).filter(|p| p.is_empty()).count();
    }
    assert!(long > 5 && held > 5, "{long} long characters, {held} tokens held back");
}

#[test]
fn stop_strings_are_never_shown() {
    let serving = Serving::start(&llama(), &["--batch-invariant"]);
    let mut over_tokens = 0;
    for seed in 0..4 {
        let free = ask(seed, &json!({}));
        let (text, _, _) = whole(&serving, &free);
        let (pieces, _) = streamed(&serving, &free);
        let characters: Vec<char> = text.chars().collect();
        for at in (5..characters.len() - 4).step_by(9) {
            let stop: String = characters[at..at + 4].iter().collect();
            let before = &text[..text.find(&stop).expect("it is there")];
            let stopped = ask(seed, &json!({"stop": [stop, "never this"]}));
            assert_eq!(whole(&serving, &stopped).0, before, "{stop:?}");
            let (shown, end) = streamed(&serving, &stopped);
            assert_eq!((shown.concat().as_str(), end.as_str()), (before, "stop"), "{stop:?}");
            over_tokens += usize::from(!pieces.iter().any(|p| p.contains(&stop)));
        }
    }
    assert!(over_tokens > 5, "{over_tokens} stop strings lay over several tokens");
}

/// A schema past the bounds is refused before anything is compiled.
#[test]
fn a_schema_that_is_too_large_is_the_client_s_error() {
    let serving = Serving::start(&llama(), &[]);
    let with = |properties: usize, n: usize| {
        let all: Map<String, Value> = (0..properties)
            .map(|i| (format!("property{i}"), json!({"type": "string", "pattern": "^[a-z]+$"})))
            .collect();
        let schema = json!({"type": "object", "properties": all});
        let format = json!({"type": "json_schema", "json_schema": {"name": "large", "schema": schema}});
        serving.ask(CHAT, &ask(1, &json!({"response_format": format, "n": n, "max_tokens": 8})))
    };
    let (status, answer) = with(2000, 2);
    let named = json!("response_format.json_schema.schema");
    assert_eq!((status, &answer["error"]["param"]), (400, &named), "{answer}");
    let (status, answer) = with(100, 100);
    assert_eq!((status, answer["choices"].as_array().map(Vec::len)), (200, Some(100)), "{answer}");
}

#[test]
fn json_comes_whole_and_streamed() {
    let serving = Serving::start(&llama(), &["--batch-invariant"]);
    let (mut complete, mut full) = (0, 0);
    for seed in 0..6 {
        // What ends JSON is pulled up, so that random weights come to its end.
        let tokenizer = Tokenizer::from_dir(&llama()).expect("a tokenizer");
        let ends = |id: u32| match tokenizer.token_bytes(id) {
            b"\"" => Some(14),
            b"}" => Some(9),
            _ => None,
        };
        let bias: Map<String, Value> = (5..tokenizer.vocab_size() as u32)
            .filter_map(|id| Some((id.to_string(), json!(ends(id)?))))
            .collect();
        let wanted = ask(
            seed,
            &json!({"response_format": {"type": "json_object"}, "max_tokens": 200, "logit_bias": bias}),
        );
        let (text, end, _) = whole(&serving, &wanted);
        let (pieces, same) = streamed(&serving, &wanted);
        assert_eq!((pieces.concat(), &same), (text.clone(), &end));
        if end == "stop" {
            let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
            assert!(value.is_object(), "{text}");
            complete += 1;
            full += usize::from(value.as_object().is_some_and(|o| !o.is_empty()));
        }
    }
    assert!(complete > 2 && full > 0, "{complete} answers came to their end, {full} with something in them");
}
