//! `headway serve` with a real engine under load, and its end: clients that leave, long prompts beside short ones,
//! queues, signals, what stands in the log.

use super::{
    serving::{Serving, reply, until},
    support::llama,
};
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader, Read},
    time::{Duration, Instant},
};

const TEXT: &str = "/v1/completions";

/// Streamed.
fn long() -> Value {
    json!({"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": true, "stream": true})
}

#[test]
fn a_client_that_leaves_gives_its_pages_back() {
    let serving = Serving::start(&llama(), &["--max-num-seqs", "2"]);
    let clients: Vec<_> = (0..5)
        .map(|i| {
            let mut ask = long();
            ask["stream"] = json!(i % 2 == 0);
            serving.open(TEXT, &ask)
        })
        .collect();
    until("two run and three wait", || {
        serving.metric("num_requests_running") == 2.0 && serving.metric("num_requests_waiting") == 3.0
    });
    assert!(serving.metric("kv_cache_used_pages") > 0.0);
    drop(clients);
    until("nothing is left", || {
        ["num_requests_running", "num_requests_waiting", "kv_cache_used_pages"]
            .iter()
            .all(|gauge| serving.metric(gauge) == 0.0)
    });
    let made = serving.metric("generation_tokens_total");
    assert!(made < 4.0 * 2000.0, "{made} tokens: they ran to their end");
    assert_eq!(serving.ask(TEXT, &json!({"prompt": [1], "max_tokens": 2})).0, 200);
}

/// While a prompt of many chunks is computed, another's tokens come, one a chunk.
#[test]
fn a_long_prompt_holds_others_up_by_one_chunk_at_most() {
    let few = ["--max-num-batched-tokens", "64", "--max-num-seqs", "4", "--kv-cache-memory", "16MiB"];
    let serving = Serving::start(&llama(), &few);
    let mut talk = long();
    talk["max_tokens"] = json!(1500);
    let mut reader = BufReader::new(serving.open(TEXT, &talk));
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        assert!(reader.read_line(&mut line).expect("a line") > 0);
    }
    let prompt: Vec<usize> = (0..1600).map(|t| t * 7 % 500).collect();
    let chunks = 1600 / 63;
    let times = std::thread::spawn(move || {
        let mut times = vec![];
        for line in reader.lines() {
            if line.expect("a line").starts_with("data: ") {
                times.push(Instant::now());
            }
        }
        times
    });
    let began = Instant::now();
    let (status, answer) = serving.ask(TEXT, &json!({"prompt": prompt, "max_tokens": 1}));
    let ended = Instant::now();
    assert_eq!((status, &answer["usage"]["prompt_tokens"]), (200, &json!(1600)), "{answer}");
    let meanwhile = times.join().expect("times").into_iter().filter(|t| (began..ended).contains(t)).count();
    // The last ones may still be on their way when the answer is there.
    assert!(meanwhile >= chunks * 2 / 3, "{meanwhile} tokens while {chunks} chunks were computed");
}

/// What waits costs its text and little more.
#[test]
fn thousands_wait_in_little_memory() {
    let serving = Serving::start(&llama(), &["--max-num-seqs", "1", "--max-queue", "5000"]);
    let first = serving.open(TEXT, &long());
    until("it runs", || serving.metric("num_requests_running") == 1.0);
    let before = serving.memory();
    let prompts: Vec<Vec<usize>> = (0..1000).map(|i| (0..100).map(|t| (t + i) % 500).collect()).collect();
    let ask = json!({"prompt": prompts, "max_tokens": 50});
    let calls: Vec<_> = (0..4).map(|_| serving.open(TEXT, &ask)).collect();
    until("four thousand wait", || serving.metric("num_requests_waiting") >= 3900.0);
    let each = serving.memory().saturating_sub(before) / 3900;
    // A hundred ids are 400 bytes, and as many again on their way through JSON.
    assert!(each < 8 << 10, "{each} bytes a request");
    drop((first, calls));
    until("all are gone", || serving.metric("num_requests_waiting") == 0.0);
}

#[test]
fn a_second_signal_ends_at_once() {
    let serving = Serving::start(&llama(), &["--grace-period", "1000", "--max-num-seqs", "1"]);
    // Sixteen, one after another: longer than the test.
    let mut many = long();
    many["n"] = json!(16);
    let mut talk = serving.open(TEXT, &many);
    let mut some = [0; 400];
    talk.read_exact(&mut some).expect("it has begun");
    serving.terminate();
    until("it drains", || serving.ask(TEXT, &json!({"prompt": [1], "max_tokens": 1})).0 == 503);
    let began = Instant::now();
    serving.terminate();
    let (code, log) = serving.ended();
    assert_eq!(code, Some(130), "{log}");
    assert!(log.contains("ended at once, as asked"), "{log}");
    assert!(began.elapsed() < Duration::from_secs(5));
}

#[test]
fn the_grace_period_is_given_and_kept() {
    let serving = Serving::start(&llama(), &["--grace-period", "30"]);
    let mut short = long();
    short["max_tokens"] = json!(300);
    let mut talk = serving.open(TEXT, &short);
    let mut some = [0; 400];
    talk.read_exact(&mut some).expect("it has begun");
    serving.terminate();
    let mut rest = String::new();
    talk.read_to_string(&mut rest).expect("the rest");
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.trim_end().ends_with("[DONE]"), "{rest}");
    assert_eq!(serving.ended().0, Some(0));
    let serving = Serving::start(&llama(), &["--grace-period", "0", "--max-num-seqs", "1"]);
    let mut many = long();
    many["n"] = json!(16);
    let talk = serving.open(TEXT, &many);
    until("it runs", || serving.metric("num_requests_running") == 1.0);
    serving.terminate();
    let (_, rest) = reply(talk);
    assert!(rest.contains("the server is ending") && rest.trim_end().ends_with("[DONE]"), "{rest}");
    assert_eq!(serving.ended().0, Some(0));
}

#[test]
fn text_stands_in_the_log_only_where_asked() {
    let ask = |serving: &Serving| {
        serving.ask(
            "/v1/chat/completions",
            &json!({"messages": [{"role": "user", "content": "Xanadu7"}], "max_tokens": 2}),
        );
        serving.ask(TEXT, &json!({"prompt": "Xanadu7", "max_tokens": 2}));
        serving.ask(TEXT, &json!({"prompt": "Xanadu7", "max_tokens": -2}));
        serving.ask(TEXT, &json!({"prompt": "Xanadu7", "max_tokens": 100_000}));
        serving.ask("/tokenize", &json!({"prompt": "Xanadu7"}));
    };
    for format in ["json", "text"] {
        let serving = Serving::start(&llama(), &["--log-level", "debug", "--log-format", format]);
        ask(&serving);
        let (code, log) = serving.end();
        assert_eq!(code, Some(0));
        assert!(log.contains("call ended") && !log.contains("Xanadu"), "{log}");
    }
    let serving = Serving::start(&llama(), &["--log-prompts"]);
    ask(&serving);
    let (_, log) = serving.end();
    assert!(log.matches("Xanadu7").count() >= 2, "{log}");
}
