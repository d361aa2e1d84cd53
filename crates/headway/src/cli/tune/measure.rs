//! The figures: each layer's backends, in each setting, on each batch.
//!
//! On the CPU what would be taken without figures comes first: the strongest instruction set and the block size that the
//! backends prefer. Then the other instruction sets with those blocks, each given up in the first batch that takes it
//! [`HOPELESS`] times as long; then the other block sizes in the best of these.

use super::{
    super::{
        CliError,
        measure::{
            Case, Layer, Prepared, Replayed, Setup, blocks_of,
            meter::{self, Ceilings, Meter, Pool},
            progress,
        },
    },
    TuneArgs, regimes,
};
use headway_attention::{
    DynBackend, KvCacheLayout, LayerNeed,
    process::select::{BackendRequest, reasons, select},
};
use headway_engine::{
    options::EngineOptions,
    runner::{
        StartupError,
        block_size::{DEFAULT_BLOCK_SIZE, block_size_error_of},
        decide,
        devices::OpenDevice,
    },
    tuning::{
        Candidate, Class, Figure, LARGEST_SHARE, LayerProfile, LayerQuestion, Question, Setting, Weights,
        choose, plain, unmeasured,
    },
};
use headway_tensor::DType;
use indicatif::ProgressBar;
use std::sync::Arc;

/// How many times as long as in the strongest instruction set is given up.
const HOPELESS: f64 = 3.0;
/// Block sizes of the CPU, where none are asked for.
const BLOCK_SIZES: [usize; 4] = [16, 32, 64, 128];
/// Bytes of cache that cold calls rotate through, where batches don't need more.
const POOL: usize = 512 << 20;

/// What came out.
pub struct Outcome {
    /// Each shape's figures; nothing is chosen where something was measured.
    pub layers: Vec<LayerProfile>,
    /// What the device does at most.
    pub ceilings: Ceilings,
}

/// A layer to measure, and who takes it.
struct Subject<'a> {
    question: &'a LayerQuestion,
    layer: Layer,
    backends: Vec<Arc<dyn DynBackend>>,
    candidates: Vec<Candidate>,
}

/// What stays the same in all settings.
struct Run<'a> {
    cases: Vec<Case>,
    ceilings: Ceilings,
    samples: usize,
    options: &'a EngineOptions,
    bar: ProgressBar,
}

/// Measures.
///
/// # Errors
/// A model without a layer that can be measured; memory; the device's own. What one backend fails with is kept with it.
pub fn run(
    args: &TuneArgs,
    options: &EngineOptions,
    question: &Question,
    device: &mut OpenDevice,
) -> Result<Outcome, CliError> {
    let (mut subjects, rest) = subjects(question, options)?;
    let levels = levels(args, device)?;
    let sizes = block_sizes(args, options, &subjects, device)?;
    let (ceilings, mut pool, cases) = {
        let meter = meter::of(&*device.ops)?;
        let asked =
            regimes::Asked { batches: &args.batches, contexts: &args.contexts, prompts: &args.prompts };
        let new_tokens = 1 + options.speculative_tokens.unwrap_or(0);
        let all = regimes::of(asked, device.place.platform, question.max_model_len, new_tokens);
        let (bytes, cases) = fit(&subjects, all, &sizes, device)?;
        let cache = subjects.first().map_or(DType::BF16, |s| s.layer.cache.dtype());
        (meter.ceilings()?, meter.pool(bytes, cache)?, cases)
    };
    let backends: usize = subjects.iter().map(|s| s.backends.len()).sum();
    let settings = levels.len().max(1) + sizes.len().max(1) - 1;
    let bar = progress(settings * backends * cases.len());
    let run = Run { cases, ceilings, samples: args.repetitions, options, bar };
    let first_size = sizes.first().copied();
    for level in levels.iter().map(Some).chain(levels.is_empty().then_some(None)) {
        let setting = Setting { instruction_set: level.cloned(), block_size: first_size };
        run.setting(&mut subjects, &setting, device, &mut pool)?;
    }
    let best = best(&subjects, &args.weights)?.instruction_set;
    for size in sizes.iter().skip(1) {
        let setting = Setting { instruction_set: best.clone(), block_size: Some(*size) };
        run.setting(&mut subjects, &setting, device, &mut pool)?;
    }
    run.compositions(&mut subjects, question, &args.weights, device, &mut pool)?;
    run.bar.finish_and_clear();
    let mut layers: Vec<LayerProfile> = subjects.iter().map(Subject::profile).collect();
    layers.extend(rest);
    Ok(Outcome { layers, ceilings: run.ceilings })
}

