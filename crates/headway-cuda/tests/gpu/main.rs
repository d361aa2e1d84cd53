//! Everything that needs a device, in one binary that can be carried to a machine with one: it needs the driver, NVRTC
//! and cuBLASLt there, nothing else. `gpu [--list] [part of a name]…` runs the tests whose names hold one of the parts;
//! `gpu --compile [jobs]` compiles the kernels that the attention tests need beforehand, in that many processes. With
//! `--shared=99` kernels run as on devices whose blocks have 99 KiB of shared memory (compute capability 8.6, 8.9, 12.x).
//!
//! Without a device every test is listed as not run. The status is not 0 when a test failed.

mod attention;
mod compiled;
mod composed;
mod device;
mod flash_attn;
mod mla;
mod mla_graphs;
mod ops;
mod reference;
mod state_space;

use headway_cuda::{CudaExec, CudaOptions};
use std::{process::ExitCode, time::Instant};

/// What a test found, in words, or what is wrong.
pub type Outcome = Result<String, String>;
/// A test: its name, and what it does.
pub type Test = (&'static str, fn(&CudaExec) -> Outcome);

fn tests() -> Vec<Test> {
    let attention = [attention::TESTS, composed::TESTS, flash_attn::TESTS, mla::TESTS].concat();
    [device::TESTS, ops::TESTS, &attention, state_space::TESTS].concat()
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().is_some_and(|a| a == "--compile") {
        return compiled::run(&args[1..]);
    }
    let parts: Vec<&String> = args.iter().filter(|a| !a.starts_with('-')).collect();
    let wanted: Vec<Test> = tests()
        .into_iter()
        .filter(|t| parts.is_empty() || parts.iter().any(|p| t.0.contains(p.as_str())))
        .collect();
    if args.iter().any(|a| a == "--list") {
        wanted.iter().for_each(|t| println!("{}: test", t.0));
        return ExitCode::SUCCESS;
    }
    let kib = args.iter().find_map(|a| a.strip_prefix("--shared=")?.parse::<u32>().ok());
    let options = CudaOptions {
        kernel_cache: Some(compiled::folder()),
        shared_limit: kib.map(|kib| kib << 10),
        ..CudaOptions::default()
    };
    let cx = match CudaExec::open(options) {
        Ok(cx) => cx,
        Err(e) => {
            wanted.iter().for_each(|t| println!("{}: not run: {e}", t.0));
            println!("0 run, {} not run", wanted.len());
            return ExitCode::SUCCESS;
        }
    };
    println!("{:?}, {:?}", cx, cx.info());
    let mut failed = vec![];
    for (name, test) in &wanted {
        let start = Instant::now();
        // What a test left behind in the stream is that test's failure.
        let outcome = test(&cx).and_then(|found| cx.synchronize().map(|()| found).map_err(text));
        let ms = start.elapsed().as_millis();
        match outcome {
            Ok(found) => println!("{name}: ok, {found} ({ms} ms)"),
            Err(why) => {
                println!("{name}: FAILED ({ms} ms): {why}");
                failed.push(*name);
            }
        }
    }
    println!("{} run, {} failed {}", wanted.len(), failed.len(), failed.join(" "));
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// An error as text.
pub fn text(e: impl std::fmt::Display) -> String {
    e.to_string()
}

/// `Err` with this text where `holds` is false.
pub fn ensure(holds: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(why()) }
}
