//! Tests of whole fetches against a hub on loopback and a pip that is a shell script.
//!
//! Everything is bounded in time and stops by itself; no test reads or changes the process's environment.

mod fake_hub;
mod hub_faults;
mod hub_fetch;
mod pypi_route;

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use super::{FetchOptions, Progress, SourceError};

/// Options whose caches lie in `folder` and whose hub is `endpoint`; without a pip.
fn options(folder: &Path, endpoint: &str) -> FetchOptions {
    let environment = HashMap::from([
        ("HEADWAY_CACHE_DIR", folder.join("headway")),
        ("HF_HOME", folder.join("hf")),
        ("HF_ENDPOINT", endpoint.into()),
    ]);
    let mut opts =
        FetchOptions::from_lookup(|name| environment.get(name).map(OsString::from)).expect("good options");
    opts.hub_timeout = Duration::from_millis(500);
    opts.pip_silence = Duration::from_secs(20);
    opts.pip_command = Vec::new();
    opts
}

/// Remembers what it was told.
#[derive(Debug, Default)]
struct Recorder {
    lines: Mutex<Vec<String>>,
    transfers: Mutex<Vec<(String, Option<u64>, u64)>>,
}

impl Recorder {
    fn text(&self) -> String {
        self.lines.lock().unwrap().join("\n")
    }

    /// Label, total and bytes of every transfer.
    fn transfers(&self) -> Vec<(String, Option<u64>, u64)> {
        self.transfers.lock().unwrap().clone()
    }
}

impl Progress for Recorder {
    fn message(&self, line: &str) {
        self.lines.lock().unwrap().push(line.to_owned());
    }

    fn start(&self, label: &str, total: Option<u64>) {
        self.transfers.lock().unwrap().push((label.to_owned(), total, 0));
    }

    fn advance(&self, bytes: u64) {
        self.transfers.lock().unwrap().last_mut().expect("a transfer is under way").2 += bytes;
    }

    fn finish(&self) {}
}

/// The attempts of a fetch that found no source.
fn attempts(error: SourceError) -> Vec<super::Attempt> {
    match error {
        SourceError::NothingReached { attempts, .. } => attempts,
        other => panic!("another error: {other}"),
    }
}
