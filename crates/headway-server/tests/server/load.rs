//! Clients that leave, clients that don't read, and more of them than there is room for.

use crate::support::{Running, until};
use headway_server::ServeOptions;
use serde_json::json;
use std::{sync::atomic::Ordering::SeqCst, time::Duration};

const TEXT: &str = "/v1/completions";

/// How a long answer is asked for.
fn long(stream: bool) -> serde_json::Value {
    json!({"prompt": "Hello", "max_tokens": 50_000, "stream": stream})
}

#[test]
fn a_client_that_leaves_takes_its_request_along() {
    let server = Running::start();
    // Streamed and under way.
    let mut streamed = server.open(TEXT, &long(true));
    streamed.read_until("data: ");
    assert_eq!(server.alive(), 1);
    drop(streamed);
    until("the streamed request is gone", || server.alive() == 0);
    // Not streamed.
    let whole = server.open(TEXT, &long(false));
    until("the whole one runs", || server.alive() == 1);
    drop(whole);
    until("the whole one is gone", || server.alive() == 0);
    // Waiting for others.
    server.knobs.max_running.store(1, SeqCst);
    let mut first = server.open(TEXT, &long(true));
    first.read_until("data: ");
    let second = server.open(TEXT, &long(true));
    until("one waits", || server.metric("headway:num_requests_waiting") == 1.0);
    drop(second);
    until("the waiting one is gone", || server.alive() == 1);
    drop(first);
    until("all are gone", || server.alive() == 0);
    assert_eq!(server.knobs.aborted.load(SeqCst), 4);
    until("the metrics say so", || {
        server.metric("headway:num_requests_running") == 0.0
            && server.metric("headway:kv_cache_used_pages") == 0.0
    });
    assert_eq!(server.metric("headway:request_success_total{finished_reason=\"abort\"}"), 4.0);
}

/// Though its bytes are not read: the next request's wait for the answer to the first.
#[test]
fn a_client_that_sends_two_requests_and_leaves_is_noticed() {
    let server = Running::start();
    let body = long(false).to_string();
    let one = format!(
        "POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let two = server.send(&one.repeat(2));
    until("the first runs", || server.alive() == 1);
    drop(two);
    until("both are gone", || server.alive() == 0);
    assert_eq!(server.metric("headway:request_success_total{finished_reason=\"abort\"}"), 1.0);
}

/// Big bodies wait for one another; what is small does not wait for them.
#[test]
fn many_long_prompts_hold_no_short_one_up() {
    let server = Running::start();
    let many = json!({"prompt": vec!["word ".repeat(1600); 256], "max_tokens": 1});
    let all: Vec<_> = (0..3).map(|_| server.open(TEXT, &many)).collect();
    std::thread::sleep(Duration::from_millis(50));
    let began = std::time::Instant::now();
    assert_eq!(server.post(TEXT, &json!({"prompt": "a", "max_tokens": 1})).status, 200);
    let short = began.elapsed();
    for one in all {
        assert_eq!(one.reply().status, 200);
    }
    let long = began.elapsed();
    assert!(short * 2 < long, "{short:?} of {long:?}");
}

#[test]
fn one_of_several_answers_does_not_outlive_its_client() {
    let server = Running::start();
    let mut body = long(true);
    body["n"] = json!(5);
    let mut many = server.open(TEXT, &body);
    many.read_until("\"index\":4");
    assert_eq!(server.alive(), 5);
    drop(many);
    until("all five are gone", || server.alive() == 0);
}

#[test]
fn a_client_that_does_not_read_loses_its_request_and_holds_nobody_up() {
    let server = Running::start();
    *server.knobs.step_time.lock().unwrap() = Duration::ZERO;
    server.knobs.word_bytes.store(16 << 10, SeqCst);
    let lazy = server.open(TEXT, &long(true));
    until("it runs", || server.alive() == 1);
    let other = server.post(TEXT, &json!({"prompt": "Hello", "max_tokens": 20}));
    assert_eq!(other.status, 200);
    until("the lazy one is ended", || server.alive() == 0);
    // What it reads late ends with the reason.
    let text = lazy.reply().text;
    assert!(
        text.contains("read too slowly") && text.trim_end().ends_with("data: [DONE]"),
        "{}",
        &text[text.len() - 300..]
    );
}

#[test]
fn a_full_queue_sends_clients_away() {
    let server = Running::with(ServeOptions { max_queue: 2, ..ServeOptions::default() });
    server.knobs.max_running.store(1, SeqCst);
    let mut waiting = vec![];
    for n in 1..=3 {
        waiting.push(server.open(TEXT, &long(true)));
        until("taken", || server.alive() == n);
    }
    until("two wait", || server.metric("headway:num_requests_waiting") == 2.0);
    let r = server.post(TEXT, &long(false));
    r.refused(429, None, &["--max-queue is 2"]);
    assert!(r.head.contains("retry-after: 1"), "{r:?}");
    drop(waiting);
    until("there is room again", || server.alive() == 0);
    assert_eq!(server.post(TEXT, &json!({"prompt": "a", "max_tokens": 1})).status, 200);
    // A call of more answers than the queue has room for runs where nothing waits.
    let many = json!({"prompt": "a", "max_tokens": 1, "n": 10});
    assert_eq!(server.post(TEXT, &many).status, 200);
}

#[test]
fn an_answer_has_its_time() {
    let options =
        ServeOptions { request_timeout: Some(Duration::from_millis(150)), ..ServeOptions::default() };
    let server = Running::with(options);
    server.post(TEXT, &long(false)).refused(504, None, &["0.15 s", "--request-timeout"]);
    let events = server.post(TEXT, &long(true)).events();
    assert!(events.last().unwrap()["error"]["message"].as_str().unwrap().contains("--request-timeout"));
    until("both are gone", || server.alive() == 0);
}

#[test]
fn many_at_once_all_get_their_answers() {
    let server = Running::with(ServeOptions { max_queue: 1000, ..ServeOptions::default() });
    *server.knobs.step_time.lock().unwrap() = Duration::from_micros(100);
    let all: Vec<_> = (1..=200)
        .map(|n| (n, server.open(TEXT, &json!({"prompt": "Hello", "max_tokens": n, "stream": n % 2 == 0}))))
        .collect();
    for (n, connection) in all {
        let r = connection.reply();
        let tokens = match n % 2 {
            0 => r.events().len() - 1,
            _ => r.json()["usage"]["completion_tokens"].as_u64().unwrap() as usize,
        };
        assert_eq!(tokens, n);
    }
    until("nothing is left", || server.metric("headway:num_requests_running") == 0.0);
    let counted = |name: &str| server.metric(name);
    assert_eq!(counted("headway:time_to_first_token_seconds_count"), 200.0);
    assert_eq!(counted("headway:e2e_request_latency_seconds_count"), 200.0);
    assert_eq!(counted("headway:generation_tokens_total"), f64::from(200 * 201 / 2));
    assert_eq!(counted("headway:inter_token_latency_seconds_count"), f64::from(200 * 201 / 2 - 200));
    assert_eq!(counted("headway:request_success_total{finished_reason=\"length\"}"), 200.0);
}
