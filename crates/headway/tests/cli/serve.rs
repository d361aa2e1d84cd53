//! `headway serve` as a process: answers are those of `generate`, a grammar holds, and it ends as asked.

use super::support::{generate, headway, llama, without_tokenizer};
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, ChildStderr, Command, Stdio},
    time::{Duration, Instant},
};

/// A server, ended with the test.
struct Serving {
    child: Child,
    address: String,
    log: BufReader<ChildStderr>,
}

impl Serving {
    fn start(model: &Path, args: &[&str]) -> Self {
        let mut child = headway()
            .args([
                "serve",
                "--port",
                "0",
                "--served-model-name",
                "tiny",
                "--kv-cache-memory",
                "4MiB",
                "--model",
            ])
            .arg(model)
            .args(args)
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut log = BufReader::new(child.stderr.take().expect("piped"));
        let mut line = String::new();
        while !line.contains("serving tiny at http://") {
            line.clear();
            assert!(log.read_line(&mut line).expect("a log") > 0, "it ended before it was ready");
        }
        let address =
            line.split("http://").nth(1).and_then(|l| l.split(' ').next()).expect("an address").to_owned();
        Self { child, address, log }
    }

    fn ask(&self, path: &str, body: &Value) -> (u16, Value) {
        let mut stream = TcpStream::connect(&self.address).expect("connected");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
        let body = body.to_string();
        write!(stream, "POST {path} HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len())
            .expect("written");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).expect("a status");
        (status, serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {body}")))
    }

    /// Sends SIGTERM; the exit code and the rest of the log.
    fn end(mut self) -> (Option<i32>, String) {
        // The shell's own: not every machine has the program.
        let mut kill = Command::new("sh");
        kill.args(["-c", "kill -TERM $0", &self.child.id().to_string()]);
        assert!(kill.status().expect("a shell").success());
        let began = Instant::now();
        let code = loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                break status.code();
            }
            assert!(began.elapsed() < Duration::from_secs(30), "it does not end");
            std::thread::sleep(Duration::from_millis(10));
        };
        let mut rest = String::new();
        self.log.read_to_string(&mut rest).expect("the log's rest");
        (code, rest)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

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
    for seed in 0..6 {
        let ask = json!({
            "messages": [{"role": "user", "content": "A thing"}],
            "response_format": format,
            "seed": seed,
            "max_tokens": 120,
            "logprobs": true,
        });
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
