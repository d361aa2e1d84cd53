//! The end: what runs may finish, what comes is refused, and it does end.

use crate::support::{Running, until};
use headway_server::ServeOptions;
use serde_json::json;
use std::time::{Duration, Instant};

const TEXT: &str = "/v1/completions";

#[test]
fn running_requests_finish_and_new_ones_are_refused() {
    let mut server = Running::start();
    let mut running = server.open(TEXT, &json!({"prompt": "Hello", "max_tokens": 300, "stream": true}));
    running.read_until("data: ");
    server.ask_to_end();
    until("it drains", || server.get("/health").status == 503);
    server.post(TEXT, &json!({"prompt": "a"})).refused(503, None, &["ending"]);
    let text = running.rest();
    assert!(text.contains("\"finish_reason\":\"length\"") && text.contains("[DONE]"), "{text}");
    server.end().expect("a good end");
}

#[test]
fn the_grace_period_ends() {
    let grace_period = Duration::from_millis(200);
    let mut server = Running::with(ServeOptions { grace_period, ..ServeOptions::default() });
    let mut streamed = server.open(TEXT, &json!({"prompt": "Hello", "max_tokens": 90_000, "stream": true}));
    let whole = server.open(TEXT, &json!({"prompt": "Hello", "max_tokens": 90_000}));
    streamed.read_until("data: ");
    until("both run", || server.alive() == 2);
    let began = Instant::now();
    server.ask_to_end();
    let text = streamed.rest();
    assert!(text.contains("the server is ending") && text.contains("[DONE]"), "{text}");
    whole.reply().refused(503, None, &["the server is ending"]);
    assert!(began.elapsed() >= grace_period);
    server.end().expect("a good end");
}

#[test]
fn an_idle_server_ends_at_once_whatever_connections_are_open() {
    let server = Running::start();
    let idle = server.send("");
    let half = server.send("GET /health HT");
    let began = Instant::now();
    server.end().expect("a good end");
    assert!(began.elapsed() < Duration::from_secs(5));
    drop((idle, half));
}
