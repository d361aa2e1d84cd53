//! The end: what runs may finish, what comes is refused, and it does end.

use crate::support::{Running, post, until};
use headway_server::ServeOptions;
use serde_json::json;
use std::{
    io::Write,
    time::{Duration, Instant},
};

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

/// What came before the end is asked for is taken, as far as it may have come.
#[test]
fn requests_that_are_being_read_or_tokenised_have_their_time_too() {
    let mut server = Running::start();
    let body = json!({"prompt": "a", "max_tokens": 2}).to_string();
    let text = post(TEXT, &body);
    let (first, rest) = text.split_at(text.len() - 5);
    let mut half = server.send(first);
    let heavy = server.open(TEXT, &json!({"prompt": vec!["word ".repeat(1000); 100], "max_tokens": 1}));
    std::thread::sleep(Duration::from_millis(50));
    server.ask_to_end();
    until("it drains", || server.get("/health").status == 503);
    server.post(TEXT, &json!({"prompt": "a"})).refused(503, None, &["ending"]);
    half.0.write_all(rest.as_bytes()).expect("written");
    let r = half.reply();
    assert_eq!(r.status, 200, "{r:?}");
    assert_eq!(heavy.reply().status, 200);
    server.end().expect("a good end");
}

#[test]
fn a_request_whose_body_does_not_come_in_time_is_told_that_the_server_ends() {
    let grace_period = Duration::from_millis(200);
    let mut server = Running::with(ServeOptions { grace_period, ..ServeOptions::default() });
    let text = post(TEXT, &json!({"prompt": "a"}).to_string());
    let half = server.send(&text[..text.len() - 5]);
    std::thread::sleep(Duration::from_millis(50));
    let began = Instant::now();
    server.ask_to_end();
    let r = half.reply();
    r.refused(503, None, &["the server is ending"]);
    assert!(r.head.contains("retry-after: 1"), "{r:?}");
    assert!(began.elapsed() >= grace_period);
    server.end().expect("a good end");
}
