//! `headway bench attention`: one layer's calls, case by case, held against the device's ceilings.

mod line;
mod paced;

use super::{
    super::{
        CliError,
        measure::{
            Case, Layer, Prepared, Setup, cpu,
            meter::{self, Ceilings, Meter, Pool},
            progress,
        },
        parse,
    },
    all_of_kind, backend,
    cases::{CaseFile, Heads},
    show,
};
use clap::Args;
use headway_attention::{DynBackend, KindTag, LayerNeed, Registry, group::kv::layout::KvCacheLayout};
use headway_engine::{
    options::{DTypeOption, EngineOptions},
    runner::{
        StartupError, decide,
        devices::{self, OpenDevice},
        memory,
    },
};
use headway_tensor::DType;
use line::Line;
use regex::Regex;
use std::{io::Write, path::PathBuf, sync::Arc};

#[derive(Args, Debug)]
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
    /// The backend to measure; A+B has A compute decodes and B the rest. [default: the device's first]
    #[arg(long, value_name = "NAME")]
    backend: Option<String>,
    /// bf16, f16, f32; several separated by commas. [default: the file's]
    #[arg(long, value_name = "DTYPES", value_delimiter = ',', value_parser = element)]
    dtype: Vec<DType>,
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
    /// Samples of each measurement. [default: 7, or fewer where a call takes long; on a CUDA device 9
    /// replays of a graph]
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

/// What was asked, understood.
struct Bench<'a> {
    args: &'a AttentionArgs,
    /// `cpu` or `cuda`.
    platform: &'static str,
    file: CaseFile,
    /// Its heads in each dtype that is asked for.
    layers: Vec<Layer>,
    /// The one that was named; or the device's first for softmax attention, and all that it has for latent attention.
    backends: Vec<(Arc<dyn DynBackend>, KvCacheLayout)>,
}

/// A case with what it is measured for.
struct Run<'a> {
    backend: &'a Arc<dyn DynBackend>,
    layout: KvCacheLayout,
    layer: &'a Layer,
    block_size: Option<usize>,
    case: &'a Case,
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
    let mut host = if bench.platform == "cpu" { Some(cpu::pool(bytes)?) } else { None };
    let threads = bench.threads();
    let bar = progress(runs.len() * threads.len());
    let mut left_out = vec![];
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
            let setup = bench.setup(run, &device, &*meter, &ceilings);
            if bench.is_lowered(pool) && setup.pool_bytes(run.case)? > pool.bytes() {
                left_out.push(run.name());
                bar.inc(1);
                continue;
            }
            let mut prepared = Prepared::new(setup, run.case, pool)?;
            let measured = prepared.measure(args.repetitions, pool)?;
            let line = Line::new(&prepared, measured);
            bar.suspend(|| {
                if let Some(note) = prepared.note() {
                    note!("headway: {note}");
                }
                if !std::mem::replace(&mut headed, true) {
                    heading(&device, &ceilings)?;
                }
                show(&line, args.json)
            })?;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    if !left_out.is_empty() {
        let all = left_out.join(", ");
        note!("headway: left out, larger than 60 % of the free memory (--pool asks for more): {all}");
    }
    Ok(())
}

impl<'a> Bench<'a> {
    fn new(args: &'a AttentionArgs, registry: &Registry) -> Result<Self, CliError> {
        let platform = devices::named(&options(args, None))?.kind;
        let file = CaseFile::read(args.cases.as_deref(), platform)?;
        let dtypes = dtypes(args, &file)?;
        // Standard input may name any of them.
        let all = [DType::BF16, DType::F16, DType::F32];
        let named = if args.from_stdin { &all[..] } else { &dtypes };
        let in_dtypes = |h: &Heads| named.iter().map(|&d| h.layer(platform, d)).collect::<Vec<_>>();
        let layers: Vec<Layer> = file.heads.iter().flat_map(in_dtypes).collect();
        let needs = |kind: KindTag| -> Vec<LayerNeed> {
            let needs = layers.iter().map(|l| &l.need).filter(|n| n.kind == kind);
            needs.filter(|n| dtypes.contains(&n.dtype)).cloned().collect()
        };
        let plain = needs(KindTag::Standard);
        let mut backends = vec![backend(args.backend.as_deref(), registry, platform, &plain)?];
        if args.backend.is_none() {
            backends.extend(all_of_kind(registry, platform, KindTag::Mla, &needs(KindTag::Mla)));
        }
        let asked = decide::layout(args.kv_layout.as_deref())?;
        let with_layout = |backend: Arc<dyn DynBackend>| {
            let readable = &backend.rules().kv_cache_layouts;
            let layout = match asked {
                None => readable.first().copied().unwrap_or_default(),
                Some(layout) if readable.contains(&layout) => layout,
                Some(_) => {
                    let names: Vec<_> = readable.iter().map(|l| l.name()).collect();
                    let name = &backend.rules().name;
                    let why = format!("{name} can't read it; it reads {}", names.join(", "));
                    let value = args.kv_layout.clone().unwrap_or_default();
                    return Err(StartupError::Option { option: "--kv-layout", value, why });
                }
            };
            Ok((backend, layout))
        };
        let backends = backends.into_iter().map(with_layout).collect::<Result<_, _>>()?;
        Ok(Self { args, platform, file, layers, backends })
    }

