//! What was asked, understood: who is measured with what.

use super::{
    super::{
        super::{
            CliError,
            measure::{
                Layer, Replayed, Setup,
                meter::{Ceilings, Meter, Pool},
            },
        },
        all_of_kind, backend,
        cases::{CaseFile, Heads},
    },
    AttentionArgs, Case, line,
};
use headway_attention::{
    DynBackend, KindTag, LayerNeed, Registry, group::kv::layout::KvCacheLayout, process::select::reasons,
};
use headway_engine::{
    options::{DTypeOption, EngineOptions},
    runner::{
        StartupError, decide,
        devices::{self, OpenDevice},
    },
};
use headway_tensor::DType;
use std::sync::Arc;

/// Of `--backend`: every backend of the device.
const ALL: &str = "all";

/// What `--kv-cache-dtype` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheType {
    /// The activations' type.
    Auto,
    /// e4m3.
    Fp8,
}

/// A cache of [`CacheType::Fp8`], as users name it.
pub const FP8: &str = "fp8_e4m3";

/// `--kv-cache-dtype`.
pub fn cache_type(text: &str) -> Result<CacheType, String> {
    match text {
        "auto" => Ok(CacheType::Auto),
        "fp8" | FP8 => Ok(CacheType::Fp8),
        _ => Err("give auto or fp8".into()),
    }
}

/// What was asked, understood.
pub struct Bench<'a> {
    pub args: &'a AttentionArgs,
    /// `cpu` or `cuda`.
    pub platform: &'static str,
    pub file: CaseFile,
    /// Its heads in each dtype that is asked for.
    pub layers: Vec<Layer>,
    /// Those that were named; or the device's first for softmax attention, and all that it has for latent attention.
    backends: Vec<(Arc<dyn DynBackend>, KvCacheLayout)>,
}

/// A case with what it is measured for.
pub struct Run<'a> {
    pub backend: &'a Arc<dyn DynBackend>,
    pub layout: KvCacheLayout,
    pub layer: &'a Layer,
    pub block_size: Option<usize>,
    pub case: &'a Case,
}

impl<'a> Bench<'a> {
    pub fn new(args: &'a AttentionArgs, registry: &Registry) -> Result<Self, CliError> {
        let platform = devices::named(&options(args, None))?.kind;
        let file = CaseFile::read(args.cases.as_deref(), platform)?;
        let dtypes = dtypes(args, &file)?;
        // Standard input may name any of them.
        let all = [DType::BF16, DType::F16, DType::F32];
        let named = if args.from_stdin { &all[..] } else { &dtypes };
        let coded = args.kv_cache_dtype == Some(CacheType::Fp8);
        if coded && platform == "cpu" {
            return Err(CliError::Usage("--kv-cache-dtype fp8: measured on CUDA devices alone".into()));
        }
        let layer = |h: &Heads, dtype| {
            let layer = h.layer(platform, dtype);
            if coded { layer.with_cache(DType::F8E4M3, FP8) } else { layer }
        };
        let in_dtypes = |h: &Heads| named.iter().map(|&d| layer(h, d)).collect::<Vec<_>>();
        let layers: Vec<Layer> = file.heads.iter().flat_map(in_dtypes).collect();
        let needs = |kind: KindTag| -> Vec<LayerNeed> {
            let needs = layers.iter().map(|l| &l.need).filter(|n| n.kind == kind);
            needs.filter(|n| dtypes.contains(&n.dtype)).cloned().collect()
        };
        let chosen = chosen(&args.backend, registry, platform, &needs)?;
        let asked = decide::layout(args.kv_layout.as_deref())?;
        let several = is_several(&args.backend);
        let mut backends = vec![];
        for backend in chosen {
            let readable = &backend.rules().kv_cache_layouts;
            match asked {
                None => backends.push((backend.clone(), readable.first().copied().unwrap_or_default())),
                Some(layout) if readable.contains(&layout) => backends.push((backend.clone(), layout)),
                Some(_) => {
                    let names: Vec<_> = readable.iter().map(|l| l.name()).collect();
                    let name = &backend.rules().name;
                    let why = format!("{name} can't read it; it reads {}", names.join(", "));
                    let value = args.kv_layout.clone().unwrap_or_default();
                    match several {
                        true => note!("headway: left out: --kv-layout {value}: {why}"),
                        false => {
                            return Err(StartupError::Option { option: "--kv-layout", value, why }.into());
                        }
                    }
                }
            }
        }
        Ok(Self { args, platform, file, layers, backends })
    }

    /// Whether several were named, so that one that can't take a layer leaves it to the others.
    pub fn is_several(&self) -> bool {
        is_several(&self.args.backend)
    }

    /// Who computes such a layer.
    pub fn backends(&self, layer: &Layer) -> impl Iterator<Item = &(Arc<dyn DynBackend>, KvCacheLayout)> {
        let kind = layer.need.kind;
        self.backends.iter().filter(move |(b, _)| b.rules().kind == kind)
    }