/// Layers that can be measured with who takes them, and the others as they stand.
fn subjects<'a>(
    question: &'a Question,
    options: &EngineOptions,
) -> Result<(Vec<Subject<'a>>, Vec<LayerProfile>), CliError> {
    let layout = decide::layout(options.kv_layout.as_deref())?;
    let (mut subjects, mut rest) = (vec![], vec![]);
    for (i, q) in question.layers.iter().enumerate() {
        if let Some(why) = unmeasured(&q.need) {
            let s = select(&question.registry, &q.what, &q.need, &BackendRequest::default())?;
            let taken = format!("{why} are not measured; the first that fits is taken");
            rest.push(profile(q, s.backend.rules().name.to_string(), Some(taken), vec![]));
            continue;
        }
        let need = LayerNeed { block_size: options.block_size, ..q.need.clone() };
        let fits = |b: &&Arc<dyn DynBackend>| reasons(*b, &need).is_empty();
        let backends: Vec<_> = question.registry.iter().filter(fits).cloned().collect();
        if backends.is_empty() {
            // Says of each what is against it.
            let layers = format!("layers of {}", q.what);
            select(&question.registry, &layers, &need, &BackendRequest::default())?;
        }
        let backends = match layout {
            Some(layout) => readers(backends, layout, options)?,
            None => backends,
        };
        let name = format!("layer {i}");
        let layer = Layer { name, need: q.need.clone(), cache: q.cache.clone() };
        subjects.push(Subject { question: q, layer, backends, candidates: vec![] });
    }
    match subjects.is_empty() {
        true => Err(CliError::Usage(format!(
            "{}: none of its layers is measured: {}; leave --attention-backend out for it",
            question.model,
            rest.iter().map(|l| l.what.clone()).collect::<Vec<_>>().join("; ")
        ))),
        false => Ok((subjects, rest)),
    }
}

/// Those that read the cache in this layout.
fn readers(
    backends: Vec<Arc<dyn DynBackend>>,
    layout: KvCacheLayout,
    options: &EngineOptions,
) -> Result<Vec<Arc<dyn DynBackend>>, CliError> {
    let (read, others): (Vec<_>, Vec<_>) =
        backends.into_iter().partition(|b| b.rules().kv_cache_layouts.contains(&layout));
    if !read.is_empty() {
        return Ok(read);
    }
    let reads = |b: &Arc<dyn DynBackend>| {
        let names: Vec<_> = b.rules().kv_cache_layouts.iter().map(|l| l.name()).collect();
        format!("{} reads {}", b.rules().name, names.join(", "))
    };
    Err(CliError::Startup(StartupError::Option {
        option: "--kv-layout",
        value: options.kv_layout.clone().unwrap_or_default(),
        why: format!("no backend reads it: {}", others.iter().map(reads).collect::<Vec<_>>().join("; ")),
    }))
}

/// Instruction sets to try, strongest first; none on a device without.
fn levels(args: &TuneArgs, device: &OpenDevice) -> Result<Vec<String>, CliError> {
    let all = device.attention_isas();
    let wrong = |name: &str, why: String| {
        Err(CliError::Startup(StartupError::Option { option: "--instruction-sets", value: name.into(), why }))
    };
    for name in &args.instruction_sets {
        if !all.iter().any(|l| l.eq_ignore_ascii_case(name)) {
            let there = if all.is_empty() { "none: it is no CPU".into() } else { all.join(", ") };
            return wrong(name, format!("{} has {there}", device.description));
        }
    }
    let asked = |l: &&str| {
        args.instruction_sets.is_empty() || args.instruction_sets.iter().any(|n| n.eq_ignore_ascii_case(l))
    };
    Ok(all.into_iter().filter(|l| asked(l)).map(str::to_owned).collect())
}

