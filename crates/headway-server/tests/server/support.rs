//! A running server, and a client that can misbehave.

use crate::fake::{Fake, Knobs, MAX_TOKENS};
use headway_engine::text::{ChatTemplate, TemplateSource, Tokenizer};
use headway_server::{
    ServeError, ServeOptions, Server,
    driver::{EngineHandle, Model},
    metrics::Metrics,
};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::{Duration, Instant},
};
use tokio::sync::oneshot;

/// Every wait of a test ends.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The tiny Llama's tokenizer, with its template.
pub fn tokenizer() -> Tokenizer {
    let dir = headway_testkit::testdata::model_dir("tiny-llama").expect("test data");
    Tokenizer::from_dir(&dir).expect("its tokenizer")
}

/// A server on a port of its own, with a fake engine behind it.
pub struct Running {
    pub address: SocketAddr,
    pub knobs: Arc<Knobs>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
    go: Option<mpsc::Sender<()>>,
}

impl Running {
    /// With these options; the port is a free one.
    pub fn with(options: ServeOptions) -> Self {
        let server = Self::loading(options);
        server.ready();
        server
    }

    pub fn start() -> Self {
        Self::with(ServeOptions::default())
    }

    /// Its model has this chat template.
    pub fn talking(template: &'static str) -> Self {
        let server = Self::open_with(ServeOptions::default(), Some(template));
        server.ready();
        server
    }

    /// Its engine opens when [`Self::ready`] is called.
    pub fn loading(options: ServeOptions) -> Self {
        Self::open_with(options, None)
    }

    fn open_with(options: ServeOptions, template: Option<&'static str>) -> Self {
        let options = ServeOptions { port: 0, ..options };
        let knobs: Arc<Knobs> = Arc::default();
        let (go, wait) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let (tell, told) = mpsc::channel();
        let theirs = Arc::clone(&knobs);
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
            let outcome = runtime.block_on(async move {
                let metrics = Arc::new(Metrics::default());
                let open = move |progress: &mut dyn FnMut(usize, usize)| {
                    progress(1, 3);
                    wait.recv().map_err(|e| e.to_string())?;
                    let tokenizer = tokenizer();
                    let own = |text| ChatTemplate::new(&TemplateSource::single(text), &BTreeMap::new());
                    let model = Model {
                        template: template.map_or_else(|| tokenizer.chat_template(), own),
                        tokenizer: Some(tokenizer.clone()),
                        max_request_tokens: MAX_TOKENS,
                        startup: json!({"model": "fake"}),
                        created: 1,
                    };
                    Ok((Fake::new(theirs, tokenizer), model))
                };
                let engine = EngineHandle::start(open, options.max_queue, Arc::clone(&metrics))?;
                let server = Server::bind(options, engine, metrics).await?;
                tell.send(server.address()?).expect("the test waits");
                server
                    .run(async {
                        let _ = stopped.await;
                    })
                    .await
            });
            runtime.shutdown_background();
            outcome
        });
        let address = told.recv_timeout(PATIENCE).expect("the server listens");
        Self { address, knobs, stop: Some(stop), thread: Some(thread), go: Some(go) }
    }

    pub fn ready(&self) {
        self.go.as_ref().expect("not ended").send(()).expect("the engine waits");
        until("ready", || self.get("/health").status == 200);
    }

    /// Asks it to end.
    pub fn ask_to_end(&mut self) {
        let _ = self.stop.take().expect("asked once").send(());
    }

    /// How it ended.
    pub fn end(mut self) -> Result<(), ServeError> {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        self.go = None;
        let began = Instant::now();
        let thread = self.thread.take().expect("ended once");
        while !thread.is_finished() {
            assert!(began.elapsed() < PATIENCE, "the server does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        thread.join().expect("no panic")
    }

    /// How it ended by itself.
    pub fn ended(mut self) -> Result<(), ServeError> {
        let thread = self.thread.take().expect("ended once");
        until("the server ends by itself", || thread.is_finished());
        thread.join().expect("no panic")
    }

    pub fn get(&self, path: &str) -> Reply {
        self.send(&format!("GET {path} HTTP/1.0\r\n\r\n")).reply()
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.open(path, body).reply()
    }

    /// Sends a request whose answer is read later, or never.
    pub fn open(&self, path: &str, body: &Value) -> Connection {
        self.send(&post(path, &body.to_string()))
    }

    /// Sends bytes.
    pub fn send(&self, text: &str) -> Connection {
        let mut stream = TcpStream::connect(self.address).expect("connected");
        stream.set_read_timeout(Some(PATIENCE)).expect("set");
        stream.write_all(text.as_bytes()).expect("written");
        Connection(stream)
    }

    pub fn alive(&self) -> usize {
        self.knobs.alive.load(std::sync::atomic::Ordering::SeqCst)
    }

    /// A metric's value, by its line's beginning.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text;
        let line = text.lines().find(|l| l.starts_with(name) && l[name.len()..].starts_with([' ', '{']));
        line.and_then(|l| l.rsplit(' ').next()?.parse().ok()).unwrap_or_else(|| panic!("{name} in {text}"))
    }
}

