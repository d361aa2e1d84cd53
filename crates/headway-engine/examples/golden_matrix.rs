//! Every golden in every way: block sizes, chunk sizes, prefix caching, alone and batched, float32 and as
//! published. `tools/golden-matrix.sh` runs it; it exits with 1 where a case fails.
//!
//! `golden_matrix cuda:0` runs the models on that device, in its own types, and says which it refuses: the real ones that
//! are in `HEADWAY_MODELS_DIR`, whose blocks are dequantised, and the tiny ones. A third word is a part of the names of
//! those to run, a fourth the graph mode. `HEADWAY_ATTENTION_BACKEND` names the backend, as it does for `headway`;
//! with `HEADWAY_KV_CACHE_DTYPE` the table says how far off other caches are: the goldens know the activations' type alone.

#[path = "../tests/support/mod.rs"]
mod support;

use headway_engine::EngineOptions;
use headway_testkit::{
    golden::{
        self,
        check::Compute,
        walk::{self, Table},
    },
    testdata,
};
use std::{path::Path, process::ExitCode};
use support::{UnderTest, is_known, options, real_model};

const REAL: [(&str, &str); 3] = [
    ("smollm2-135m-instruct", "smollm2-135m-instruct-q4_1.gguf"),
    ("gemma3-270m", "gemma-3-270m-q4_k_m.gguf"),
    ("qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
];

/// The ways that every tiny model is run in.
fn ways() -> impl Iterator<Item = (String, EngineOptions)> {
    let chunks = [5, 64, 512];
    [16, 32].into_iter().flat_map(move |block| {
        chunks.into_iter().flat_map(move |chunk| {
            [false, true].into_iter().map(move |no_prefix_caching| {
                let caching = if no_prefix_caching { "off" } else { "on" };
                let o = EngineOptions {
                    block_size: Some(block),
                    max_num_batched_tokens: Some(chunk),
                    max_num_seqs: Some(chunk.min(16)),
                    no_prefix_caching,
                    ..options("float32")
                };
                (format!("block {block} chunk {chunk} caching {caching}"), o)
            })
        })
    })
}

/// An engine; the block size is left out for a model that has nothing in blocks, which refuses it.
fn open(dir: &Path, options: &EngineOptions) -> Result<UnderTest, String> {
    UnderTest::open(dir, options).or_else(|e| match e.starts_with("--block-size") {
        true => UnderTest::open(dir, &EngineOptions { block_size: None, ..options.clone() }),
        false => Err(e),
    })
}

fn tiny(way: &str, compute: Compute, options: &EngineOptions) -> Result<Table, String> {
    walk::all_tiny(compute, way, |golden, dir| {
        if !is_known(&golden.model.architecture) {
            return Ok(None);
        }
        Ok(Some(Box::new(open(dir, options)?)))
    })
    .map_err(|e| e.to_string())
}

fn real(dtype: &str, compute: Compute) -> Result<Table, String> {
    let mut table = Table::default();
    for (name, file) in REAL {
        let path = match real_model(name, file) {
            Ok(path) => path,
            Err(e) => {
                table.not_run.push(format!("{name}: {e}"));
                continue;
            }
        };
        let goldens = golden::real().map_err(|e| e.to_string())?;
        for golden in goldens.iter().filter(|g| g.model.gguf == file) {
            let mut engine = UnderTest::open(&path, &options(dtype))?;
            walk::real(&mut table, golden, compute, dtype, usize::MAX, &mut engine);
        }
    }
    Ok(table)
}

/// Types in which a real model runs on another device than the CPU. SmolLM2's stream grows to 22,700 after a single token:
/// bfloat16 counts by 128 there, float16 by 16.
fn device_types(name: &str) -> &'static [&'static str] {
    if name.starts_with("smollm2") { &["auto", "float16"] } else { &["auto"] }
}

