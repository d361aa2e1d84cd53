//! `headway bench attention`: one layer's calls, case by case, held against the device's ceilings.

mod asked;
mod line;
mod paced;
mod plot;
mod side_by_side;

use super::{
    super::{
        CliError,
        measure::{
            Case, Prepared, cpu,
            meter::{self, Ceilings},
            progress,
        },
        parse,
    },
    show,
};
use asked::{Bench, CacheType, Run, cache_type, element};
use clap::Args;
use headway_attention::Registry;
use headway_engine::runner::{devices::OpenDevice, memory};
use headway_tensor::DType;
use line::Line;
use plot::Marks;
use regex::Regex;
use std::{io::Write, path::PathBuf};

#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  headway bench attention --filter 'decode_.* 32/8/128 bf16'
  headway bench attention --backend all --plot shares.svg
  headway bench attention --device cuda:0 --backend FLASHINFER,FLASH_ATTN --json > lines.jsonl
  headway bench attention --backend all --plot shares.svg --marks lines.jsonl")]
pub struct AttentionArgs {
    /// cpu, cuda or cuda:N. [default: cpu]
    #[arg(long, env = "HEADWAY_DEVICE")]
    device: Option<String>,
    /// A JSON file of cases, in the form of headway's own.
    #[arg(long, value_name = "FILE")]
    cases: Option<PathBuf>,
    /// Run only what matches: a regular expression over `case heads dtype`, such as 'decode_b1.* 32/8/128 bf16'.
    #[arg(long, value_name = "REGEX", default_value = "")]
    filter: Regex,
    /// The backend to measure; A+B has A compute decodes and B the rest. Several separated by commas, or all, come in a
    /// table side by side. [default: the device's first]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    backend: Vec<String>,
    /// bf16, f16, f32; several separated by commas. [default: the file's]
    #[arg(long, value_name = "DTYPES", value_delimiter = ',', value_parser = element)]
    dtype: Vec<DType>,
    /// Element type of the cache: auto (the activations'), or fp8 (e4m3) on a CUDA device. [default: auto]
    #[arg(long, value_name = "TYPE", value_parser = cache_type)]
    kv_cache_dtype: Option<CacheType>,
    /// Worker threads of the CPU; several separated by commas. [default: the file's, as far as there are processors]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = parse::at_least_one)]
    threads: Vec<usize>,
    /// Tokens in a block; several separated by commas. [default: the backend's preferred size]
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = parse::block)]
    block_size: Vec<usize>,
    /// Order of the cache's axes: NHD, HND, or letters of L, B, H, N, C. [default: the backend's preferred one]
    #[arg(long, value_name = "LAYOUT")]
    kv_layout: Option<String>,
    /// Bytes of cache that cold cases rotate through, in MiB. [default: the file's; on a CUDA device no
    /// more than 60 % of its free memory]
    #[arg(long, value_name = "MIB", value_parser = parse::at_least_one)]
    pool: Option<usize>,
    /// Replay every case from a graph, prefills and mixed batches too, whatever the backend lets an engine replay: what
    /// kernels take without the host's launches. A batch that stays the same can be recorded.
    #[arg(long)]
    replay_all: bool,
    /// Samples of each measurement. [default: 7, or fewer where a call takes long; on a CUDA device 9
    /// replays of a graph]
    #[arg(long, value_name = "N", value_parser = parse::at_least_one)]
    repetitions: Option<usize>,
    /// Measure what standard input says, a line such as `decode_b1_c512 32/8/128 bf16` each, when it says so:
    /// another program can measure something else in between. One thread count and block size.
    #[arg(long, conflicts_with_all = ["filter", "dtype"])]
    from_stdin: bool,
    /// Draw the shares of the ceilings into an SVG file.
    #[arg(long, value_name = "FILE.svg", conflicts_with = "from_stdin")]
    plot: Option<PathBuf>,
    /// Marks in the plot: measurements as --json writes them, of another run or of the libraries called by others.
    #[arg(long, value_name = "FILE.jsonl", requires = "plot")]
    marks: Option<PathBuf>,
    /// One JSON object a measurement.
    #[arg(long)]
    json: bool,
}

