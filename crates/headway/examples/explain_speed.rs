//! How long `headway explain` takes, the process's start included: every config of `testdata/configs` on several
//! devices, each run a few times.
//!
//! ```sh
//! cargo build --release -p headway && cargo run --release -p headway --example explain_speed
//! ```
//!
//! Prints the median of all questions and the slowest. Proxies point to a closed port, so that a use of the network
//! would fail.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

const DEVICES: [&str; 4] = ["t4", "a100", "h100", "b200"];
const RUNS: usize = 3;

fn main() {
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/configs");
    let program = program();
    let mut all: Vec<(Duration, String)> = vec![];
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(configs).expect("configs").flatten().map(|e| e.path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "json"));
    files.sort();
    for file in &files {
        for device in DEVICES {
            let best = (0..RUNS).map(|_| time(&program, file, device)).min().expect("a run");
            all.push((best, format!("{} on {device}", file.file_stem().unwrap_or_default().display())));
        }
    }
    all.sort();
    let (slowest, question) = all.last().expect("a question");
    println!(
        "{} questions ({} configs, {} devices), best of {RUNS}: median {:.1} ms, slowest {:.1} ms ({question})",
        all.len(),
        files.len(),
        DEVICES.len(),
        all[all.len() / 2].0.as_secs_f64() * 1e3,
        slowest.as_secs_f64() * 1e3
    );
}

/// The program, built beside this example's folder.
fn program() -> PathBuf {
    let me = std::env::current_exe().expect("a path");
    me.parent().and_then(Path::parent).expect("a build folder").join("headway")
}

fn time(program: &Path, file: &Path, device: &str) -> Duration {
    let closed = "http://127.0.0.1:9";
    let start = Instant::now();
    let status = Command::new(program)
        .args(["explain", "--engine", "vllm", "--json", "--device", device])
        .arg(file)
        .envs([("HTTP_PROXY", closed), ("HTTPS_PROXY", closed), ("ALL_PROXY", closed)])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .expect("build the program first: cargo build --release -p headway");
    let took = start.elapsed();
    assert!(status.code().is_some_and(|c| [0, 1, 3].contains(&c)), "{}: {status}", file.display());
    took
}
