//! A hub on loopback that speaks as much HTTP/1.1 as the client needs, and can be told to misbehave.
//!
//! One thread a connection, one request a connection; everything ends when the value is dropped.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::sources::digest::hex;

/// The commit that every revision stands for.
pub(super) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A request as the hub saw it.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub method: String,
    pub path: String,
    pub headers: BTreeMap<String, String>,
}

/// What the hub does wrong. Faults of a file apply to its transfers (GET), not to its description (HEAD).
#[derive(Debug, Clone, Default)]
pub(super) struct Faults {
    /// Every request gets this status and this `x-error-code`.
    pub status: Option<(u16, &'static str)>,
    /// No request is answered.
    pub silent: bool,
    /// The next transfers of the weights end after so many bytes each, in turn.
    pub cuts: Vec<usize>,
    /// Transfers of the weights stop after so many bytes, with the connection open.
    pub stall_after: Option<usize>,
    /// Transfers of the weights bring other bytes than announced.
    pub corrupt: bool,
    /// Ranges are ignored, the whole file is sent.
    pub ignores_ranges: bool,
    /// There is no list of files.
    pub no_list: bool,
    /// HEAD is not allowed.
    pub no_head: bool,
    /// Large files are served by another host name, by redirect.
    pub redirects: bool,
    /// These redirects don't say the size.
    pub hides_size: bool,
    /// Files are first redirected to another path of the hub, as those of a renamed repository are.
    pub renamed: bool,
    /// Every transfer waits so long before it starts.
    pub slow: Duration,
}

#[derive(Debug)]
struct State {
    repo: String,
    files: BTreeMap<String, Vec<u8>>,
    faults: Mutex<Faults>,
    seen: Mutex<Vec<Request>>,
    stop: AtomicBool,
    address: SocketAddr,
}

/// The running server.
#[derive(Debug)]
pub(super) struct FakeHub {
    state: Arc<State>,
    accepting: Option<JoinHandle<()>>,
}

impl FakeHub {
    pub(super) fn start(repo: &str, files: &[(&str, &[u8])], faults: Faults) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let state = Arc::new(State {
            repo: repo.to_owned(),
            files: files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect(),
            faults: Mutex::new(faults),
            seen: Mutex::default(),
            stop: AtomicBool::new(false),
            address: listener.local_addr().expect("bound"),
        });
        let shared = Arc::clone(&state);
        let accepting = std::thread::spawn(move || {
            let mut serving = Vec::new();
            for stream in listener.incoming().map_while(Result::ok) {
                if shared.stop.load(Ordering::SeqCst) {
                    break;
                }
                let shared = Arc::clone(&shared);
                serving.push(std::thread::spawn(move || drop(serve(&shared, stream))));
            }
            for thread in serving {
                thread.join().expect("a serving thread panicked");
            }
        });
        Self { state, accepting: Some(accepting) }
    }

    pub(super) fn endpoint(&self) -> String {
        format!("http://{}", self.state.address)
    }

    pub(super) fn set(&self, faults: Faults) {
        *self.state.faults.lock().unwrap() = faults;
    }

    /// The requests so far whose path contains `part`, by method.
    pub(super) fn seen(&self, method: &str, part: &str) -> Vec<Request> {
        let seen = self.state.seen.lock().unwrap();
        seen.iter().filter(|r| r.method == method && r.path.contains(part)).cloned().collect()
    }
}

impl Drop for FakeHub {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.state.address);
        if let Some(thread) = self.accepting.take() {
            let _ = thread.join();
        }
    }
}

pub(super) fn sha256(bytes: &[u8]) -> String {
    hex(Sha256::new_with_prefix(bytes))
}

fn serve(state: &State, mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let Some(request) = read_request(&stream)? else { return Ok(()) };
    state.seen.lock().unwrap().push(request.clone());
    let faults = state.faults.lock().unwrap().clone();
    if faults.silent {
        return wait_for_end(state, &stream);
    }
    if let Some((status, code)) = faults.status {
        return reply(&mut stream, status, &[("X-Error-Code", code.to_owned())], b"", true);
    }
    let list = format!("/api/models/{}/revision/", state.repo);
    let resolve = format!("/{}/resolve/", state.repo);
    if request.path.starts_with(&list) && !faults.no_list {
        let names: Vec<_> = state.files.keys().map(|name| serde_json::json!({ "rfilename": name })).collect();
        let body = serde_json::json!({ "sha": COMMIT, "siblings": names }).to_string();
        return reply(&mut stream, 200, &[], body.as_bytes(), true);
    }
    let name = request.path.strip_prefix(&resolve).and_then(|rest| Some(rest.split_once('/')?.1));
    let stored = request.path.strip_prefix("/storage/");
    if faults.renamed && name.is_some() {
        let location = request.path.replacen(&state.repo, "new/name", 1);
        return reply(&mut stream, 307, &[("Location", location)], b"", request.method == "GET");
    }
    let renamed =
        request.path.strip_prefix("/new/name/resolve/").and_then(|rest| Some(rest.split_once('/')?.1));
    let name = name.or(renamed);
    match name.or(stored).and_then(|name| state.files.get_key_value(name)) {
        Some((name, bytes)) => {
            send_file(state, &mut stream, &request, &faults, name, bytes, stored.is_some())
        }
        None if name.is_some() => {
            reply(&mut stream, 404, &[("X-Error-Code", "EntryNotFound".into())], b"", true)
        }
        None => reply(&mut stream, 404, &[], b"", true),
    }
}

