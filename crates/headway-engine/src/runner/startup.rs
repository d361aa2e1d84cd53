//! Start-up, once: config → needs → backends → KV cache groups and attention groups → layers →
//! profile run → cache. The result is a [`ModelRunner`] and its report.

use super::{
    ModelRunner, StartupError, StartupReport,
    block_size::{self, BlockSizes},
    decide,
    devices::{self, OpenDevice},
    facts::Facts,
    fast_prefill::{FastRows, SharingLayers},
    graphs::{
        CapturedGraphs,
        mode::{self, ModeRequest},
    },
    inputs::InputBuffers,
    limits::{self, Limits},
    micro_batches::{self, MicroBatches},
    needs,
    place::Place,
    present, speculation,
    step_times::StepTimes,
};
use crate::{
    loading::ModelFiles,
    models::{
        Decoder, ModelError, ModelPlan,
        decoder::{DecoderInput, EncoderInput, Kernels, StepLimits, WeightDType},
        headers,
        needs::LayerNeeds,
    },
    options::{DTypeOption, EngineOptions, LoadFormat},
    scheduler::SchedulerConfig,
    speculation::LookupSizes,
    tuning::{self, Here, Tuned},
};
use headway_attention::{
    AttentionError, AttentionGroup, AttnLayer, BuilderPlan, DynBackend, ErasedConfig, GraphMode, KvBuf,
    KvCacheSpec, KvPool, LayerArgs, LayerKernel, LayerNeed, Registry, StepMetadata,
    group::graph::{GraphPlan, GraphResolution},
    group::plan::{CacheLimits, KvCachePlan, LayerCache, plan_kv_cache},
    process::select::Selection,
};
use headway_tensor::{DType, Exec, HostBuf, Ops, Persistent, RowQuant};
use std::{collections::HashMap, sync::Arc};

/// A started model.
pub(crate) struct Startup {
    /// Runs steps.
    pub runner: ModelRunner,
    /// What it was started with.
    pub decided: Decided,
}

/// What selection and planning decided, before any weight is loaded.
pub(crate) struct Decided {
    pub plan: Arc<ModelPlan>,
    pub selections: Vec<Selection>,
    /// The figures that chose each layer's backend.
    pub measured: Vec<Option<String>>,
    /// The measured choice, where it was asked for.
    pub tuned: Option<Tuned>,
    pub configs: HashMap<String, ErasedConfig>,
    pub limits: Limits,
    pub activations: DType,
    pub kv_dtype: DType,
    pub blocks: BlockSizes,
    pub cache: KvCachePlan,
    /// The graph mode, with its lowerings.
    pub graph: GraphResolution,
    /// The shapes to capture in it; `None`: none.
    pub shapes: Option<GraphPlan>,
    /// Why no beginnings are shared.
    pub unshared: Option<&'static str>,
    pub prefix_caching: bool,
    lookup: LookupSizes,
    /// The layers that compute wanted rows alone.
    pub fast_prefill: Option<SharingLayers>,
    pub scheduler: SchedulerConfig,
}

impl Startup {
    /// Starts a model.
    ///
    /// # Errors
    /// Options, selection, memory, weights: each says which and what to do.
    pub fn run(
        files: &ModelFiles,
        options: &EngineOptions,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, StartupError> {
        limits::refuse_what_is_not_there(options)?;
        let mut device = devices::open(options)?;
        let facts = Facts::of(files)?;
        let registry = registry(options)?;
        let decided = decide(&facts, options, &registry, &device.place, || Ok(device.here(&registry)))?;
        if let Some(tuned) = &decided.tuned
            && let Some(level) = tuned.instruction_set(&device.attention_isas())?
        {
            device.lower_attention_isa(level)?;
        }
        headers::check(&decided.plan, &*files.checkpoint)?;
        let decoder = load(files, options, &*device.ops, &decided, progress).map_err(|e| {
            e.in_need_of(
                "the model's weights and activations",
                "lower --max-num-batched-tokens or --max-num-seqs, or choose a smaller model",
            )
        })?;
        let report = report(&facts, files, options, &device, &decided);
        let mut runner = assemble(device, decoder, &decided, report)?;
        runner.profile_run(&decided).map_err(|e| e.in_need_of("a first step", LESS_CACHE))?;
        runner.capture_graphs(&decided, progress)?;
        Ok(Self { runner, decided })
    }
}

impl Decided {
    /// The spec of each KV cache group.
    pub fn specs(&self) -> impl Iterator<Item = &KvCacheSpec> {
        self.cache.kv_cache_groups.iter().map(|g| &g.spec)
    }

