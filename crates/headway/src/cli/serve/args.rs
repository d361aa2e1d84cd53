//! What can be typed after `headway serve`.

use crate::cli::{args::EngineArgs, parse};
use clap::{Args, ValueEnum};
use headway_server::ServeOptions;
use std::{net::IpAddr, time::Duration};

/// `headway serve`.
#[derive(Args, Debug)]
#[command(after_help = "\
Endpoints: /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize, /health, /version, /metrics,
/v1/headway/startup, /openapi.json, and a status page at /. TLS is left to a proxy in front.

SIGTERM or Ctrl-C ends: new requests are refused, running ones have --grace-period; a second one ends at once.

Examples:
  headway serve
  headway serve --model gemma3-270m --port 8080 --max-num-seqs 32
  headway serve --host 0.0.0.0 --api-key-file key.txt --log-format json
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'")]
pub struct ServeArgs {
    /// Address to listen on; 0.0.0.0 for all of the machine's.
    #[arg(long, env = "HEADWAY_HOST", value_name = "IP", default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, env = "HEADWAY_PORT", value_name = "N", default_value = "8000")]
    pub port: u16,
    /// Name by which requests ask for the model; can be given several times. [default: what --model says]
    #[arg(long, env = "HEADWAY_SERVED_MODEL_NAME", value_name = "NAME", value_delimiter = ',')]
    pub served_model_name: Vec<String>,
    /// The most requests that wait; more are told to come again.
    #[arg(long, env = "HEADWAY_MAX_QUEUE", value_name = "N", default_value = "1024", value_parser = parse::at_least_one)]
    pub max_queue: usize,
    /// Key that requests must show, as Authorization: Bearer KEY. [default: none is needed]
    #[arg(long, env = "HEADWAY_API_KEY", value_name = "KEY", conflicts_with = "api_key_file")]
    pub api_key: Option<String>,
    /// A file with the key on its first line, for machines where others see command lines.
    #[arg(long, env = "HEADWAY_API_KEY_FILE", value_name = "FILE")]
    pub api_key_file: Option<std::path::PathBuf>,
    /// Origin of web pages that may ask, as https://example.org, or *; can be given several times. [default: none]
    #[arg(long, env = "HEADWAY_CORS_ORIGIN", value_name = "ORIGIN", value_delimiter = ',')]
    pub cors_origin: Vec<String>,
    /// The most bytes of a request's body, or a number with KiB, MiB or GiB. [default: 16MiB]
    #[arg(long, env = "HEADWAY_MAX_BODY_SIZE", value_name = "SIZE", value_parser = parse::size)]
    pub max_body_size: Option<u64>,
    /// Seconds that an answer may take; it is ended then. [default: no limit]
    #[arg(long, env = "HEADWAY_REQUEST_TIMEOUT", value_name = "SECONDS", value_parser = parse::at_least_one)]
    pub request_timeout: Option<usize>,
    /// Seconds that running requests have to finish when the server is asked to end.
    #[arg(long, env = "HEADWAY_GRACE_PERIOD", value_name = "SECONDS", default_value = "30", value_parser = parse::whole::<u64>)]
    pub grace_period: u64,
    /// How log lines on standard error look.
    #[arg(long, env = "HEADWAY_LOG_FORMAT", value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
    /// What is logged: error, warn, info or debug.
    #[arg(long, env = "HEADWAY_LOG_LEVEL", value_name = "LEVEL", default_value = "info")]
    pub log_level: LogLevel,
    /// Write prompts to the log; they are never in it else.
    #[arg(long)]
    pub log_prompts: bool,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Of the log.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// An object a line.
    Json,
}

/// Of the log.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum LogLevel {
    /// Faults of the server.
    Error,
    /// And of its clients.
    Warn,
    /// And each call's end.
    Info,
    /// Everything.
    Debug,
}

impl ServeArgs {
    /// As the server takes them.
    pub fn options(&self, api_key: Option<String>) -> ServeOptions {
        let d = ServeOptions::default();
        let mut served_names = self.served_model_name.clone();
        if served_names.is_empty() {
            served_names.push(self.engine.model.clone());
        }
        ServeOptions {
            host: self.host,
            port: self.port,
            served_names,
            max_queue: self.max_queue,
            api_key,
            cors_origins: self.cors_origin.clone(),
            max_body_bytes: self.max_body_size.map_or(d.max_body_bytes, |n| n as usize),
            request_timeout: self.request_timeout.map(|s| Duration::from_secs(s as u64)),
            grace_period: Duration::from_secs(self.grace_period),
            log_prompts: self.log_prompts,
            ..d
        }
    }
}