/// The real models that are at hand, on another device than the CPU.
fn real_on(device: &str, only: &str, graph_mode: Option<&str>) -> Result<Table, String> {
    let mut table = Table::default();
    for (name, file) in REAL.into_iter().filter(|(name, _)| name.contains(only)) {
        let Some(path) = testdata::real_model(file).map_err(|e| e.to_string())? else {
            table.not_run.push(format!("{name}: not in HEADWAY_MODELS_DIR"));
            continue;
        };
        let goldens = golden::real().map_err(|e| e.to_string())?;
        let all = goldens.iter().filter(|g| g.model.gguf == file);
        for (golden, dtype) in all.flat_map(|g| device_types(name).iter().map(move |d| (g, d))) {
            let o = EngineOptions {
                device: Some(device.into()),
                graph_mode: graph_mode.map(str::to_owned),
                attention_backend: std::env::var("HEADWAY_ATTENTION_BACKEND").ok(),
                max_num_seqs: Some(32),
                kv_cache_memory: Some(2 << 30),
                ..options(dtype)
            };
            let mut engine = UnderTest::open(&path, &o)?;
            let report = engine.engine.report();
            println!(
                "{name} {dtype}: {} bytes in the file, {} on {device} after {:.2} s; start-up {:.2} s",
                report.memory.weights_bytes,
                report.memory.packed_weights_bytes,
                report.packing_seconds,
                engine.engine.load_time().as_secs_f64()
            );
            let way = format!("{device} {dtype}");
            walk::real(&mut table, golden, Compute::Half, &way, usize::MAX, &mut engine);
        }
    }
    Ok(table)
}

/// The models on another device than the CPU.
fn on(device: &str, only: &str, graph_mode: Option<&str>) -> Result<bool, String> {
    let mut table = real_on(device, only, graph_mode)?;
    let mut refused = std::collections::BTreeSet::new();
    for (block, chunk) in [(16, 5), (16, 512), (32, 64), (48, 512)] {
        let o = EngineOptions {
            device: Some(device.into()),
            graph_mode: graph_mode.map(str::to_owned),
            attention_backend: std::env::var("HEADWAY_ATTENTION_BACKEND").ok(),
            kv_cache_dtype: std::env::var("HEADWAY_KV_CACHE_DTYPE").ok(),
            block_size: Some(block),
            max_num_batched_tokens: Some(chunk),
            max_num_seqs: Some(chunk.min(16)),
            ..EngineOptions::default()
        };
        let mode = graph_mode.unwrap_or("default graphs");
        let way = format!("{device} {mode} block {block} chunk {chunk}");
        let t = walk::all_tiny(Compute::Half, &way, |golden, dir| {
            if !golden.model.name.contains(only) {
                return Ok(None);
            }
            match open(dir, &o) {
                Ok(engine) => Ok(Some(Box::new(engine))),
                Err(e) => {
                    refused.insert(format!("{}: {e}", golden.model.architecture));
                    Ok(None)
                }
            }
        });
        let mut t = t.map_err(|e| e.to_string())?;
        if !only.is_empty() {
            t.not_run.clear();
        }
        table.extend(t);
    }
    println!("{table}");
    refused.iter().for_each(|r| println!("refused: {r}"));
    Ok(table.ok())
}

fn run() -> Result<bool, String> {
    if let Some(device) = std::env::args().nth(1) {
        let args: Vec<String> = std::env::args().skip(2).collect();
        return on(&device, args.first().map_or("", String::as_str), args.get(1).map(String::as_str));
    }
    let mut table = Table::default();
    for (way, options) in ways() {
        let mut t = tiny(&way, Compute::Float32, &options)?;
        if !table.rows.is_empty() {
            t.not_run.clear();
        }
        table.extend(t);
    }
    table.extend(tiny("as published", Compute::Half, &options("auto"))?);
    table.extend(real("float32", Compute::Float32)?);
    table.extend(real("auto", Compute::Quantised)?);
    println!("{table}");
    Ok(table.ok())
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
