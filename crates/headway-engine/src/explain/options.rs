//! What can be asked, held against the model and against itself.

use super::{Contenders, ExplainError, Target, subject::WeightBytes};
use crate::{
    models::{ModelNeeds, needs::MixerNeeds},
    options::{DTypeOption, EngineOptions},
    runner::{
        decide::{self, Setting},
        devices,
        limits::{self, Limits, UsualLimits},
        memory, needs, speculation,
    },
    speculation::LookupSizes,
    tuning::{self, TUNED, Tuned},
};
use headway_attention::{
    BackendRequest, GraphMode, KvCacheLayout, LayerNeed, group::graph::MicroBatching,
    process::rules::KvCacheDType,
};
use headway_tensor::DType;

/// Requests in a step of vLLM, where not asked.
const VLLM_MAX_NUM_SEQS: usize = 256;
/// New tokens in a step of vLLM, where not asked.
const VLLM_MAX_NUM_BATCHED_TOKENS: usize = 8192;
/// Tokens of a request where neither a user nor the config says.
const UNKNOWN_MODEL_LEN: usize = 2048;
/// The share of a device's memory that engines take.
pub(super) const MEMORY_SHARE: f64 = 0.9;

/// What is asked of [`explain`](super::explain()).
#[derive(Clone, Default)]
pub struct ExplainOptions {
    /// The option set that every command shares.
    pub engine: EngineOptions,
    /// `--compilation`; `None`: not asked.
    pub compilation: Option<bool>,
    /// `--pcp`.
    pub prefill_context_parallel: Option<usize>,
    /// `--kv-connector`.
    pub kv_connector: bool,
    /// `--memory`, in bytes.
    pub memory: Option<u64>,
}

/// A question with everything settled that doesn't depend on backends.
pub struct Query {
    pub(super) target: Target,
    pub(super) setting: Setting,
    pub(super) request: BackendRequest,
    /// The measured choice, where it is asked for.
    pub(super) tuned: Option<Tuned>,
    pub(super) layout: Option<KvCacheLayout>,
    pub(super) graph_mode: Option<GraphMode>,
    /// Of headway's own engine.
    pub(super) own: bool,
    pub(super) compilation: bool,
    pub(super) max_model_len: usize,
    pub(super) max_num_seqs: usize,
    pub(super) max_num_batched_tokens: usize,
    pub(super) micro_batching: MicroBatching,
    pub(super) kv_memory: u64,
    pub(super) kv_memory_because: String,
    pub(super) weights_bytes: Option<u64>,
    /// What they take on a device that takes no block-quantised ones.
    pub(super) device_weights_bytes: Option<u64>,
    /// Of headway's own engine: how drafts are looked up.
    pub(super) lookup: Option<LookupSizes>,
    pub(super) asked: ExplainOptions,
}

