//! `headway bench`: measurements that show themselves beside what the machine does at most.

mod attention;
mod builder;
mod cases;
mod ceilings;
mod engine;
mod paced;
mod samples;

use super::{CliError, args::EngineArgs, parse, session};
use attention::{Pool, Prepared, Setup};
use cases::CaseFile;
use ceilings::Ceilings;
use clap::{Args, Subcommand};
use headway_attention::{DynBackend, Registry};
use headway_engine::{
    options::{DTypeOption, EngineOptions},
    runner::{
        StartupError,
        devices::{self, OpenDevice},
        memory,
    },
};
use headway_tensor::DType;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use regex::Regex;
use serde::Serialize;
use std::{fmt::Display, io::Write, path::PathBuf, process::ExitCode, sync::Arc};

/// `headway bench`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  headway bench attention --filter 'decode_b8.* 32/8/128' --dtype bf16 --threads 2
  headway bench attention --json > attention.jsonl
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
    Attention(AttentionArgs),
    /// A model: tokens a second, time to first token, latency between tokens, what a step costs.
    Engine(Box<EngineBenchArgs>),
    /// A step's metadata: microseconds by requests and KV cache groups.
    Builder(BuilderArgs),
}

#[derive(Args, Debug)]
struct AttentionArgs {
    /// A JSON file of cases, in the form of headway's own.
    #[arg(long, value_name = "FILE")]
    cases: Option<PathBuf>,
    /// Run only what matches: a regular expression over `case heads dtype`, such as 'decode_b1.* 32/8/128 bf16'.
    #[arg(long, value_name = "REGEX", default_value = "")]
    filter: Regex,
    /// The backend to measure. [default: the first that takes the layer]
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// bf16, f16, f32; several separated by commas. [default: the file's]
    #[arg(long, value_name = "DTYPES", value_delimiter = ',', value_parser = element)]
    dtype: Vec<DType>,
    /// Worker threads; several separated by commas. [default: the file's, as far as there are processors]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = parse::at_least_one)]
    threads: Vec<usize>,
    /// Tokens in a block; several separated by commas. [default: the backend's preferred size]
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = parse::block)]
    block_size: Vec<usize>,
    /// Bytes of cache that cold cases rotate through, in MiB. [default: the file's]
    #[arg(long, value_name = "MIB", value_parser = parse::at_least_one)]
    pool: Option<usize>,
    /// Samples of each measurement. [default: 7, or fewer where a call takes long]
    #[arg(long, value_name = "N", value_parser = parse::at_least_one)]
    repetitions: Option<usize>,
    /// Measure what standard input says, a line such as `decode_b1_c512 32/8/128 bf16` each, when it says so:
    /// another program can measure something else in between. One thread count and block size.
    #[arg(long, conflicts_with_all = ["filter", "dtype"])]
    from_stdin: bool,
    /// One JSON object a measurement.
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct BuilderArgs {
    /// The backend to measure, one for attention over keys and values. [default: the first of this build]
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
        What::Attention(a) => bench_attention(&a, &registry)?,
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
    let device = open(a.threads)?;
    let backend = backend(a.backend.as_deref(), registry)?;
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

fn bench_attention(a: &AttentionArgs, registry: &Registry) -> Result<(), CliError> {
    let file = CaseFile::read(a.cases.as_deref())?;
    let backend = backend(a.backend.as_deref(), registry)?;
    let dtypes = match a.dtype.is_empty() {
        true => file.dtypes.iter().map(|d| element(d).map_err(CliError::Usage)).collect::<Result<_, _>>()?,
        false => a.dtype.clone(),
    };
    let processors = std::thread::available_parallelism().map_or(1, Into::into);
    let threads: Vec<usize> = match a.threads.is_empty() {
        true => file.threads.iter().copied().filter(|t| *t <= processors).collect(),
        false => a.threads.clone(),
    };
    let sizes: Vec<Option<usize>> = match a.block_size.is_empty() {
        true => vec![None],
        false => a.block_size.iter().copied().map(Some).collect(),
    };
    let bytes = a.pool.map_or(file.semantics.pool_bytes, |mib| mib.saturating_mul(1 << 20));
    if let Some(available) = memory::available_bytes().filter(|free| bytes as u64 > *free) {
        return Err(CliError::Startup(StartupError::NoMemory {
            option: "--pool",
            value: a.pool.unwrap_or(bytes >> 20),
            what: "the cache that cold cases rotate through",
            needed: bytes as u64,
            available,
        }));
    }
    if a.from_stdin {
        return paced::run(a, &file, &backend, bytes);
    }
    let mut runs = vec![];
    for heads in &file.heads {
        for &dtype in &dtypes {
            for &block_size in &sizes {
                let of_case = file.cases.iter().map(|case| (heads, dtype, block_size, case));
                runs.extend(of_case.filter(|(h, d, _, c)| {
                    a.filter.is_match(&format!("{} {} {}", c.id, h.id, attention::short(*d)))
                }));
            }
        }
    }
    if runs.is_empty() {
        return Err(CliError::Usage(format!("--filter {}: no case matches", a.filter)));
    }
    let mut pool = Pool::new(bytes)?;
    let bar = progress(runs.len() * threads.len());
    for threads in threads {
        let device = open(Some(threads))?;
        let ceilings = Ceilings::measure(&*device.ops)?;
        // Printed with the first measurement: what is refused leaves standard output empty.
        let mut headed = a.json;
        for (heads, dtype, block_size, case) in &runs {
            let (backend, ops, dtype, block_size) = (&backend, &*device.ops, *dtype, *block_size);
            let setup = Setup { backend, ops, threads, ceilings, heads, dtype, block_size };
            let line = Prepared::new(setup, case, &pool)?.measure(a.repetitions, &mut pool)?;
            bar.suspend(|| {
                if !std::mem::replace(&mut headed, true) {
                    heading(&device, ceilings)?;
                }
                show(&line, a.json)
            })?;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(())
}

/// An element type; there is no file that could say.
fn element(text: &str) -> Result<DType, String> {
    match text.parse() {
        Ok(DTypeOption::As(d)) => Ok(d),
        _ => Err("give bf16, f16 or f32".into()),
    }
}

fn heading(device: &OpenDevice, ceilings: Option<Ceilings>) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", device.description)?;
    if let Some(c) = ceilings {
        writeln!(out, "{c}")?;
    }
    Ok(writeln!(out, "{}", attention::head())?)
}

fn open(threads: Option<usize>) -> Result<OpenDevice, CliError> {
    Ok(devices::open(&EngineOptions { threads, ..EngineOptions::default() })?)
}

fn backend(name: Option<&str>, registry: &Registry) -> Result<Arc<dyn DynBackend>, CliError> {
    match name {
        Some(name) => Ok(registry.get(name)?.clone()),
        None => {
            registry.iter().next().cloned().ok_or_else(|| CliError::Usage("no backend is registered".into()))
        }
    }
}

fn show(line: &(impl Serialize + Display), json: bool) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    match json {
        true => writeln!(out, "{}", serde_json::to_string(line).map_err(std::io::Error::from)?)?,
        false => writeln!(out, "{line}")?,
    }
    Ok(())
}

/// Hidden where standard error is not a terminal.
fn progress(len: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {elapsed} (about {eta} left)");
    ProgressBar::with_draw_target(Some(len as u64), ProgressDrawTarget::stderr())
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
