//! What answers look like, whole and streamed.

use crate::support::Running;
use serde_json::{Value, json};

fn hello() -> Value {
    json!([{"role": "user", "content": "Hello"}])
}

#[test]
fn a_chat_completion_has_the_api_s_shape() {
    let server = Running::start();
    let r = server.post("/v1/chat/completions", &json!({"messages": hello(), "max_tokens": 3}));
    assert_eq!(r.status, 200, "{r:?}");
    let a = r.json();
    assert!(a["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(a["object"], "chat.completion");
    assert_eq!(a["model"], "headway");
    assert!(a["created"].as_u64().unwrap() > 1_600_000_000);
    assert_eq!(
        a["choices"],
        json!([{
            "index": 0,
            "message": {"role": "assistant", "content": "a b c ", "refusal": null},
            "logprobs": null,
            "finish_reason": "length",
        }])
    );
    let prompt = a["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(prompt > 1);
    assert_eq!(
        a["usage"],
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": 3,
            "total_tokens": prompt + 3,
            "prompt_tokens_details": {"cached_tokens": 1},
        })
    );
}

#[test]
fn a_stream_says_what_the_whole_answer_says() {
    let server = Running::start();
    let options = json!({"include_usage": true});
    let body =
        json!({"messages": hello(), "max_tokens": 3, "n": 2, "stream": true, "stream_options": options});
    let events = server.post("/v1/chat/completions", &body).events();
    let (usage, chunks) = events.split_last().unwrap();
    let mut texts = [String::new(), String::new()];
    let mut reasons = vec![];
    for chunk in chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["id"], events[0]["id"]);
        assert_eq!(chunk["usage"], Value::Null);
        let choice = &chunk["choices"][0];
        let index = choice["index"].as_u64().unwrap() as usize;
        texts[index].push_str(choice["delta"]["content"].as_str().unwrap_or(""));
        reasons.extend(choice["finish_reason"].as_str().map(|r| (index, r.to_owned())));
    }
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(texts, ["a b c ", "a b c "]);
    reasons.sort();
    assert_eq!(reasons, [(0, "length".into()), (1, "length".into())]);
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 6);
    assert_eq!(usage["usage"]["prompt_tokens_details"]["cached_tokens"], 1);
    // Without the option no event has counts.
    let body = json!({"messages": hello(), "max_tokens": 1, "stream": true});
    let events = server.post("/v1/chat/completions", &body).events();
    assert!(events.iter().all(|e| e.get("usage").is_none()), "{events:?}");
}