impl Query {
    /// Holds options against each other, the model and the engine.
    ///
    /// # Errors
    /// [`ExplainError`].
    pub(super) fn new(
        model: &ModelNeeds,
        weights: WeightBytes,
        options: &ExplainOptions,
        contenders: &Contenders,
    ) -> Result<Self, ExplainError> {
        let o = &options.engine;
        let own = matches!(contenders, Contenders::Own(_));
        let target = Target::parse(o.device.as_deref().unwrap_or(if own { "cpu" } else { "h100" }))?;
        refuse_what_does_not_belong(options, own, &target)?;
        let request = backends(o, contenders)?;
        let graph_mode = o.graph_mode.as_deref().map(str::parse::<GraphMode>).transpose()?;
        contradictions(options, model, &target, graph_mode, own)?;
        let dtype = dtype(o.dtype, model.dtype, &target, own);
        let (kv_cache_dtype, kv_element) = match own {
            true => {
                let element = needs::kv_cache_dtype(dtype, o)?;
                (KvCacheDType::from(needs::kv_name(element).to_owned()), element)
            }
            false => kv_cache_dtype(o, model, dtype, contenders)?,
        };
        let limits = limits_in_force(o, model, own, &target)?;
        let device_weights_bytes = weights.dequantised.filter(|_| target.platform != "cpu");
        let (kv_memory, kv_memory_because) =
            kv_memory(options, &target, device_weights_bytes.or(weights.in_files));
        let mut setting = Setting {
            platform: target.platform,
            capability: target.capability,
            block_size: o.block_size,
            batch_invariant: o.batch_invariant,
            kv_connector: options.kv_connector,
            tp: o.tensor_parallel.unwrap_or(1),
            dcp: o.decode_context_parallel.unwrap_or(1),
            pcp: options.prefill_context_parallel.unwrap_or(1),
            speculative_tokens: o.speculative_tokens.unwrap_or(0),
            model_head_size: model.head_size,
            ..Setting::cpu(
                if own && target.platform == "cpu" { DType::F32 } else { dtype },
                kv_cache_dtype,
                kv_element,
            )
        };
        let tuned = tuned(model, o, contenders, &target, &setting)?;
        setting.block_size = setting.block_size.or(tuned.as_ref().and_then(|t| t.setting().block_size));
        Ok(Self {
            setting,
            request,
            tuned,
            layout: decide::layout(o.kv_layout.as_deref())?,
            graph_mode,
            own,
            compilation: options.compilation.unwrap_or(true),
            max_model_len: limits.max_model_len,
            max_num_seqs: limits.max_num_reqs,
            max_num_batched_tokens: limits.max_num_tokens,
            micro_batching: limits.micro_batching,
            kv_memory,
            kv_memory_because,
            weights_bytes: weights.in_files,
            device_weights_bytes,
            lookup: own.then(|| speculation::lookup_sizes(o)).transpose()?,
            asked: options.clone(),
            target,
        })
    }
}

/// Options of the other engine, and what headway refuses by name.
fn refuse_what_does_not_belong(x: &ExplainOptions, own: bool, target: &Target) -> Result<(), ExplainError> {
    let o = &x.engine;
    let refuse = |option: &'static str, value: String, why: &str| {
        Err(ExplainError::Option { option, value, why: why.into() })
    };
    if own {
        // Modes of a device with graphs are resolved, not refused.
        let here = EngineOptions {
            graph_mode: o.graph_mode.clone().filter(|_| target.platform == "cpu"),
            ..o.clone()
        };
        limits::refuse_what_is_not_there(&here)?;
        if let Some(c) = x.compilation {
            let value = if c { "on" } else { "off" };
            return refuse(
                "--compilation",
                value.into(),
                "headway has no compiler to switch; it is for --engine vllm",
            );
        }
        if let Some(n) = x.prefill_context_parallel.filter(|n| *n > 1) {
            return refuse(
                "--pcp",
                n.to_string(),
                "headway has no prefill context parallelism; supported: 1",
            );
        }
        if x.kv_connector {
            return refuse(
                "--kv-connector",
                "true".into(),
                "headway has no KV connectors; it is for --engine vllm",
            );
        }
        return Ok(());
    }
    if let Some(n) = o.micro_batches.filter(|n| *n > 1) {
        return refuse("--micro-batches", n.to_string(), "is for --engine headway; leave it out");
    }
    let sizes = [("--prompt-lookup-min", o.prompt_lookup_min), ("--prompt-lookup-max", o.prompt_lookup_max)];
    if let Some((option, n)) = sizes.into_iter().find_map(|(o, n)| Some((o, n?))) {
        return refuse(option, n.to_string(), "is for --engine headway; leave it out");
    }
    Ok(())
}