/// Measures what the arguments ask for.
///
/// # Errors
/// What can't be understood or isn't there; the backend's own.
pub fn run(args: &AttentionArgs, registry: &Registry) -> Result<(), CliError> {
    let bench = Bench::new(args, registry)?;
    // The host's pool serves all thread counts.
    let bytes = bench.asked_bytes();
    if bench.platform == "cpu" {
        bench.check_pool(memory::available_bytes())?;
    }
    if args.from_stdin {
        return paced::run(&bench);
    }
    let runs = bench.runs()?;
    for name in bench.without(&runs) {
        note!("headway: left out: {name}: no case is for its kind of layer and matches --filter");
    }
    // Before minutes of measuring: what the plot is to show, and where.
    let marks = args.marks.as_deref().map(Marks::read).transpose()?;
    if let Some(path) = &args.plot {
        plot::check(path)?;
    }
    let mut host = if bench.platform == "cpu" { Some(cpu::pool(bytes)?) } else { None };
    let threads = bench.threads();
    let bar = progress(runs.len() * threads.len());
    let (mut left_out, mut refused, mut lines) = (vec![], vec![], vec![]);
    for threads in threads {
        let device = bench.open(threads)?;
        let meter = meter::of(&*device.ops)?;
        let ceilings = meter.ceilings()?;
        let mut own = None;
        let pool = match &mut host {
            Some(pool) => pool,
            None => own.insert(bench.pool(&device, &*meter)?),
        };
        // Printed with the first measurement: what is refused leaves standard output empty.
        let mut headed = args.json;
        for run in &runs {
            if let Some(why) = run.refusal(&device).filter(|_| bench.is_several()) {
                let (name, layer) = (&run.backend.rules().name, run.layer);
                let what = format!("{name} for {} in {}: {why}", layer.name, layer.need.dtype);
                if !refused.contains(&what) {
                    refused.push(what);
                }
                bar.inc(1);
                continue;
            }
            let setup = bench.setup(run, &device, &*meter, &ceilings);
            if bench.is_lowered(pool) && setup.pool_bytes(run.case)? > pool.bytes() {
                left_out.push(run.name());
                bar.inc(1);
                continue;
            }
            let done = Prepared::new(setup, run.case, pool).and_then(|mut prepared| {
                let measured = prepared.measure(args.repetitions, pool)?;
                Ok((prepared, measured))
            });
            let (prepared, measured) = match done {
                Ok(done) => done,
                // The others are measured all the same.
                Err(e) if bench.is_several() => {
                    refused.push(format!("{} for {}: {e}", run.backend.rules().name, run.name()));
                    bar.inc(1);
                    continue;
                }
                Err(e) => return Err(e),
            };
            let line = Line::new(&prepared, measured, run.block_size);
            bar.suspend(|| {
                if let Some(note) = prepared.note() {
                    note!("headway: {note}");
                }
                if !std::mem::replace(&mut headed, true) {
                    heading(&device, &ceilings)?;
                    if !bench.is_several() {
                        writeln!(std::io::stdout().lock(), "{}", line::head())?;
                    }
                }
                // Side by side they come at the end.
                if args.json || !bench.is_several() { show(&line, args.json) } else { Ok(()) }
            })?;
            lines.push(line);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    for what in refused {
        note!("headway: left out: {what}");
    }
    if lines.is_empty() && bench.is_several() {
        return Err(CliError::Usage("none of these backends takes any of these layers".into()));
    }
    if bench.is_several() && !args.json {
        write!(std::io::stdout().lock(), "{}", side_by_side::tables(&lines))?;
    }
    if let Some(path) = &args.plot {
        plot::write(path, &lines, marks.as_ref())?;
        if let (Some(file), Some(marks)) = (&args.marks, &marks)
            && !lines.iter().any(|l| marks.of(l).is_some())
        {
            note!(
                "headway: --marks {}: none is of a backend, case, heads and types that were measured",
                file.display()
            );
        }
    }
    if !left_out.is_empty() {
        let all = left_out.join(", ");
        note!("headway: left out, larger than 60 % of the free memory (--pool asks for more): {all}");
    }
    Ok(())
}

fn heading(device: &OpenDevice, ceilings: &Ceilings) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    Ok(writeln!(out, "{}\n{}", device.description, ceilings.words)?)
}