    /// Who computes such a layer.
    fn backends(&self, layer: &Layer) -> impl Iterator<Item = &(Arc<dyn DynBackend>, KvCacheLayout)> {
        let kind = layer.need.kind;
        self.backends.iter().filter(move |(b, _)| b.rules().kind == kind)
    }

    /// What matches.
    fn runs(&self) -> Result<Vec<Run<'_>>, CliError> {
        let (a, file) = (self.args, &self.file);
        let sizes: Vec<Option<usize>> = match a.block_size.is_empty() {
            true => vec![None],
            false => a.block_size.iter().copied().map(Some).collect(),
        };
        let mut runs = vec![];
        for layer in &self.layers {
            for &block_size in &sizes {
                for case in file.cases.iter().filter(|c| c.latent == layer.need.latent.is_some()) {
                    let of = |(backend, layout)| Run { backend, layout, layer, block_size, case };
                    let all = self.backends(layer).map(|(backend, layout)| of((backend, *layout)));
                    runs.extend(all.filter(|run| a.filter.is_match(&run.name())));
                }
            }
        }
        match runs.is_empty() {
            true => {
                let names: Vec<_> = self.backends.iter().map(|(b, _)| b.rules().name.to_string()).collect();
                let names = names.join(" and ");
                Err(CliError::Usage(format!("--filter {}: no case of {names} matches", a.filter)))
            }
            false => Ok(runs),
        }
    }

    /// Thread counts to open the device with.
    fn threads(&self) -> Vec<Option<usize>> {
        let processors = std::thread::available_parallelism().map_or(1, Into::into);
        match (self.args.threads.as_slice(), self.platform) {
            ([], "cpu") => self.file.threads.iter().filter(|t| **t <= processors).map(|t| Some(*t)).collect(),
            ([], _) => vec![None],
            (given, _) => given.iter().map(|t| Some(*t)).collect(),
        }
    }

    fn open(&self, threads: Option<usize>) -> Result<OpenDevice, CliError> {
        Ok(devices::open(&options(self.args, threads))?)
    }

    fn setup<'b>(
        &self,
        run: &Run<'b>,
        device: &'b OpenDevice,
        meter: &'b dyn Meter,
        ceilings: &'b Ceilings,
    ) -> Setup<'b> {
        let &Run { backend, layout, layer, block_size, .. } = run;
        Setup { backend, device, meter, ceilings, layer, block_size, layout }
    }

    /// Bytes of the pool as asked.
    fn asked_bytes(&self) -> usize {
        self.args.pool.map_or(self.file.semantics.pool_bytes, |mib| mib.saturating_mul(1 << 20))
    }

    /// Refuses a pool beyond the memory that is free.
    fn check_pool(&self, free: Option<u64>) -> Result<(), CliError> {
        let bytes = self.asked_bytes();
        match free.filter(|free| bytes as u64 > *free) {
            None => Ok(()),
            Some(available) => Err(CliError::Startup(StartupError::NoMemory {
                option: "--pool",
                value: self.args.pool.unwrap_or(bytes >> 20),
                what: "the cache that cold cases rotate through",
                needed: bytes as u64,
                available,
            })),
        }
    }

    /// The pool on an open device: as asked on the command line; as the file asks on the host, and elsewhere as far as
    /// there is room for it beside the largest cases' inputs.
    fn pool(&self, device: &OpenDevice, meter: &dyn Meter) -> Result<Pool, CliError> {
        let free = device.place.available;
        let bytes = match (self.args.pool, free) {
            (None, Some(free)) if self.platform != "cpu" => self.asked_bytes().min((free / 10 * 6) as usize),
            _ => {
                self.check_pool(free)?;
                self.asked_bytes()
            }
        };
        Ok(meter.pool(bytes)?)
    }

    /// Whether the device had less room than the file asks for.
    fn is_lowered(&self, pool: &Pool) -> bool {
        pool.bytes() < self.asked_bytes()
    }
}

impl Run<'_> {
    /// What `--filter` sees.
    fn name(&self) -> String {
        format!("{} {} {}", self.case.id, self.layer.name, line::short(self.layer.need.dtype))
    }
}

fn options(args: &AttentionArgs, threads: Option<usize>) -> EngineOptions {
    EngineOptions { device: args.device.clone(), threads, ..EngineOptions::default() }
}

/// The element types that are asked for, or the file's.
fn dtypes(args: &AttentionArgs, file: &CaseFile) -> Result<Vec<DType>, CliError> {
    match args.dtype.is_empty() {
        true => file.dtypes.iter().map(|d| element(d).map_err(CliError::Usage)).collect(),
        false => Ok(args.dtype.clone()),
    }
}

/// An element type; there is no file that could say.
fn element(text: &str) -> Result<DType, String> {
    match text.parse() {
        Ok(DTypeOption::As(d)) => Ok(d),
        _ => Err("give bf16, f16 or f32".into()),
    }
}

fn heading(device: &OpenDevice, ceilings: &Ceilings) -> Result<(), CliError> {
    let mut out = std::io::stdout().lock();
    Ok(writeln!(out, "{}\n{}\n{}", device.description, ceilings.words, line::head())?)
}
