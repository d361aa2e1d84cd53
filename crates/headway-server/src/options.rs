//! [`ServeOptions`]: what the server is told besides the engine's options.

use std::{net::IpAddr, time::Duration};

/// The server's own options.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Where it listens.
    pub host: IpAddr,
    /// The port; 0 takes a free one.
    pub port: u16,
    /// The names by which requests may ask for the model; the first is in answers.
    pub served_names: Vec<String>,
    /// The most requests that wait.
    pub max_queue: usize,
    /// The key that requests must show.
    pub api_key: Option<String>,
    /// Origins of web pages that may ask; `*` for all.
    pub cors_origins: Vec<String>,
    /// The most bytes of a body.
    pub max_body_bytes: usize,
    /// The most time that a body may take to come.
    pub body_timeout: Duration,
    /// The most time that an answer may take.
    pub request_timeout: Option<Duration>,
    /// How long running requests may go on when the server is asked to end.
    pub grace_period: Duration,
    /// Write prompts to the log.
    pub log_prompts: bool,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            host: IpAddr::from([127, 0, 0, 1]),
            port: 8000,
            served_names: vec!["headway".into()],
            max_queue: 1024,
            api_key: None,
            cors_origins: vec![],
            max_body_bytes: 16 << 20,
            body_timeout: Duration::from_secs(30),
            request_timeout: None,
            grace_period: Duration::from_secs(30),
            log_prompts: false,
        }
    }
}
