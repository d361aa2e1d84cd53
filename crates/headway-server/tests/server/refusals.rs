//! Bad requests: the right status, the parameter named, and the server goes on.

use crate::support::{Running, post};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

#[test]
fn parameters_out_of_range_are_named() {
    let server = Running::start();
    let with = |name: &str, value: Value| {
        let mut chat = json!({"messages": [{"role": "user", "content": "Hi"}]});
        let mut text = json!({"prompt": "Hi"});
        (chat[name], text[name]) = (value.clone(), value);
        (chat, text)
    };
    let both: &[(&str, Value, &str)] = &[
        ("temperature", json!(-1), "at least 0"),
        ("temperature", json!("hot"), "invalid type"),
        ("temperature", json!(1e40), "temperature"),
        ("top_p", json!(0), "above 0"),
        ("top_p", json!(1.5), "at most 1"),
        ("top_k", json!(-2), "-2"),
        ("min_p", json!(2), "from 0 to 1"),
        ("repetition_penalty", json!(0), "from 0.01 to 100"),
        ("repetition_penalty", json!(1e-40), "from 0.01 to 100"),
        ("repetition_penalty", json!(101), "from 0.01 to 100"),
        ("n", json!(0), "1 to 128"),
        ("n", json!(1000), "1 to 128"),
        ("n", json!(1.5), "invalid"),
        ("stop", json!(""), "not empty"),
        ("stop", json!(["a", ""]), "not empty"),
        ("stop", json!([1]), "a string or a list of strings"),
        ("stop", json!(vec!["a"; 65]), "at most 64"),
        ("stream", json!("yes"), "invalid type"),
        ("stream_options", json!({"include_usage": true}), "needs stream"),
        ("max_tokens", json!(0), "at least 1"),
        ("max_tokens", json!(-5), "invalid value"),
        ("logit_bias", json!({"5": 101}), "from -100 to 100"),
        ("logit_bias", json!({"5": "high"}), "logit_bias"),
        ("logit_bias", json!({"word": 1}), "logit_bias"),
        ("logit_bias", json!({"-1": 1}), "logit_bias.-1"),
        (
            "logit_bias",
            (0..2000).map(|i| (i.to_string(), json!(1))).collect::<serde_json::Map<_, _>>().into(),
            "2000 tokens",
        ),
        ("seed", json!("x"), "expected an integer"),
        ("logit_bias", json!([5, 1]), "invalid type"),
        ("presence_penalty", json!(2.5), "from -2 to 2"),
        ("frequency_penalty", json!(-2.5), "from -2 to 2"),
        ("frequency_penalty", json!("often"), "invalid type"),
        ("min_tokens", json!(-1), "invalid value"),
        ("stop", json!("a".repeat(8193)), "8192 bytes"),
        ("stop_token_ids", json!(vec![1; 1025]), "at most 1024"),
        ("seed", json!("one"), "invalid type"),
        ("stop_token_ids", json!([-1]), "invalid value"),
        ("temprature", json!(1), "did you mean temperature?"),
    ];
    for (format, param, words) in [
        (json!({"type": "xml"}), "response_format.type", "text, json_object or json_schema"),
        (json!({"type": "json_schema"}), "response_format.json_schema.schema", "missing"),
        (
            json!({"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}),
            "response_format.json_schema.schema",
            "nothing",
        ),
        (json!("json"), "response_format", "invalid type"),
    ] {
        let (chat, text) = with("response_format", format);
        server.post(CHAT, &chat).refused(400, Some(param), &[words]);
        server.post(TEXT, &text).refused(400, Some(param), &[words]);
    }
    for (name, value, words) in both {
        let (chat, text) = with(name, value.clone());
        for r in [server.post(CHAT, &chat), server.post(TEXT, &text)] {
            let param = r.json()["error"]["param"].as_str().unwrap_or("").to_owned();
            let inside = [format!("{name}["), format!("{name}.")].iter().any(|p| param.starts_with(p));
            assert!(param == *name || inside, "{name} {value}: {r:?}");
            r.refused(400, Some(&param), &[words]);
        }
    }
    for (name, value, words) in [
        ("logprobs", json!(21), "at most 20"),
        ("best_of", json!(4), "best_of other than n"),
        ("suffix", json!("end"), "not supported"),
        ("min_tokens", json!(17), "at most max_tokens"),
    ] {
        server.post(TEXT, &with(name, value).1).refused(400, Some(name), &[words]);
    }
    for (name, value, words) in [
        ("top_logprobs", json!(3), "needs logprobs"),
        ("tool_choice", json!("required"), "\"none\" or \"auto\""),
        ("functions", json!([{"name": "f"}]), "not supported"),
        ("modalities", json!(["audio"]), "not supported"),
    ] {
        server.post(CHAT, &with(name, value).0).refused(400, Some(name), &[words]);
    }
    let two =
        json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "max_completion_tokens": 4});
    server.post(CHAT, &two).refused(400, Some("max_tokens"), &["give one of them"]);
    let echo = json!({"prompt": "a", "echo": true, "logprobs": 1});
    server.post(TEXT, &echo).refused(400, Some("logprobs"), &["echo"]);
    // What says no more than what is so anyway is taken; null is as good as nothing.
    let fine = json!({"prompt": "a", "max_tokens": 1, "presence_penalty": 0.5, "frequency_penalty": -2,
        "logit_bias": {"5": -100, "17": 1.5}, "min_tokens": 1.0, "best_of": 1,
        "suffix": null, "user": "me", "temperature": null, "stop": null, "logprobs": null});
    assert_eq!(server.post(TEXT, &fine).status, 200);
    assert_eq!(server.alive(), 0);
}