/// The backends asked for, by their right names.
fn backends(o: &EngineOptions, contenders: &Contenders) -> Result<BackendRequest, ExplainError> {
    let name = |n: &String| contenders.backend_name(n);
    let tuned = tuning::asked(o)?;
    if tuned && !matches!(contenders, Contenders::Own(_)) {
        return Err(ExplainError::Option {
            option: "--attention-backend",
            value: TUNED.into(),
            why: "headway tune measures headway's backends; it is for --engine headway".into(),
        });
    }
    Ok(BackendRequest {
        backend: o.attention_backend.as_ref().filter(|_| !tuned).map(name).transpose()?,
        per_kind: o
            .backend_per_kind
            .iter()
            .map(|(kind, n)| Ok((kind.clone(), name(n)?)))
            .collect::<Result<_, ExplainError>>()?,
    })
}

/// The measured choice for a target. A CPU is this machine's; of a card that is only named, whatever machine has it,
/// the capability has to agree.
fn tuned(
    model: &ModelNeeds,
    o: &EngineOptions,
    contenders: &Contenders,
    target: &Target,
    setting: &Setting,
) -> Result<Option<Tuned>, ExplainError> {
    let Contenders::Own(registry) = contenders else { return Ok(None) };
    if !tuning::asked(o)? {
        return Ok(None);
    }
    let needs: Vec<LayerNeed> = model.mixers.iter().map(|l| setting.need(l)).collect();
    Ok(Some(match target.capability {
        None => Tuned::read(o, &devices::open(o)?.here(registry), registry, &needs)?,
        Some(c) => Tuned::of_named(o, target.platform, &c.to_string(), registry, &needs)?,
    }))
}

fn contradictions(
    x: &ExplainOptions,
    model: &ModelNeeds,
    target: &Target,
    graph_mode: Option<GraphMode>,
    own: bool,
) -> Result<(), ExplainError> {
    let o = &x.engine;
    let (tp, dcp) = (o.tensor_parallel.unwrap_or(1), o.decode_context_parallel.unwrap_or(1));
    let clash = |one: String, other: String, why: &str| Err(ExplainError::contradiction(one, other, why));
    if !tp.is_multiple_of(dcp) {
        return clash(
            format!("--dcp {dcp}"),
            format!("--tp {tp}"),
            "the ranks that share tokens are tensor-parallel ranks: --tp must be a multiple of --dcp",
        );
    }
    if let Some(divided) = undivided(model, tp) {
        return Err(ExplainError::Option {
            option: "--tp",
            value: tp.to_string(),
            why: format!("must divide the model's {divided} heads"),
        });
    }
    if let Some(mode) = graph_mode.filter(|m| *m != GraphMode::None) {
        if target.platform == "cpu" {
            return clash(
                format!("--graph-mode {mode}"),
                "--device cpu".into(),
                "a CPU has no graphs to capture",
            );
        }
        if x.compilation == Some(false) && mode.has_piecewise() {
            return clash(
                format!("--graph-mode {mode}"),
                "--compilation off".into(),
                "without compilation nothing is captured in pieces",
            );
        }
    }
    if let (Some(m), Some(kv)) = (x.memory, o.kv_cache_memory) {
        return clash(
            format!("--memory {m}"),
            format!("--kv-cache-memory {kv}"),
            "one is a device's memory, the other what of it the KV cache has; give one",
        );
    }
    let tokens = o.max_num_batched_tokens.zip(o.max_num_seqs);
    if let Some((tokens, seqs)) = tokens.filter(|(t, s)| !own && t < s) {
        return clash(
            format!("--max-num-batched-tokens {tokens}"),
            format!("--max-num-seqs {seqs}"),
            "each request needs a token in a step",
        );
    }
    Ok(())
}

/// A number of heads that the ranks don't divide.
fn undivided(model: &ModelNeeds, tp: usize) -> Option<usize> {
    let heads = model.mixers.iter().map(|l| match &l.mixer {
        MixerNeeds::Attention(a) => a.num_heads,
        MixerNeeds::Mla(m) => m.num_heads,
        MixerNeeds::State(d) => d.divided(),
    });
    heads.into_iter().find(|h| !h.is_multiple_of(tp))
}