fn send_file(
    state: &State,
    stream: &mut TcpStream,
    request: &Request,
    faults: &Faults,
    name: &str,
    bytes: &[u8],
    stored: bool,
) -> std::io::Result<()> {
    let weights = name.ends_with(".safetensors");
    let etag = if weights { sha256(bytes) } else { sha256(bytes)[..40].to_owned() };
    let mut headers = vec![("X-Repo-Commit", COMMIT.to_owned()), ("ETag", format!("\"{etag}\""))];
    if request.method == "HEAD" && faults.no_head {
        return reply(stream, 405, &[], b"", false);
    }
    if weights && faults.redirects && !stored {
        headers.push(("X-Linked-Etag", format!("\"{etag}\"")));
        if !faults.hides_size {
            headers.push(("X-Linked-Size", bytes.len().to_string()));
        }
        // Another name for the same host, as the storage behind the hub is another host.
        headers.push(("Location", format!("http://localhost:{}/storage/{name}", state.address.port())));
        return reply(stream, 302, &headers, b"", request.method == "GET");
    }
    if request.method == "HEAD" {
        headers.push(("Content-Length", bytes.len().to_string()));
        return reply(stream, 200, &headers, b"", false);
    }
    std::thread::sleep(faults.slow);
    let corrupted: Vec<u8> = bytes.iter().map(|b| b ^ u8::from(weights && faults.corrupt)).collect();
    let range = request.headers.get("range").filter(|_| !faults.ignores_ranges);
    let (status, body) = match range.and_then(|range| parse_range(range, bytes.len())) {
        Some((from, to)) => {
            headers.push(("Content-Range", format!("bytes {from}-{}/{}", to - 1, bytes.len())));
            (206, &corrupted[from..to])
        }
        None => (200, &corrupted[..]),
    };
    if !weights || request.headers.get("range").is_some_and(|range| range == "bytes=0-0") {
        return reply(stream, status, &headers, body, true);
    }
    headers.push(("Content-Length", body.len().to_string()));
    if let Some(after) = faults.stall_after {
        reply(stream, status, &headers, &body[..after.min(body.len())], false)?;
        return wait_for_end(state, stream);
    }
    let mut shared = state.faults.lock().unwrap();
    let end = if shared.cuts.is_empty() { body.len() } else { shared.cuts.remove(0).min(body.len()) };
    drop(shared);
    reply(stream, status, &headers, &body[..end], false)
}

/// Writes a whole answer; `sized` adds the body's length.
fn reply(
    stream: &mut TcpStream,
    status: u16,
    headers: &[(&str, String)],
    body: &[u8],
    sized: bool,
) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {status} x\r\nConnection: close\r\n");
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    if sized {
        head.push_str(&format!("Content-Length: {}\r\n", body.len()));
    }
    head.push_str("\r\n");
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    stream.flush()
}

fn read_request(stream: &TcpStream) -> std::io::Result<Option<Request>> {
    let mut lines = BufReader::new(stream.take(64 * 1024)).lines();
    let Some(first) = lines.next().transpose()? else { return Ok(None) };
    let mut words = first.split(' ').map(str::to_owned);
    let (Some(method), Some(path)) = (words.next(), words.next()) else { return Ok(None) };
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line?;
        if line.is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':') {
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    Ok(Some(Request { method, path, headers }))
}

fn parse_range(range: &str, len: usize) -> Option<(usize, usize)> {
    let (from, to) = range.strip_prefix("bytes=")?.split_once('-')?;
    let from: usize = from.parse().ok()?;
    let to = to.parse::<usize>().map_or(len, |last| last + 1).min(len);
    (from < to).then_some((from, to))
}

/// Holds a connection open without a word until the client or the test ends.
fn wait_for_end(state: &State, stream: &TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_millis(50)))?;
    let mut stream = stream;
    for _ in 0..200 {
        match stream.read(&mut [0u8; 64]) {
            Ok(0) => break,
            _ if state.stop.load(Ordering::SeqCst) => break,
            _ => {}
        }
    }
    Ok(())
}