#[test]
fn prompts_that_are_none() {
    let server = Running::start();
    for (prompt, words) in [
        (json!(null), "missing"),
        (json!([]), "entries"),
        (json!([[]]), "empty"),
        (json!({"a": 1}), "a string, a list of strings"),
        (json!([1, "a"]), "a string, a list of strings"),
        (json!([-1]), "a string, a list of strings"),
    ] {
        server.post(TEXT, &json!({"prompt": prompt})).refused(400, Some("prompt"), &[words]);
    }
    let long = json!({"prompt": "a", "max_tokens": 1_000_000});
    let r = server.post(TEXT, &long);
    r.refused(400, Some("prompt"), &["1000000 generated"]);
    assert_eq!(r.json()["error"]["code"], "context_length_exceeded");
    // Refused before anything is copied for each answer.
    let longer = json!({"prompt": vec![1; 100_000], "n": 128});
    server.post(TEXT, &longer).refused(400, Some("prompt"), &["100000 tokens", "--max-model-len"]);
    let many = json!({"prompt": vec![[1]; 1000], "n": 128, "max_tokens": 1});
    server.post(TEXT, &many).refused(400, Some("n"), &["128000", "at most 1024"]);
    for (messages, param, words) in [
        (json!([]), "messages", "empty"),
        (json!("Hi"), "messages", "invalid type"),
        (json!([{"content": "Hi"}]), "messages[0]", "role"),
        (
            json!([{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}]),
            "messages[1].role",
            "robot",
        ),
        (json!([{"role": "user"}]), "messages[0].content", "missing"),
        (
            json!([{"role": "assistant", "content": "a", "tool_calls": 5}]),
            "messages[0].tool_calls",
            "a list of calls",
        ),
        (json!([5]), "messages[0]", "expected an object"),
        (json!([{"role": "user", "content": 5}]), "messages[0].content", "a string or a list of parts"),
        (
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            "messages[0].content[0].type",
            "text parts only",
        ),
    ] {
        let r = server.post(CHAT, &json!({"messages": messages}));
        let found = r.json()["error"]["param"].as_str().unwrap_or("").to_owned();
        assert!(
            found == param || (param == "messages[0].content" && found == "messages[0]"),
            "{param}: {r:?}"
        );
        r.refused(400, Some(&found), &[words]);
    }
    let parts = json!([{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]}]);
    assert_eq!(server.post(CHAT, &json!({"messages": parts, "max_tokens": 1})).status, 200);
}

#[test]
fn bodies_that_are_no_requests() {
    let server = Running::start();
    for body in ["", "{", "[1]", "\"a\"", "{\"prompt\": \"a\",}", "\u{0}", "{\"prompt\": \"\\ud800\"}"] {
        server.send(&post(TEXT, body)).reply().refused(400, None, &["the body"]);
    }
    let deep = format!("{{\"prompt\": {}1{}}}", "[".repeat(5000), "]".repeat(5000));
    server.send(&post(TEXT, &deep)).reply().refused(400, None, &["the body"]);
    let form = "POST /v1/completions HTTP/1.0\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}";
    server.send(form).reply().refused(415, None, &["application/json"]);
    server.post("/v1/embeddings", &json!({})).refused(404, None, &["/v1/embeddings", "/openapi.json"]);
    server.get("/v1/completions").refused(405, None, &["GET"]);
    assert_eq!(server.post(TEXT, &json!({"prompt": "a", "max_tokens": 1})).status, 200);
}

#[test]
fn a_model_that_is_not_served() {
    let options = headway_server::ServeOptions {
        served_names: vec!["small".into(), "org/small".into()],
        ..headway_server::ServeOptions::default()
    };
    let server = Running::with(options);
    let ask = |model: Value| server.post(TEXT, &json!({"prompt": "a", "max_tokens": 1, "model": model}));
    assert_eq!(ask(json!("small")).json()["model"], "small");
    assert_eq!(ask(json!("org/small")).json()["model"], "org/small");
    assert_eq!(ask(json!(null)).json()["model"], "small");
    let r = ask(json!("gpt-5"));
    assert_eq!(
        r.refused(404, Some("model"), &["gpt-5", "org/small"]).json()["error"]["code"],
        "model_not_found"
    );
    assert_eq!(server.get("/v1/models/org/small").status, 200);
    server.get("/v1/models/gpt-5").refused(404, Some("model"), &["gpt-5"]);
    server.get("/v1/models/%ff").refused(400, Some("model"), &["UTF-8"]);
}