/// Block sizes to try, the preferred one first; none: what each backend prefers.
fn block_sizes(
    args: &TuneArgs,
    options: &EngineOptions,
    subjects: &[Subject<'_>],
    device: &OpenDevice,
) -> Result<Vec<usize>, CliError> {
    if let Some(size) = options.block_size {
        return Ok(vec![size]);
    }
    if !args.block_sizes.is_empty() {
        let mut sizes: Vec<usize> = vec![];
        for size in &args.block_sizes {
            if let Some(s) = subjects.iter().find(|s| !s.takes(*size)) {
                let rules = s.backends.iter().map(|b| b.rules());
                return Err(block_size_error_of("--block-sizes", *size, rules).into());
            }
            if !sizes.contains(size) {
                sizes.push(*size);
            }
        }
        return Ok(sizes);
    }
    if !device.place.is_host() {
        return Ok(vec![]);
    }
    let firsts = subjects.iter().filter_map(|s| s.backends.first());
    let preferred = firsts.map(|b| b.rules().preferred_block_size(DEFAULT_BLOCK_SIZE)).max();
    let preferred = preferred.unwrap_or(DEFAULT_BLOCK_SIZE);
    let all = std::iter::once(preferred).chain(BLOCK_SIZES.into_iter().filter(|b| *b != preferred));
    Ok(all.filter(|size| subjects.iter().all(|s| s.takes(*size))).collect())
}

/// Bytes of the pool, and the batches that fit into the memory for it: half of what is free on the host, 60 % elsewhere.
fn fit(
    subjects: &[Subject<'_>],
    cases: Vec<Case>,
    sizes: &[usize],
    device: &OpenDevice,
) -> Result<(usize, Vec<Case>), CliError> {
    let share = if device.place.is_host() { 50 } else { 60 };
    let free = device.place.available.map_or(usize::MAX, |free| (free / 100 * share) as usize);
    let largest = sizes.iter().copied().max().unwrap_or(LARGEST_PREFERRED);
    let of = |s: &Subject<'_>, c: &Case| blocks_of(c, largest) * largest * s.layer.token_bytes();
    let needed = |c: &Case| subjects.iter().map(|s| of(s, c)).max().unwrap_or(0);
    let (cases, left): (Vec<_>, Vec<_>) = cases.into_iter().partition(|c| needed(c) <= free);
    if !left.is_empty() {
        let names: Vec<_> = left.iter().map(|c| c.id.as_str()).collect();
        note!("headway: left out, larger than the memory for it: {}", names.join(", "));
    }
    match cases.iter().map(needed).max() {
        None => Err(CliError::Usage("no batch fits into the free memory; give smaller --contexts".into())),
        Some(most) => Ok((most.max(POOL.min(free)), cases)),
    }
}

/// The largest block that a backend prefers.
const LARGEST_PREFERRED: usize = 128;

fn profile(
    q: &LayerQuestion,
    backend: String,
    not_measured: Option<String>,
    candidates: Vec<Candidate>,
) -> LayerProfile {
    let (what, shape) = (q.what.clone(), q.shape.clone());
    LayerProfile { what, shape, layers: q.layers, backend, not_measured, candidates }
}

impl Subject<'_> {
    /// Whether any of its backends takes blocks of this size.
    fn takes(&self, block_size: usize) -> bool {
        let need = LayerNeed { block_size: Some(block_size), ..self.question.need.clone() };
        self.backends.iter().any(|b| reasons(b, &need).is_empty())
    }

    fn profile(&self) -> LayerProfile {
        profile(self.question, String::new(), None, self.candidates.clone())
    }
}

/// The backend that is quickest in a class's batches.
fn quickest<'a>(all: &'a [Candidate], setting: &Setting, class: Class) -> Option<&'a str> {
    let in_it = all.iter().filter(|c| c.setting == *setting && c.left.is_none());
    let times = in_it.filter_map(|c| Some((c.mean_us(class)?, c.backend.as_str())));
    times.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, name)| name)
}