/// A POST of JSON; HTTP/1.0, so that the answer ends with the connection.
pub fn post(path: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )
}

/// Waits for something to become true.
#[track_caller]
pub fn until(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < PATIENCE, "never came true: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A request that was sent.
pub struct Connection(pub TcpStream);

impl Connection {
    /// The whole answer.
    pub fn reply(mut self) -> Reply {
        let mut bytes = vec![];
        self.0.read_to_end(&mut bytes).expect("an answer that ends");
        Reply::parse(&String::from_utf8(bytes).expect("UTF-8"))
    }

    /// What is left of an answer that was read in part.
    pub fn rest(mut self) -> String {
        let mut bytes = vec![];
        self.0.read_to_end(&mut bytes).expect("an answer that ends");
        String::from_utf8(bytes).expect("UTF-8")
    }

    /// Reads until the answer has `text` in it.
    pub fn read_until(&mut self, text: &str) -> String {
        let (mut seen, mut buffer) = (String::new(), [0; 512]);
        while !seen.contains(text) {
            let n = self.0.read(&mut buffer).expect("more to come");
            assert!(n > 0, "{text:?} never came: {seen}");
            seen.push_str(&String::from_utf8_lossy(&buffer[..n]));
        }
        seen
    }
}

/// An answer.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub text: String,
}

impl Reply {
    fn parse(all: &str) -> Self {
        let (head, text) = all.split_once("\r\n\r\n").unwrap_or((all, ""));
        let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or_else(|| panic!("{all:?}"));
        Self { status, head: head.to_ascii_lowercase(), text: text.into() }
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The objects of a stream, which ends as streams do.
    #[track_caller]
    pub fn events(&self) -> Vec<Value> {
        assert!(self.head.contains("content-type: text/event-stream"), "{self:?}");
        let mut data: Vec<&str> = self.text.lines().filter_map(|l| l.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{self:?}");
        data.iter().map(|d| serde_json::from_str(d).unwrap_or_else(|e| panic!("{e}: {d}"))).collect()
    }

    /// It was refused as the API refuses: this status, this parameter, and words in the message.
    #[track_caller]
    pub fn refused(&self, status: u16, param: Option<&str>, words: &[&str]) -> &Self {
        assert_eq!(self.status, status, "{self:?}");
        let error = &self.json()["error"];
        assert_eq!(error["param"].as_str(), param, "{self:?}");
        assert!(error["type"].is_string(), "{self:?}");
        for word in words {
            assert!(
                error["message"].as_str().is_some_and(|m| m.contains(word)),
                "{word:?} is missing: {self:?}"
            );
        }
        self
    }
}