    /// How drafts are looked up, where tokens are drafted.
    pub fn lookup(&self) -> Option<LookupSizes> {
        (self.limits.num_speculative_tokens > 0).then_some(self.lookup)
    }
}

/// Everything that can be decided before a weight is read, for a device of which this is known. `here` is asked where
/// the measured choice is.
///
/// # Errors
/// As [`Startup::run`], weights aside.
pub(crate) fn decide(
    facts: &Facts,
    options: &EngineOptions,
    registry: &Registry,
    place: &Place,
    here: impl FnOnce() -> Result<Here, StartupError>,
) -> Result<Decided, StartupError> {
    let available = place.available;
    let plan = facts.plan.clone();
    limits::refuse_what_has_no_effect(options, &plan)?;
    let limits = Limits::resolve(options, plan.max_position_embeddings, place.usual_limits())?;
    micro_batches::refuse_encoders(&limits.micro_batching, &plan)?;
    let lookup = speculation::lookup_sizes(options)?;
    let (activations, kv_dtype) = needs::dtypes(facts, options, place)?;
    let layers = LayerNeeds::of_plan(&plan);
    let fast_prefill = SharingLayers::asked(options.kv_sharing_fast_prefill, &layers, &plan.architecture)?;
    let mut setting = needs::setting(options, place, activations, kv_dtype);
    let tuned = match tuning::asked(options)? {
        true => {
            let needs: Vec<_> = layers.iter().map(|l| setting.need(l)).collect();
            Some(Tuned::read(options, &here()?, registry, &needs)?)
        }
        false => None,
    };
    setting.block_size = setting.block_size.or(tuned.as_ref().and_then(|t| t.setting().block_size));
    let asks: Vec<_> = layers.iter().map(|l| setting.need(l)).collect();
    let selections = needs::select_backends(registry, &asks, options, tuned.as_ref())?;
    let because =
        |(need, s): (&LayerNeed, &Selection)| tuned.as_ref()?.because(need, &s.backend.rules().name);
    let measured = asks.iter().zip(&selections).map(because).collect();
    let blocks = block_size::of_layers(&setting, &layers, &selections, limits.max_model_len)?;
    limits.fit(&plan, available)?;
    fit_made_weights(facts, options, available)?;
    let caches = setting.caches(&layers, &selections, blocks.in_force, limits.max_model_len);
    let rows = Limits { max_model_len: longest(&plan, &limits), ..limits };
    let first_fast = fast_prefill.as_ref().map(|s| s.first);
    let cache = plan_cache(&caches, &rows, options, first_fast, place.usual_kv_memory(facts))?;
    let mut configs = HashMap::new();
    for s in &selections {
        let name = s.backend.rules().name.to_string();
        configs.insert(name, s.backend.configure(&options.backend_config)?);
    }
    let builders = cache.attention_groups.iter().map(|g| {
        let name = &*g.backend.rules().name;
        Ok((name, g.backend.plan(&g.info, &configs[name])?))
    });
    let builders = builders.collect::<Result<Vec<_>, AttentionError>>()?;
    speculation::check_builders(limits.num_speculative_tokens, builders.iter().map(|(n, p)| (*n, p)))?;
    fit_builders(&builders, available)?;
    micro_batches::fit(&limits.micro_batching, builders.iter().map(|(_, p)| p), available)?;
    let plans: Vec<BuilderPlan> = builders.iter().map(|(_, p)| p.clone()).collect();
    let asked = options.graph_mode.as_deref().map(str::parse::<GraphMode>).transpose()?;
    let graph = mode::resolve(
        &cache,
        plans.iter(),
        &ModeRequest {
            platform: place.platform,
            asked,
            decode_query_len: 1 + limits.num_speculative_tokens,
            max_num_reqs: limits.max_num_reqs,
            num_blocks: Some(cache.num_blocks),
        },
    )?;
    let shapes = (graph.mode != GraphMode::None).then(|| mode::shapes(graph.mode, &limits, &cache, &plans));
    let scheduler = SchedulerConfig {
        max_num_batched_tokens: limits.max_num_tokens,
        max_num_seqs: limits.max_num_reqs,
        max_model_len: limits.max_model_len,
        long_prefill_token_threshold: None,
        decode_first_threshold: builders.iter().filter_map(|(_, p)| p.reorder_batch_threshold).min(),
        num_speculative_tokens: limits.num_speculative_tokens,
    };
    scheduler.validate()?;
    // A state at the end of a prompt is no state at the end of a shared beginning.
    let has = |f: fn(&KvCacheSpec) -> bool| cache.kv_cache_groups.iter().any(|g| f(&g.spec));
    // Nor are keys and values of a decoder that read another input.
    let unshared = if has(|s| matches!(s, KvCacheSpec::Mamba(_))) {
        Some("layers with a state keep the running one alone, which covers more than a shared beginning")
    } else if has(|s| matches!(s, KvCacheSpec::Cross(_))) {
        Some("what a decoder keeps of a beginning depends on its encoder's input")
    } else {
        None
    };
    let prefix_caching = !options.no_prefix_caching && unshared.is_none();
    Ok(Decided {
        plan,
        selections,
        measured,
        tuned,
        configs,
        limits,
        activations,
        kv_dtype,
        blocks,
        cache,
        graph,
        shapes,
        unshared,
        prefix_caching,
        lookup,
        fast_prefill,
        scheduler,
    })
}

/// The backends to choose from.
///
/// # Errors
/// Two of one name.
pub(crate) fn registry(options: &EngineOptions) -> Result<Registry, AttentionError> {
    match &options.registry {
        Some(r) => Ok(r.clone()),
        None => devices::registry(),
    }
}

/// What is decided, for people.
fn report(
    facts: &Facts,
    files: &ModelFiles,
    options: &EngineOptions,
    device: &OpenDevice,
    d: &Decided,
) -> StartupReport {
    let mut r = present::report(facts, files, options, device, d);
    present::block_size(&mut r, options.block_size, &d.blocks, d.tuned.as_ref());
    present::prefix_caching(&mut r, options, d.unshared);
    present::speculation(&mut r, options, &d.lookup);
    present::fast_prefill(&mut r, options, &LayerNeeds::of_plan(&d.plan));
    r
}

/// Refuses a builder whose buffers never fit.
fn fit_builders(builders: &[(&str, BuilderPlan)], available: Option<u64>) -> Result<(), StartupError> {
    for (name, plan) in builders {
        let needed = plan.persistent_bytes.saturating_add(plan.workspace_bytes);
        if let Some(available) = available.filter(|a| needed > *a) {
            return Err(StartupError::NoMemoryForBuilder { backend: (*name).to_owned(), needed, available });
        }
    }
    Ok(())
}

/// Weights of files are mapped; those that are made up, or made another type, take memory.
fn fit_made_weights(
    facts: &Facts,
    options: &EngineOptions,
    available: Option<u64>,
) -> Result<(), StartupError> {
    let needed = facts.made_bytes;
    let Some(available) = available.filter(|a| needed > *a) else { return Ok(()) };
    let (what, remedy) = match options.load_format {
        LoadFormat::Dummy => (
            "--load-format dummy".to_owned(),
            "give a config with fewer layers (num_hidden_layers), or a machine with more memory",
        ),
        _ => (
            facts.files.clone(),
            "use a GGUF file, whose quantised weights stay quantised, or a machine with more memory",
        ),
    };
    Err(StartupError::NoMemoryForWeights { what, remedy, needed, available })
}

/// The cache in the memory that may be used, and no larger than the limits can ever fill.
fn plan_cache(
    layers: &[LayerCache],
    limits: &Limits,
    options: &EngineOptions,
    fast_prefill_from: Option<AttnLayer>,
    usual: u64,
) -> Result<KvCachePlan, StartupError> {
    let step = CacheLimits {
        num_speculative_tokens: limits.num_speculative_tokens,
        batch_invariant: options.batch_invariant,
        kv_cache_layout: decide::layout(options.kv_layout.as_deref())?,
        fast_prefill_from,
        ..CacheLimits::new(limits.max_num_reqs, limits.max_num_tokens, limits.max_model_len)
    };
    let budget = match options.kv_cache_memory {
        Some(bytes) => bytes,
        None => usual,
    };
    let budget = usize::try_from(budget).unwrap_or(usize::MAX);
    let plan = plan_kv_cache(layers, &step, budget)?;
    let block_bytes = plan.total_bytes / plan.num_blocks.max(1);
    let most = limits.blocks_ever_used(plan.kv_cache_groups.iter().map(|g| &g.spec));
    if plan.num_blocks <= most {
        return Ok(plan);
    }
    Ok(plan_kv_cache(layers, &step, most * block_bytes)?)
}

fn load(
    files: &ModelFiles,
    options: &EngineOptions,
    ops: &dyn Ops,
    decided: &Decided,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Decoder, StartupError> {
    let dtype = match options.dtype {
        DTypeOption::Auto => WeightDType::Auto,
        DTypeOption::As(d) => WeightDType::As(d),
    };
    let limits = StepLimits {
        max_num_tokens: decided.limits.max_num_tokens,
        max_num_logits: decided.limits.max_num_logits(),
        max_model_len: decided.limits.max_model_len,
    };
    let total = decided.plan.layers.len();
    let mut make = |layer: AttnLayer, args: &LayerArgs<'_>| layer_kernel(decided, layer, args);
    let fuses = |layer: AttnLayer, quant: &RowQuant, head: usize| {
        decided.selections[layer.0 as usize].backend.rules().check_output_quant(quant, head).is_ok()
    };
    let kernels = Kernels {
        activations: decided.activations,
        kv_cache_dtype: decided.kv_dtype,
        fuses: &fuses,
        make: &mut make,
    };
    let plan = ModelPlan::clone(&decided.plan);
    Ok(Decoder::load(plan, &*files.checkpoint, ops, dtype, limits, kernels, |n| progress(n, total))?)
}

/// A layer's impl, from the backend that selection chose.
fn layer_kernel(
    decided: &Decided,
    layer: AttnLayer,
    args: &LayerArgs<'_>,
) -> Result<LayerKernel, ModelError> {
    let backend: &Arc<dyn DynBackend> = &decided.selections[layer.0 as usize].backend;
    Ok(backend.layer(args, &decided.configs[&*backend.rules().name])?)
}

/// The longest row of a block table, in tokens: a request's, or its encoder's input.
fn longest(plan: &ModelPlan, limits: &Limits) -> usize {
    plan.encoder.as_ref().map_or(0, |e| e.max_tokens).max(limits.max_model_len)
}

const LESS_CACHE: &str = "lower --kv-cache-memory";
const SMALLER_STEPS: &str = "lower --max-num-batched-tokens, --max-num-seqs or --max-model-len";

/// Builders, cache and input buffers around a loaded decoder.
fn assemble(
    device: OpenDevice,
    decoder: Decoder,
    decided: &Decided,
    mut report: StartupReport,
) -> Result<ModelRunner, StartupError> {
    let cx = &*device.ops;
    let cache = &decided.cache;
    let groups = cache
        .attention_groups
        .iter()
        .map(|g| {
            let config = &decided.configs[&*g.backend.rules().name];
            AttentionGroup::from_plan(g, cx, config, decided.limits.micro_batching.num_micro_batches)
        })
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| StartupError::from(e).in_need_of("metadata and workspaces", SMALLER_STEPS))?;
    let buf = kv_memory(cx, cache.total_bytes)
        .map_err(|e| StartupError::from(e).in_need_of("the KV cache", LESS_CACHE))?;
    let kv = KvPool::new(vec![buf], cache.handles.clone())?;
    let specs: Vec<_> = decided.specs().cloned().collect();
    let l = &decided.limits;
    let (reqs, tokens, logits) = (l.max_num_reqs, l.max_num_tokens, l.max_num_logits());
    let inputs = InputBuffers::new(cx, reqs, tokens, logits, longest(&decided.plan, l), &specs)
        .map_err(|e| StartupError::from(e).in_need_of("the inputs of a step", SMALLER_STEPS))?;
    let sampler = match decided.plan.pooling {
        None => cx.row_sampler(logits, decided.plan.vocab_size)?,
        Some(_) => None,
    };
    present::finish(&mut report, &groups, &decoder, kv.bytes(), l.micro_batching.num_micro_batches);
    report.memory.activations_bytes += sampler.as_ref().map_or(0, |s| s.bytes()) as u64;
    let step = StepMetadata::new(cache.group_of_layer.clone());
    let sharing = decided.fast_prefill.as_ref();
    Ok(ModelRunner {
        micro: MicroBatches::new(cx, l.micro_batching, reqs, logits, &step, sharing)?,
        fast: sharing.map(|s| FastRows::new(cx, s, reqs, logits)).transpose()?,
        step,
        graphs: CapturedGraphs::default(),
        ops: device.ops,
        host_rows: vec![],
        sampler,
        commons: vec![],
        decoder,
        groups,
        kv,
        inputs,
        report,
        times: StepTimes::default(),
    })
}

/// Zeroed memory of the KV cache.
fn kv_memory(cx: &dyn Exec, bytes: usize) -> headway_tensor::Result<KvBuf> {
    Ok(match cx.alloc(bytes)? {
        Some(mem) => {
            cx.zero(&mem, 0, bytes);
            KvBuf::Dev(mem)
        }
        None => KvBuf::Host(HostBuf::zeroed(bytes)?),
    })
}

impl ModelRunner {
    /// One token without metadata: every layer's path is walked once, attention fills zeros, no cache is
    /// touched. On the host buffers have their full size already, so there is no memory to measure.
    fn profile_run(&mut self, decided: &Decided) -> Result<(), StartupError> {
        let step = StepMetadata::profile_run(decided.cache.group_of_layer.clone(), self.groups.len(), 1);
        let zero = Persistent::new(&*self.ops, 1)?.write(&*self.ops, 1, |o| o.fill(0));
        let encoder = Some(EncoderInput { token_ids: &zero, positions: &zero });
        let input = DecoderInput {
            token_ids: &zero,
            positions: &zero,
            logits_rows: &zero,
            encoder,
            fast_prefill: None,
        };
        match self.decoder.plan().pooling {
            None => self.decoder.forward(&*self.ops, &input, &step, &mut self.kv)?,
            Some(_) => self.decoder.encode(&*self.ops, &input, &step, &mut self.kv)?,
        };
        Ok(())
    }
}