    /// What matches.
    pub fn runs(&self) -> Result<Vec<Run<'_>>, CliError> {
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

    /// Of several, the backends that nothing is to be measured of.
    pub fn without(&self, runs: &[Run<'_>]) -> Vec<&str> {
        let names = self.backends.iter().map(|(b, _)| &*b.rules().name).filter(|_| self.is_several());
        names.filter(|name| runs.iter().all(|run| run.backend.rules().name != *name)).collect()
    }

    /// Thread counts to open the device with.
    pub fn threads(&self) -> Vec<Option<usize>> {
        let processors = std::thread::available_parallelism().map_or(1, Into::into);
        match (self.args.threads.as_slice(), self.platform) {
            ([], "cpu") => self.file.threads.iter().filter(|t| **t <= processors).map(|t| Some(*t)).collect(),
            ([], _) => vec![None],
            (given, _) => given.iter().map(|t| Some(*t)).collect(),
        }
    }

    pub fn open(&self, threads: Option<usize>) -> Result<OpenDevice, CliError> {
        Ok(devices::open(&options(self.args, threads))?)
    }

    pub fn setup<'b>(
        &self,
        run: &Run<'b>,
        device: &'b OpenDevice,
        meter: &'b dyn Meter,
        ceilings: &'b Ceilings,
    ) -> Setup<'b> {
        let &Run { backend, layout, layer, block_size, .. } = run;
        let replayed = if self.args.replay_all { Replayed::All } else { Replayed::AsInTheEngine };
        Setup { backend, device, meter, ceilings, layer, block_size, layout, replayed }
    }

    /// Bytes of the pool as asked.
    pub fn asked_bytes(&self) -> usize {
        self.args.pool.map_or(self.file.semantics.pool_bytes, |mib| mib.saturating_mul(1 << 20))
    }

    /// Refuses a pool beyond the memory that is free.
    pub fn check_pool(&self, free: Option<u64>) -> Result<(), CliError> {
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
    pub fn pool(&self, device: &OpenDevice, meter: &dyn Meter) -> Result<Pool, CliError> {
        let free = device.place.available;
        let bytes = match (self.args.pool, free) {
            (None, Some(free)) if self.platform != "cpu" => self.asked_bytes().min((free / 10 * 6) as usize),
            _ => {
                self.check_pool(free)?;
                self.asked_bytes()
            }
        };
        let coded = self.args.kv_cache_dtype == Some(CacheType::Fp8);
        Ok(meter.pool(bytes, if coded { DType::F8E4M3 } else { DType::BF16 })?)
    }

    /// Whether the device had less room than the file asks for.
    pub fn is_lowered(&self, pool: &Pool) -> bool {
        pool.bytes() < self.asked_bytes()
    }
}

fn is_several(names: &[String]) -> bool {
    names.len() > 1 || names.iter().any(|n| n.eq_ignore_ascii_case(ALL))
}

/// The backends that are named, each once; or the device's first for softmax attention and all for latent attention.
fn chosen(
    names: &[String],
    registry: &Registry,
    platform: &str,
    needs: &dyn Fn(KindTag) -> Vec<LayerNeed>,
) -> Result<Vec<Arc<dyn DynBackend>>, CliError> {
    let mut out: Vec<Arc<dyn DynBackend>> = vec![];
    for name in names {
        let all = registry.iter().filter(|b| {
            let kind = b.rules().kind;
            b.rules().platform == platform && matches!(kind, KindTag::Standard | KindTag::Mla)
        });
        let named = match name.eq_ignore_ascii_case(ALL) {
            true => all.cloned().collect(),
            false => vec![backend(Some(name), registry, platform, &[])?],
        };
        for b in named {
            if out.iter().all(|o| o.rules().name != b.rules().name) {
                out.push(b);
            }
        }
    }
    if names.is_empty() {
        out.push(backend(None, registry, platform, &needs(KindTag::Standard))?);
        out.extend(all_of_kind(registry, platform, KindTag::Mla, &needs(KindTag::Mla)));
    }
    Ok(out)
}

impl Run<'_> {
    /// Every reason against the backend for the layer on this device, in words; none where it takes it.
    pub fn refusal(&self, device: &OpenDevice) -> Option<String> {
        let need = LayerNeed {
            compute_capability: device.place.capability,
            block_size: self.block_size,
            ..self.layer.need.clone()
        };
        let all = reasons(self.backend, &need);
        let words: Vec<_> = all.iter().map(ToString::to_string).collect();
        (!words.is_empty()).then(|| words.join(", "))
    }

    /// What `--filter` sees.
    pub fn name(&self) -> String {
        format!("{} {} {}", self.case.id, self.layer.name, line::short(self.layer.need.dtype))
    }
}

pub fn options(args: &AttentionArgs, threads: Option<usize>) -> EngineOptions {
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
pub fn element(text: &str) -> Result<DType, String> {
    match text.parse() {
        Ok(DTypeOption::As(d)) => Ok(d),
        _ => Err("give bf16, f16 or f32".into()),
    }
}