/// Whatever a client wrote at length, its refusal comes at once and is short.
#[test]
fn long_names_and_values_are_told_by_their_beginning() {
    let server = Running::start();
    let long = "x".repeat(4 << 20);
    let many = "\u{e9}".repeat(1 << 20);
    for (path, body) in [
        (TEXT, json!({"prompt": "a", long.clone(): 1})),
        (TEXT, json!({"prompt": "a", many.clone(): 1})),
        (CHAT, json!({"messages": [{"role": "user", "content": "a"}], long.clone(): 1})),
        ("/tokenize", json!({"prompt": "a", long.clone(): 1})),
        ("/detokenize", json!({"tokens": [1], long.clone(): 1})),
        (TEXT, json!({"prompt": "a", "model": long})),
        (TEXT, json!({"prompt": "a", "temperature": long})),
        (TEXT, json!({"prompt": "a", "n": many})),
        (TEXT, json!({"prompt": "a", "logit_bias": {long.clone(): 1}})),
        (TEXT, json!({"prompt": "a", "stream_options": {long.clone(): 1}})),
        (TEXT, json!({"prompt": "a", "response_format": {"type": long}})),
        (
            TEXT,
            json!({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": long}}}}),
        ),
        (CHAT, json!({"messages": [{"role": long, "content": "a"}]})),
        (CHAT, json!({"messages": [{"role": "user", "content": [{"type": many}]}]})),
        (
            CHAT,
            json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": long}}]}]}),
        ),
    ] {
        let began = std::time::Instant::now();
        let r = server.post(path, &body);
        assert!(r.status == 400 || r.status == 404, "{r:?}");
        assert!(r.text.len() < 6000, "{} bytes: {}", r.text.len(), &r.text[..200]);
        let param = r.json()["error"]["param"].as_str().map_or(0, |p| p.chars().count());
        assert!(param <= 101, "{param}");
        // Under a second; a machine that does much else gets more.
        assert!(began.elapsed() < std::time::Duration::from_secs(5), "{:?}", began.elapsed());
    }
}

/// Schemas that would take seconds to compile, or for ever, are refused, and nobody else waits for them.
#[test]
fn schemas_that_take_long_are_refused_and_hold_nobody_up() {
    let server = Running::start();
    let hold = |n: usize| -> Vec<Value> {
        (0..n)
            .map(|i| json!({"type": "string", "pattern": format!("(.*{}){{3}}", char::from(b'a' + i as u8))}))
            .collect()
    };
    let objects: Vec<Value> = (0..3000)
        .map(|i| json!({"properties": {format!("k{i}"): {"pattern": format!(".*{i}.*")}}}))
        .collect();
    let keys: serde_json::Map<_, _> =
        (0..200).map(|i| (format!("^a{i}.*b$"), json!({"type": "string"}))).collect();
    let chain: serde_json::Map<_, _> = (0..3000)
        .map(|i| (format!("a{i}"), json!({"items": {"$ref": format!("#/$defs/a{}", i + 1)}})))
        .collect();
    let schemas = [
        json!({"allOf": hold(20)}),
        json!({"properties": {"a": {"allOf": hold(12)}}}),
        json!({"enum": (0..600_000).collect::<Vec<_>>()}),
        json!({"anyOf": objects}),
        json!({"patternProperties": keys}),
        json!({"$ref": "#/$defs/a0", "$defs": chain}),
    ];
    let ask = |schema: &Value| {
        json!({"prompt": "a", "max_tokens": 1,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}})
    };
    std::thread::scope(|scope| {
        for schema in &schemas {
            for _ in 0..2 {
                scope.spawn(|| {
                    let r = server.post(TEXT, &ask(schema));
                    r.refused(
                        400,
                        Some("response_format.json_schema.schema"),
                        &["response_format.json_schema.schema: "],
                    );
                });
            }
        }
        for _ in 0..10 {
            assert_eq!(server.post(TEXT, &json!({"prompt": "a", "max_tokens": 1})).status, 200);
        }
    });
    let two = json!({"allOf": hold(2)});
    assert_eq!(server.post(TEXT, &ask(&two)).status, 200);
    // References to themselves mean nothing.
    for schema in [json!({"$ref": "#"}), json!({"allOf": [{"$ref": "#"}]}), json!({"$ref": "#/nowhere"})] {
        let r = server.post(TEXT, &ask(&schema));
        assert!((400..500).contains(&r.status), "{schema}: {r:?}");
    }
}