/// Activations: as asked, or the config's; GPUs' kernels compute in half precision, so float32 weights become that.
fn dtype(asked: DTypeOption, config: Option<DType>, target: &Target, own: bool) -> DType {
    match (asked, config) {
        (DTypeOption::As(d), _) => d,
        (DTypeOption::Auto, Some(DType::F32)) if !own && target.platform != "cpu" => DType::F16,
        (DTypeOption::Auto, d) => d.unwrap_or(DType::BF16),
    }
}

fn kv_cache_dtype(
    o: &EngineOptions,
    model: &ModelNeeds,
    dtype: DType,
    contenders: &Contenders,
) -> Result<(KvCacheDType, DType), ExplainError> {
    // A checkpoint that brings scales for its cache wants that cache.
    let from_checkpoint = model.kv_cache_dtype.as_deref().filter(|_| o.kv_cache_dtype.is_none());
    let asked = o.kv_cache_dtype.as_deref().or(from_checkpoint).unwrap_or("auto").to_ascii_lowercase();
    let name = KvCacheDType::from(asked.clone());
    let element = match asked.as_str() {
        "fp8_ds_mla" => Some(DType::F8E4M3),
        _ => name.element(dtype),
    };
    if let Some(element) = element {
        return Ok((name, element));
    }
    let known = contenders.kv_cache_dtypes(&LayerNeed::default());
    if known.contains(&asked) {
        return Err(ExplainError::Option {
            option: "--kv-cache-dtype",
            value: asked,
            why: "headway doesn't know how many bytes a token takes in it; known: auto, float32, bfloat16, float16, \
                  fp8, fp8_e4m3, fp8_e5m2, fp8_ds_mla"
                .into(),
        });
    }
    Err(ExplainError::unknown("--kv-cache-dtype", &asked, &known))
}

/// The engine's defaults where nothing is asked.
fn limits_in_force(
    o: &EngineOptions,
    model: &ModelNeeds,
    own: bool,
    target: &Target,
) -> Result<Limits, ExplainError> {
    let usual = UsualLimits::of(target.platform);
    let most = model.max_model_len.or(o.max_model_len).unwrap_or(UNKNOWN_MODEL_LEN);
    if own {
        return Ok(Limits::resolve(o, most, usual)?);
    }
    let asked = EngineOptions {
        max_num_seqs: o.max_num_seqs.or(Some(VLLM_MAX_NUM_SEQS)),
        max_num_batched_tokens: o.max_num_batched_tokens.or(Some(VLLM_MAX_NUM_BATCHED_TOKENS)),
        // How many fit into its steps is its own rule.
        speculative_tokens: None,
        ..o.clone()
    };
    Ok(Limits::resolve(&asked, most, usual)?)
}

/// Bytes of the KV cache of a rank, and where the number comes from.
fn kv_memory(x: &ExplainOptions, target: &Target, weights: Option<u64>) -> (u64, String) {
    if let Some(bytes) = x.engine.kv_cache_memory {
        return (bytes, "as asked".into());
    }
    let ranks = x.engine.tensor_parallel.unwrap_or(1) as u64;
    let weights_of_rank = weights.unwrap_or(0) / ranks;
    let less = if weights.is_some() { "less the weights" } else { "with nothing taken off for weights" };
    match x.memory.or(target.memory) {
        Some(all) => {
            let usable = (all as f64 * MEMORY_SHARE) as u64;
            (
                usable.saturating_sub(weights_of_rank),
                format!("{:.0}% of the device's memory, {less}", MEMORY_SHARE * 100.0),
            )
        }
        None if target.platform == "cpu" => {
            let bytes = limits::default_kv_memory(memory::available_bytes(), weights.unwrap_or(0));
            (bytes, "two fifths of what this machine has free".into())
        }
        None => (
            0,
            "the device's name doesn't say how much memory it has; give --memory or --kv-cache-memory".into(),
        ),
    }
}