/// The setting that is best so far.
fn best(subjects: &[Subject<'_>], weights: &Weights) -> Result<Setting, CliError> {
    let mut layers: Vec<LayerProfile> = subjects.iter().map(Subject::profile).collect();
    chosen(&mut layers, weights)
}

/// Chooses the setting, and a backend for each layer that was measured.
///
/// # Errors
/// A layer without one, with what is against it.
pub fn chosen(layers: &mut [LayerProfile], weights: &Weights) -> Result<Setting, CliError> {
    let setting = choose(layers, weights);
    let Some(lost) = layers.iter().find(|l| l.not_measured.is_none() && l.backend.is_empty()) else {
        return Ok(setting);
    };
    let left = lost.candidates.iter().filter_map(|c| Some(format!("{}: {}", c.backend, c.left.as_ref()?)));
    let left: Vec<String> = left.collect();
    let why = if !left.is_empty() {
        left.join("; ")
    } else if lost.candidates.is_empty() {
        "none takes it in these settings".into()
    } else if lost.candidates.iter().all(|c| c.score.is_none()) {
        "no batch is left of a class that --weights counts".into()
    } else {
        "no instruction set and block size was measured for all layers".into()
    };
    Err(CliError::Usage(format!("{}: no backend could be measured: {why}", lost.what)))
}

impl Run<'_> {
    /// Measures every layer's backends in a setting.
    fn setting(
        &self,
        subjects: &mut [Subject<'_>],
        setting: &Setting,
        device: &mut OpenDevice,
        pool: &mut Pool,
    ) -> Result<(), CliError> {
        if let Some(level) = &setting.instruction_set {
            device.lower_attention_isa(level)?;
        }
        let meter = meter::of(&*device.ops)?;
        for s in subjects {
            for backend in &s.backends {
                // In another instruction set.
                let strongest = s.candidates.iter().find(|c| c.backend == *backend.rules().name).cloned();
                let strongest = strongest.filter(|c| c.setting.instruction_set != setting.instruction_set);
                let of = (backend, &s.layer, setting);
                if let Some(c) = self.candidate(of, strongest.as_ref(), device, &*meter, pool)? {
                    s.candidates.push(c);
                }
            }
        }
        Ok(())
    }

    /// The best backend for decodes with the best for prompts as one, in the best setting of its layer, where they differ
    /// and can be one.
    fn compositions(
        &self,
        subjects: &mut [Subject<'_>],
        question: &Question,
        weights: &Weights,
        device: &mut OpenDevice,
        pool: &mut Pool,
    ) -> Result<(), CliError> {
        let setting = best(subjects, weights)?;
        if let Some(level) = &setting.instruction_set {
            device.lower_attention_isa(level)?;
        }
        let meter = meter::of(&*device.ops)?;
        for s in subjects {
            let of_class = |class| quickest(&s.candidates, &setting, class);
            let (Some(decode), Some(prefill)) = (of_class(Class::Decode), of_class(Class::Prefill)) else {
                continue;
            };
            if decode == prefill {
                continue;
            }
            let both = question.registry.get_on(&format!("{decode}+{prefill}"), device.place.platform);
            // Two that can't be one, or not for this layer, are no candidate.
            let Some(both) = both.ok().filter(|b| reasons(b, &s.question.need).is_empty()) else { continue };
            self.bar.inc_length(self.cases.len() as u64);
            let of = (&both, &s.layer, &setting);
            s.candidates.extend(self.candidate(of, None, device, &*meter, pool)?);
        }
        Ok(())
    }

    /// A backend's times; `None` where it doesn't take the setting.
    fn candidate(
        &self,
        (backend, layer, setting): (&Arc<dyn DynBackend>, &Layer, &Setting),
        strongest: Option<&Candidate>,
        device: &OpenDevice,
        meter: &dyn Meter,
        pool: &mut Pool,
    ) -> Result<Option<Candidate>, CliError> {
        let layout = match decide::layout(self.options.kv_layout.as_deref())? {
            Some(layout) => layout,
            None => backend.rules().kv_cache_layouts.first().copied().unwrap_or_default(),
        };
        let block_size = setting.block_size;
        let (ceilings, replayed) = (&self.ceilings, Replayed::Decodes);
        let setup = Setup { backend, device, meter, ceilings, layer, block_size, layout, replayed };
        let skip = |cases: usize| self.bar.inc(cases as u64);
        let readable = backend.rules().kv_cache_layouts.contains(&layout);
        let Some(block_size) = setup.checked_block_size().ok().filter(|_| readable) else {
            skip(self.cases.len());
            return Ok(None);
        };
        let mut out = Candidate {
            backend: backend.rules().name.to_string(),
            setting: setting.clone(),
            block_size,
            score: None,
            left: None,
            figures: vec![],
        };
        for (done, case) in self.cases.iter().enumerate() {
            match self.figure(setup, case, pool) {
                Ok(f) => {
                    let of_strongest = strongest.and_then(|c| c.median_us(&f.regime));
                    if let Some(us) = of_strongest.filter(|us| f.median_us > HOPELESS * us) {
                        let times = f.median_us / us;
                        out.left = Some(format!("{times:.1} times as long in {}", f.regime));
                    }
                    out.figures.push(f);
                }
                Err(e) => out.left = Some(plain(&e.to_string())),
            }
            self.bar.inc(1);
            if out.left.is_some() {
                skip(self.cases.len() - done - 1);
                break;
            }
        }
        Ok(Some(out))
    }

    fn figure(&self, setup: Setup<'_>, case: &Case, pool: &mut Pool) -> Result<Figure, CliError> {
        let mut prepared = Prepared::new(setup, case, pool)?;
        let drafts = setup.layer.need.num_speculative_tokens;
        if let Some(most) = prepared.longest_decode().filter(|most| *most <= drafts) {
            let why = format!(
                "it takes {most} new tokens of a decode, and {drafts} drafted ones make {}",
                drafts + 1
            );
            return Err(CliError::Usage(why));
        }
        let m = prepared.measure(Some(self.samples), pool)?;
        // As many digits as a file keeps exactly.
        let us = |seconds: f64| (seconds * 1e9).round().max(1.0) / 1e3;
        Ok(Figure {
            regime: case.id.clone(),
            class: regimes::class(case.kind),
            median_us: us(m.timing.median),
            min_us: us(m.timing.min),
            max_us: us(m.timing.max),
            // Beyond the largest it says nothing of the kernel.
            share_of_ceiling: m
                .least
                .map(|least| (least / m.timing.median * 1e4).round().max(1.0) / 1e4)
                .filter(|share| *share <= LARGEST_SHARE),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use headway_attention::{AttentionBackend, Registry, RuleBook};
    use headway_cpu::CpuAttn;
    use headway_engine::runner::devices;

    /// CPU_ATTN by another name.
    enum Other {}

    impl AttentionBackend for Other {
        const CONTRACT: u32 = 1;
        type Exec = <CpuAttn as AttentionBackend>::Exec;
        type Kind = <CpuAttn as AttentionBackend>::Kind;
        type Config = <CpuAttn as AttentionBackend>::Config;
        type Builder = <CpuAttn as AttentionBackend>::Builder;
        type Impl = <CpuAttn as AttentionBackend>::Impl;
        fn rules() -> RuleBook {
            RuleBook { name: "OTHER".into(), ..CpuAttn::rules() }
        }
    }

    /// As if measured: a decode and a prompt.
    fn measured(backend: &str, decode_us: f64, prefill_us: f64) -> Candidate {
        let figure = |class: Class, us| Figure {
            regime: class.name().into(),
            class,
            median_us: us,
            min_us: us,
            max_us: us,
            share_of_ceiling: None,
        };
        Candidate {
            backend: backend.into(),
            setting: Setting::default(),
            block_size: 16,
            score: None,
            left: None,
            figures: vec![figure(Class::Decode, decode_us), figure(Class::Prefill, prefill_us)],
        }
    }

    #[test]
    fn the_quickest_for_decodes_and_for_prompts_are_tried_as_one() -> Result<(), CliError> {
        let mut registry = Registry::default();
        headway_cpu::register(&mut registry)?;
        registry.register::<Other>()?;
        let options =
            EngineOptions { threads: Some(1), registry: Some(registry), ..EngineOptions::default() };
        let mut device = devices::open(&options)?;
        let model = headway_testkit::testdata::model_dir("tiny-llama").unwrap();
        let question = Question::of(&model, &options, &device)?;
        let (mut subjects, rest) = subjects(&question, &options)?;
        let names = |s: &Subject<'_>| -> Vec<String> {
            s.backends.iter().map(|b| b.rules().name.to_string()).collect()
        };
        assert_eq!(
            (subjects.len(), rest.len(), names(&subjects[0])),
            (1, 0, vec!["CPU_ATTN".to_owned(), "OTHER".to_owned()])
        );
        let asked = regimes::Asked { batches: &[2], contexts: &[40], prompts: &[20] };
        let run = Run {
            cases: regimes::of(asked, "cpu", question.max_model_len, 1),
            ceilings: Ceilings { read: 1e10, write: 1e10, compute: Some(1e11), words: String::new() },
            samples: 1,
            options: &options,
            bar: ProgressBar::hidden(),
        };
        let mut pool = meter::of(&*device.ops)?.pool(4 << 20, DType::BF16)?;
        let weights = Weights::default();
        let mut tried = |candidates: Vec<Candidate>| -> Result<Vec<Candidate>, CliError> {
            subjects[0].candidates = candidates;
            let before = subjects[0].candidates.len();
            run.compositions(&mut subjects, &question, &weights, &mut device, &mut pool)?;
            Ok(subjects[0].candidates.split_off(before))
        };
        let both = tried(vec![measured("CPU_ATTN", 20.0, 100.0), measured("OTHER", 10.0, 200.0)])?;
        assert_eq!(both.len(), 1);
        assert_eq!((both[0].backend.as_str(), &both[0].left), ("OTHER+CPU_ATTN", &None));
        let regimes: Vec<_> = both[0].figures.iter().map(|f| f.regime.as_str()).collect();
        assert_eq!(regimes, ["decode_b2_c40", "prefill_1x20", "mixed_1p20_2d40"]);
        assert!(both[0].figures.iter().all(|f| f.median_us > 0.0));
        // One is the quickest for both.
        assert!(tried(vec![measured("CPU_ATTN", 10.0, 100.0), measured("OTHER", 20.0, 200.0)])?.is_empty());
        // What was given up or failed is no part.
        let failed = Candidate { left: Some("failed".into()), ..measured("OTHER", 1.0, 200.0) };
        assert!(tried(vec![measured("CPU_ATTN", 10.0, 100.0), failed.clone()])?.is_empty());
        // Nothing to choose from is an error with its reasons, and no setting.
        let why = |candidates: Vec<Candidate>, weights: &Weights| {
            let of = |s: &Subject<'_>| LayerProfile { candidates: candidates.clone(), ..s.profile() };
            chosen(&mut [of(&subjects[0])], weights).unwrap_err().to_string()
        };
        assert!(why(vec![], &weights).ends_with("none takes it in these settings"));
        let failed = Candidate { figures: vec![], ..failed };
        assert!(why(vec![failed], &weights).ends_with("could be measured: OTHER: failed"));
        let mixed: Weights = "mixed=1".parse().unwrap();
        let e = why(vec![measured("OTHER", 1.0, 1.0)], &mixed);
        assert!(e.ends_with("of a class that --weights counts"), "{e}");
        Ok(())
    }
}
