//! `headway bench`: measurements that show themselves beside what the machine does at most.

mod attention;
mod builder;
mod cases;
mod engine;

use super::{CliError, args::EngineArgs, parse, session};
use clap::{Args, Subcommand};
use headway_attention::{DynBackend, KindTag, LayerNeed, Registry};
use headway_engine::{options::EngineOptions, runner::devices};
use serde::Serialize;
use std::{fmt::Display, io::Write, process::ExitCode, sync::Arc};

/// `headway bench`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  headway bench attention --filter 'decode_b8.* 32/8/128' --dtype bf16 --threads 2
  headway bench attention --json > attention.jsonl
  headway bench attention --device cuda:0 --filter '^(decode|write).* 32/8/128'
  headway bench attention --device cuda:0 --kv-layout NHD --dtype bf16,f16 --json
  headway bench attention --device cuda:0 --backend FLASHINFER+FLASH_ATTN --filter mixed
  headway bench attention --device cuda:0 --backend all --plot attention.svg
  headway bench builder
  headway bench engine --prompt-len 512 --output-len 128 --concurrency 16
  headway bench engine --model config.json --load-format dummy")]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// One layer's calls: GB/s of KV cache and GFLOP/s, and the share of this machine's ceilings.
    Attention(attention::AttentionArgs),
    /// A model: tokens a second, time to first token, latency between tokens, what a step costs.
    Engine(Box<EngineBenchArgs>),
    /// A step's metadata: microseconds by requests and KV cache groups.
    Builder(BuilderArgs),
}

#[derive(Args, Debug)]
struct BuilderArgs {
    /// The backend to measure, one for attention over keys and values; A+B is made of two. [default: the first of this build]
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// Requests in the step; several separated by commas.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,32,256,1024", value_parser = parse::requests)]
    requests: Vec<usize>,
    /// KV cache groups; several separated by commas.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,2,5", value_parser = parse::groups)]
    groups: Vec<usize>,
    /// Worker threads that the plan is made for. [default: all]
    #[arg(long, value_name = "N", value_parser = parse::at_least_one)]
    threads: Option<usize>,
    /// One JSON object a measurement.
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct EngineBenchArgs {
    /// Tokens of each prompt.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = parse::tokens)]
    prompt_len: usize,
    /// Tokens of each answer.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = parse::tokens)]
    output_len: usize,
    /// Requests at a time.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse::requests)]
    concurrency: usize,
    /// Requests in all. [default: as many as run at a time]
    #[arg(long, value_name = "N", value_parser = parse::requests)]
    num_requests: Option<usize>,
    /// One JSON object.
    #[arg(long)]
    json: bool,
    /// The engine.
    #[command(flatten)]
    engine: EngineArgs,
}

/// Runs the command.
pub fn run(args: BenchArgs, registry: Registry) -> Result<ExitCode, CliError> {
    match args.what {
        What::Attention(a) => attention::run(&a, &registry)?,
        What::Builder(a) => bench_builder(&a, &registry)?,
        What::Engine(a) => {
            let mut engine = session::open(&a.engine, registry)?;
            let load = engine::Load {
                prompt_len: a.prompt_len,
                output_len: a.output_len,
                concurrency: a.concurrency,
                requests: a.num_requests.unwrap_or(a.concurrency),
            };
            show(&engine::run(&mut engine, load)?, a.json)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn bench_builder(a: &BuilderArgs, registry: &Registry) -> Result<(), CliError> {
    let device = devices::open(&EngineOptions { threads: a.threads, ..EngineOptions::default() })?;
    let backend = backend(a.backend.as_deref(), registry, device.place.platform, &[])?;
    if !a.json {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{} on {}\n{}", backend.rules().name, device.description, builder::head())?;
    }
    for &groups in &a.groups {
        for &requests in &a.requests {
            show(&builder::run(&backend, &*device.ops, device.threads, requests, groups)?, a.json)?;
        }
    }
    Ok(())
}

/// A backend by name, or the device's first for attention over keys and values that takes these layers.
fn backend(
    name: Option<&str>,
    registry: &Registry,
    platform: &str,
    layers: &[LayerNeed],
) -> Result<Arc<dyn DynBackend>, CliError> {
    if let Some(name) = name {
        return Ok(registry.get_on(name, platform)?);
    }
    let none = || CliError::Usage(format!("no attention backend for {platform} is registered"));
    of_kind(registry, platform, KindTag::Standard, layers).ok_or_else(none)
}

/// A platform's first backend of a kind that takes these layers.
fn of_kind(
    registry: &Registry,
    platform: &str,
    kind: KindTag,
    layers: &[LayerNeed],
) -> Option<Arc<dyn DynBackend>> {
    all_of_kind(registry, platform, kind, layers).next()
}

/// A platform's backends of a kind that take these layers, most preferred first.
fn all_of_kind<'a>(
    registry: &'a Registry,
    platform: &'a str,
    kind: KindTag,
    layers: &'a [LayerNeed],
) -> impl Iterator<Item = Arc<dyn DynBackend>> + 'a {
    let fits = move |b: &&Arc<dyn DynBackend>| {
        let here = b.rules().platform == platform && b.rules().kind == kind;
        here && layers.iter().all(|need| b.combination(need).is_none())
    };
    registry.iter().filter(fits).cloned()
}

fn show(line: &(impl Serialize + Display), json: bool) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    match json {
        true => writeln!(out, "{}", serde_json::to_string(line).map_err(std::io::Error::from)?)?,
        false => writeln!(out, "{line}")?,
    }
    Ok(())
}
