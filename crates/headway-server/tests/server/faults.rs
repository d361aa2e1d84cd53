//! Faults of requests, of steps, and of the engine.

use crate::{
    fake::FAILS,
    support::{Running, until},
};
use headway_server::ServeError;
use serde_json::json;
use std::{sync::atomic::Ordering::SeqCst, time::Duration};

const TEXT: &str = "/v1/completions";

#[test]
fn a_request_s_own_failure_is_its_own() {
    let server = Running::start();
    let mut other = server.open(TEXT, &json!({"prompt": "Hello", "max_tokens": 200, "stream": true}));
    other.read_until("data: ");
    server.post(TEXT, &json!({"prompt": [1, FAILS], "max_tokens": 9})).refused(
        500,
        None,
        &["prompt is empty"],
    );
    let events = server.post(TEXT, &json!({"prompt": [1, FAILS], "max_tokens": 9, "stream": true})).events();
    assert_eq!(events.last().unwrap()["error"]["type"], "server_error");
    assert!(other.rest().contains("\"finish_reason\":\"length\""));
}

#[test]
fn a_failed_step_ends_those_in_it_and_the_server_lives() {
    let server = Running::start();
    server.knobs.failing_steps.store(1, SeqCst);
    server.post(TEXT, &json!({"prompt": "a", "max_tokens": 2})).refused(500, None, &["failed in a step"]);
    assert_eq!(server.alive(), 0);
    assert_eq!(server.post(TEXT, &json!({"prompt": "a", "max_tokens": 2})).status, 200);
    assert_eq!(server.metric("headway:request_success_total{finished_reason=\"error\"}"), 1.0);
}

#[test]
fn a_failed_step_leaves_those_that_wait() {
    let server = Running::start();
    server.knobs.max_running.store(2, SeqCst);
    let long = json!({"prompt": "a", "max_tokens": 5000, "stream": true});
    let mut running = [server.open(TEXT, &long), server.open(TEXT, &long)];
    running.iter_mut().for_each(|r| drop(r.read_until("data: ")));
    let waiting = server.open(TEXT, &json!({"prompt": "b", "max_tokens": 20, "stream": true}));
    until("it waits", || server.metric("headway:num_requests_waiting") == 1.0);
    server.knobs.failing_steps.store(1, SeqCst);
    for r in running {
        assert!(r.rest().contains("failed in a step"));
    }
    let rest = waiting.rest();
    assert!(rest.contains("\"finish_reason\":\"length\"") && !rest.contains("failed"), "{rest}");
    assert_eq!(server.metric("headway:request_success_total{finished_reason=\"error\"}"), 2.0);
}

#[test]
fn an_engine_that_only_fails_ends_the_server() {
    let server = Running::start();
    server.knobs.failing_steps.store(1000, SeqCst);
    for _ in 0..8 {
        server.post(TEXT, &json!({"prompt": "a"})).refused(500, None, &[]);
    }
    let e = server.ended().expect_err("it ended");
    assert!(matches!(&e, ServeError::Engine(why) if why.contains("8 steps failed one after another")), "{e}");
}

#[test]
fn an_engine_s_panic_ends_the_server_with_its_words() {
    let server = Running::start();
    server.knobs.panics.store(true, SeqCst);
    let r = server.post(TEXT, &json!({"prompt": "a"}));
    r.refused(500, None, &["the engine ended"]);
    let e = server.ended().expect_err("it ended");
    assert!(e.to_string().contains("panicked") && e.to_string().contains("told to panic"), "{e}");
}

#[test]
fn nothing_is_taken_before_the_model_is_there() {
    let server = Running::loading(headway_server::ServeOptions::default());
    until("it has begun to load", || server.get("/health").text.contains("1 of 3 layers"));
    for path in ["/health", "/v1/models", "/v1/headway/startup"] {
        let r = server.get(path);
        r.refused(503, None, &["loading (1 of 3 layers)"]);
        assert!(r.head.contains("retry-after: 1"), "{r:?}");
    }
    server.post(TEXT, &json!({"prompt": "a"})).refused(503, None, &["loading"]);
    assert_eq!(server.get("/metrics").status, 200);
    server.ready();
    assert_eq!(server.post(TEXT, &json!({"prompt": "a", "max_tokens": 1})).status, 200);
}

#[test]
fn an_idle_engine_makes_no_steps() {
    let server = Running::start();
    assert_eq!(server.post(TEXT, &json!({"prompt": "a", "max_tokens": 3})).status, 200);
    until("it rests", || server.alive() == 0);
    let steps = server.knobs.steps.load(SeqCst);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(server.knobs.steps.load(SeqCst), steps);
}
