//! Backends made of two: the suite that any backend goes through, and requests of several tiles. Parts whose modules are
//! not here are named, and the pair is not run.

use super::{
    Outcome, Test,
    attention::{run_with, without_modules},
    flash_attn::{LONG, missing},
};
use headway_cuda::CudaExec;
use headway_testkit::suite::SuiteConfig;

/// The pairs; the decodes' part first.
pub const NAMES: [&str; 4] =
    ["FLASHINFER+FLASH_ATTN", "FLASH_ATTN+FLASHINFER", "CUDA_ATTN+FLASH_ATTN", "FLASHINFER+CUDA_ATTN"];

pub const TESTS: &[Test] = &[
    ("composed: the backend suite, FLASHINFER+FLASH_ATTN", |cx| suite(cx, NAMES[0], 2)),
    ("composed: the backend suite, FLASH_ATTN+FLASHINFER", |cx| suite(cx, NAMES[1], 3)),
    ("composed: the backend suite, CUDA_ATTN+FLASH_ATTN", |cx| suite(cx, NAMES[2], 3)),
    ("composed: the backend suite, FLASHINFER+CUDA_ATTN", |cx| suite(cx, NAMES[3], 5)),
    ("composed: keys in parts beside prefills of several tiles", long),
];

/// Why a pair is not run; `None` if all that it needs is here.
fn not_here(name: &str) -> Result<Option<String>, String> {
    for part in name.split('+') {
        let why = match part {
            "FLASHINFER" => without_modules(part)?,
            "FLASH_ATTN" => missing(part).map(|why| format!("{part}: {why}")),
            _ => None,
        };
        if why.is_some() {
            return Ok(why);
        }
    }
    Ok(None)
}

fn suite(cx: &CudaExec, name: &str, every: usize) -> Outcome {
    match not_here(name)? {
        Some(why) => Ok(why),
        None => run_with(cx, name, SuiteConfig { every, seed: 7, ..SuiteConfig::default() }),
    }
}

fn long(cx: &CudaExec) -> Outcome {
    let mut said = vec![];
    for name in NAMES {
        let config = SuiteConfig { requests: Some(LONG.to_vec()), every: 37, ..SuiteConfig::default() };
        said.push(match not_here(name)? {
            Some(why) => format!("{name}: {why}"),
            None => run_with(cx, name, config)?,
        });
    }
    Ok(said.join("\n"))
}
