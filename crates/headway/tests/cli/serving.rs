//! A server as a process, and what it says.

use super::support::headway;
use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, ChildStderr, Command, Stdio},
    time::{Duration, Instant},
};

/// A server, ended with the test.
pub struct Serving {
    child: Child,
    address: String,
    log: BufReader<ChildStderr>,
}

impl Serving {
    /// With a cache of 4 MiB, unless asked otherwise.
    pub fn start(model: &Path, args: &[&str]) -> Self {
        let memory = ["--kv-cache-memory", "4MiB"];
        let memory = if args.contains(&memory[0]) { &[][..] } else { &memory[..] };
        let mut child = headway()
            .args(["serve", "--port", "0", "--served-model-name", "tiny", "--model"])
            .arg(model)
            .args(memory)
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

    /// Sends a request; its answer is read later, or never.
    pub fn open(&self, path: &str, body: &Value) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("connected");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
        let body = body.to_string();
        write!(stream, "POST {path} HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len())
            .expect("written");
        stream
    }

    pub fn ask(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, body) = reply(self.open(path, body));
        (status, serde_json::from_str(&body).unwrap_or_else(|e| panic!("{e}: {body}")))
    }

    /// The objects of a streamed answer.
    pub fn events(&self, path: &str, body: &Value) -> Vec<Value> {
        let (status, text) = reply(self.open(path, body));
        assert_eq!(status, 200, "{text}");
        let mut data: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{text}");
        data.iter().map(|d| serde_json::from_str(d).unwrap_or_else(|e| panic!("{e}: {d}"))).collect()
    }

    /// A metric's value.
    pub fn metric(&self, name: &str) -> f64 {
        let mut stream = TcpStream::connect(&self.address).expect("connected");
        write!(stream, "GET /metrics HTTP/1.0\r\n\r\n").expect("written");
        let text = reply(stream).1;
        let start = format!("headway:{name} ");
        let value = text.lines().find_map(|l| l.strip_prefix(&start)?.parse().ok());
        value.unwrap_or_else(|| panic!("{name} in {text}"))
    }

    /// Bytes of memory that the process holds.
    pub fn memory(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("a process");
        let kib =
            text.lines().find_map(|l| l.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse().ok());
        kib.map(|n: u64| n << 10).expect("its memory")
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        // The shell's own: not every machine has the program.
        let mut kill = Command::new("sh");
        kill.args(["-c", "kill -TERM $0", &self.child.id().to_string()]);
        assert!(kill.status().expect("a shell").success());
    }

    /// Sends SIGTERM; the exit code and the rest of the log.
    pub fn end(self) -> (Option<i32>, String) {
        self.terminate();
        self.ended()
    }

    /// The exit code and the rest of the log of a server that ends.
    pub fn ended(mut self) -> (Option<i32>, String) {
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

/// Status and body.
pub fn reply(mut stream: TcpStream) -> (u16, String) {
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).expect("a status");
    (status, body.to_owned())
}

/// Waits for something to become true.
#[track_caller]
pub fn until(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < Duration::from_secs(20), "never came true: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