#[test]
fn completions_take_prompts_of_every_form() {
    let server = Running::start();
    let texts = |prompt: Value, n: usize| -> Vec<String> {
        let r = server.post("/v1/completions", &json!({"prompt": prompt, "max_tokens": 2, "n": n}));
        assert_eq!(r.status, 200, "{r:?}");
        let a = r.json();
        assert_eq!(a["object"], "text_completion");
        let choices = a["choices"].as_array().unwrap();
        assert!(choices.iter().enumerate().all(|(i, c)| c["index"] == i));
        choices.iter().map(|c| c["text"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(texts(json!("Hello"), 1), ["a b "]);
    assert_eq!(texts(json!(["Hello", "you"]), 2), ["a b "; 4]);
    assert_eq!(texts(json!([1, 2, 3]), 1), ["a b "]);
    assert_eq!(texts(json!([[1, 2], [3]]), 1), ["a b "; 2]);
}

#[test]
fn echo_puts_the_prompt_in_front() {
    let server = Running::start();
    let body = json!({"prompt": ["Hello", "you"], "max_tokens": 1, "echo": true, "n": 2});
    let a = server.post("/v1/completions", &body).json();
    let texts: Vec<_> =
        a["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["Helloa ", "Helloa ", "youa ", "youa "]);
    let body = json!({"prompt": "Hello", "max_tokens": 1, "echo": true, "stream": true});
    let events = server.post("/v1/completions", &body).events();
    let text: String = events.iter().map(|e| e["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, "Helloa ");
}

#[test]
fn log_probabilities_stand_beside_their_tokens() {
    let server = Running::start();
    let body = json!({"messages": hello(), "max_tokens": 2, "logprobs": true, "top_logprobs": 2});
    let a = server.post("/v1/chat/completions", &body).json();
    let content = a["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 2);
    assert_eq!(content[0]["logprob"], -1.5);
    assert!(content[0]["token"].is_string() && content[0]["bytes"].is_array());
    let top: Vec<_> = content[0]["top_logprobs"].as_array().unwrap().iter().map(|t| &t["logprob"]).collect();
    assert_eq!(top, [-1.0, -2.0]);
    // As a list of chunks it is the same list.
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = server.post("/v1/chat/completions", &streamed).events();
    let all: Vec<&Value> =
        events.iter().filter_map(|e| e["choices"][0]["logprobs"]["content"].as_array()).flatten().collect();
    assert_eq!(all, content.iter().collect::<Vec<_>>());

    let a =
        server.post("/v1/completions", &json!({"prompt": "Hello", "max_tokens": 3, "logprobs": 1})).json();
    let l = &a["choices"][0]["logprobs"];
    assert_eq!(l["token_logprobs"], json!([-1.5, -1.5, -1.5]));
    assert_eq!(l["text_offset"], json!([0, 2, 4]));
    assert_eq!(l["tokens"].as_array().unwrap().len(), 3);
    // The token itself is among them even where it is not the most likely.
    assert!(l["top_logprobs"][0].as_object().unwrap().values().any(|v| *v == -1.5));
}

#[test]
fn text_becomes_ids_and_text_again() {
    let server = Running::start();
    let t = server.post("/tokenize", &json!({"prompt": "Hello", "return_token_strs": true})).json();
    let ids = t["tokens"].as_array().unwrap();
    assert_eq!(t["count"], ids.len());
    assert_eq!(t["token_strs"].as_array().unwrap().len(), ids.len());
    assert!(t["max_model_len"].as_u64().unwrap() > 0);
    let plain = server.post("/tokenize", &json!({"prompt": "Hello", "add_special_tokens": false})).json();
    let back = server.post("/detokenize", &json!({"tokens": plain["tokens"]})).json();
    assert_eq!(back["prompt"], "Hello");
    let chat = server.post("/tokenize", &json!({"messages": hello()})).json();
    assert!(chat["count"].as_u64() > t["count"].as_u64());
    server.post("/detokenize", &json!({"tokens": [4_000_000]})).refused(400, Some("tokens"), &["4000000"]);
}

/// Roles, calls with their arguments, tools and further variables, as templates of models with tools read them.
#[test]
fn the_template_sees_the_whole_conversation() {
    let server = Running::talking(
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}\
         {{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{{ m.tool_call_id or '' }}\
         {% endfor %}{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{{ mood or '' }}",
    );
    let call = |arguments: Value| json!([{"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}]);
    let body = |arguments: Value, choice: &str| {
        json!({
            "messages": [
                {"role": "developer", "content": "S"},
                {"role": "user", "content": [{"type": "text", "text": "U"}]},
                {"role": "assistant", "content": null, "tool_calls": call(arguments)},
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
            ],
            "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
            "tool_choice": choice,
            "chat_template_kwargs": {"mood": "!"},
        })
    };
    let seen = |body: &Value| {
        let ids = server.post("/tokenize", body).json()["tokens"].clone();
        server.post("/detokenize", &json!({"tokens": ids})).json()["prompt"].as_str().unwrap().to_owned()
    };
    let text = "<system>S<user>U<assistant>add{\"a\": 1}<tool>3c1";
    assert_eq!(seen(&body(json!("{\"a\": 1}"), "auto")), format!("{text}[add]!"));
    assert_eq!(seen(&body(json!({"a": 1}), "auto")), format!("{text}[add]!"));
    assert_eq!(seen(&body(json!("{\"a\": 1}"), "none")), format!("{text}!"));
    let bad = server.post("/v1/chat/completions", &body(json!("{a"), "auto"));
    bad.refused(400, Some("messages[2].tool_calls[0].function.arguments"), &["not JSON"]);
}

#[test]
fn models_and_what_the_server_says_of_itself() {
    let server = Running::start();
    let m = server.get("/v1/models").json();
    assert_eq!(m["object"], "list");
    assert_eq!(m["data"][0]["id"], "headway");
    assert_eq!(server.get("/v1/models/headway").json()["object"], "model");
    server.get("/v1/models/gpt-5").refused(404, Some("model"), &["gpt-5", "headway"]);
    assert_eq!(server.get("/version").json()["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(server.get("/v1/headway/startup").json()["model"], "fake");
    let page = server.get("/");
    assert!(page.status == 200 && page.text.contains("<title>headway"), "{page:?}");
    assert!(page.head.contains("content-security-policy"));
}

/// The document names every endpoint that there is, and every parameter that is read.
#[test]
fn the_openapi_document_is_whole() {
    let server = Running::start();
    let doc = server.get("/openapi.json").json();
    assert!(doc["openapi"].as_str().unwrap().starts_with("3."));
    for (path, methods) in doc["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys().filter(|m| *m != "parameters") {
            let path = path.replace("{model}", "headway");
            let r = match method.as_str() {
                "get" => server.get(&path),
                _ => server.post(&path, &json!({})),
            };
            assert!(r.status == 200 || r.status == 400, "{method} {path}: {r:?}");
        }
    }
    // A wrong name is answered with the known ones: those the document has.
    for (path, schema) in [
        ("/v1/completions", "CompletionRequest"),
        ("/v1/chat/completions", "ChatCompletionRequest"),
        ("/tokenize", "TokenizeRequest"),
        ("/detokenize", "DetokenizeRequest"),
    ] {
        let body = match schema {
            "ChatCompletionRequest" => json!({"messages": hello()}),
            "DetokenizeRequest" => json!({"tokens": [1]}),
            _ => json!({"prompt": "a"}),
        };
        let properties = doc["components"]["schemas"][schema]["properties"].as_object().unwrap();
        let mut wrong = body.clone();
        wrong["no_such_parameter_at_all"] = json!(1);
        let r = server.post(path, &wrong);
        let message = r.json()["error"]["message"].as_str().unwrap().to_owned();
        let known = message.split("known are ").nth(1).unwrap_or_else(|| panic!("{message}"));
        for name in known.split(", ") {
            assert!(properties.contains_key(name), "{schema} lacks {name}");
        }
        for name in properties.keys() {
            let mut body = body.clone();
            if body.get(name).is_none() {
                body[name] = json!({"neither": "this"});
            }
            let r = server.post(path, &body);
            let unknown = r.status == 400 && r.text.contains("is not a parameter");
            assert!(!unknown, "{schema} has {name}, which is not read: {r:?}");
        }
    }
}
