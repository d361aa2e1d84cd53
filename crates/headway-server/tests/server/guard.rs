//! Keys, origins, and bounds on what a client sends.

use crate::support::{Running, post};
use headway_server::ServeOptions;
use serde_json::json;
use std::{io::Write, time::Duration};

#[test]
fn a_key_guards_what_costs() {
    let options = ServeOptions { api_key: Some("secret".into()), ..ServeOptions::default() };
    let server = Running::with(options);
    let with = |header: &str| {
        let body = "{\"prompt\": \"a\", \"max_tokens\": 1}";
        let plain = post("/v1/completions", body);
        server.send(&plain.replacen("\r\n", &format!("\r\n{header}"), 1)).reply()
    };
    for scheme in ["Bearer", "bearer", "BEARER"] {
        assert_eq!(with(&format!("Authorization: {scheme} secret\r\n")).status, 200, "{scheme}");
    }
    for header in [
        "",
        "Authorization: Bearer secre\r\n",
        "Authorization: Bearer secrets\r\n",
        "Authorization: secret\r\n",
    ] {
        let r = with(header);
        r.refused(401, None, &["Authorization"]);
        assert!(r.head.contains("www-authenticate: bearer"), "{r:?}");
    }
    server.get("/v1/models").refused(401, None, &[]);
    server.post("/tokenize", &json!({"prompt": "a"})).refused(401, None, &[]);
    for path in ["/", "/health", "/version", "/metrics", "/openapi.json"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
}

#[test]
fn origins_are_answered_where_allowed() {
    let ask = "OPTIONS /v1/completions HTTP/1.0\r\nOrigin: https://a.example\r\n\
               Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,x-stainless-os\r\n\r\n";
    let header = "access-control-allow-origin";
    assert!(!Running::start().send(ask).reply().head.contains(header));
    let some = ServeOptions { cors_origins: vec!["https://a.example".into()], ..ServeOptions::default() };
    let server = Running::with(some);
    let head = server.send(ask).reply().head;
    assert!(head.contains(&format!("{header}: https://a.example")), "{head}");
    assert!(head.contains("access-control-allow-headers: authorization,x-stainless-os"), "{head}");
    let get = "GET /health HTTP/1.0\r\nOrigin: https://a.example\r\n\r\n";
    let head = server.send(get).reply().head;
    assert!(head.contains("access-control-expose-headers: retry-after"), "{head}");
    let other = ask.replace("a.example", "b.example");
    assert!(!server.send(&other).reply().head.contains(header));
    let all = ServeOptions { cors_origins: vec!["*".into()], ..ServeOptions::default() };
    assert!(Running::with(all).send(ask).reply().head.contains(&format!("{header}: *")));
}

/// The only limit is the option's.
#[test]
fn a_body_of_megabytes_is_taken() {
    let server = Running::start();
    let padded = format!("{{\"prompt\": \"a\", \"max_tokens\": 1{}}}", " ".repeat(9 << 20));
    for path in ["/v1/completions", "/tokenize"] {
        let body =
            if path == "/tokenize" { padded.replace(", \"max_tokens\": 1", "") } else { padded.clone() };
        assert_eq!(server.send(&post(path, &body)).reply().status, 200, "{path}");
    }
    let over = format!("{{\"prompt\": \"a\"{}}}", " ".repeat(17 << 20));
    let mut large = server.send("");
    // It is refused by its length; the rest need not be sent.
    large.0.write_all(&post("/v1/completions", &over).as_bytes()[..1000]).unwrap();
    large.reply().refused(413, None, &["16777216 bytes", "--max-body-size"]);
}

#[test]
fn bodies_have_a_size_and_a_time() {
    let options = ServeOptions {
        max_body_bytes: 1000,
        body_timeout: Duration::from_millis(200),
        ..ServeOptions::default()
    };
    let server = Running::with(options);
    let long = json!({"prompt": "a".repeat(2000)});
    server.post("/v1/completions", &long).refused(413, None, &["1000 bytes", "--max-body-size"]);
    // Without a length: it is counted as it comes.
    let mut chunked = server.send(
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n",
    );
    chunked.0.write_all(format!("7d0\r\n{}\r\n0\r\n\r\n", "a".repeat(2000)).as_bytes()).unwrap();
    let text = chunked.read_until("--max-body-size");
    assert!(text.starts_with("HTTP/1.1 413"), "{text}");
    let slow = server.send("POST /v1/completions HTTP/1.0\r\nContent-Length: 10\r\n\r\n{");
    slow.reply().refused(408, None, &["0.2 s"]);
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1})).status, 200);
}
