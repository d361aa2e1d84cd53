//! What each attention layer needs, which backend it gets, and what its cache holds.

use super::StartupError;
use crate::{
    loading::{ModelFiles, ModelKind},
    models::plan::AttentionPlan,
    options::{DTypeOption, EngineOptions},
};
use headway_attention::{
    KindTag, KvCacheSpec, LayerNeed, Registry,
    group::kv::{layout::KvCacheLayout, spec::AttentionSpec},
    process::{
        rules::{KvCacheDType, RuleBook},
        select::{BackendRequest, Selection, select},
    },
};
use headway_tensor::{DType, WeightType};

/// Activations on the CPU.
pub const ACTIVATIONS: DType = DType::F32;
/// Tokens in a block where neither the user nor a backend says.
const DEFAULT_BLOCK_SIZE: usize = 16;
/// Tokens in a block, at most.
const LARGEST_BLOCK: usize = 1 << 20;

/// The cache's element type: as asked, or the model's; float16 for block-quantised files, whose
/// weights have no element type.
pub fn kv_cache_dtype(files: &ModelFiles, options: &EngineOptions) -> Result<DType, StartupError> {
    let model = match options.dtype {
        DTypeOption::As(d) => d,
        DTypeOption::Auto => model_dtype(files),
    };
    let asked = options.kv_cache_dtype.as_deref().unwrap_or("auto");
    KvCacheDType(asked.to_owned().into()).element(model).ok_or_else(|| StartupError::Option {
        option: "--kv-cache-dtype",
        value: asked.into(),
        why: "unknown; there are: auto, float32, bfloat16, float16, fp8, fp8_e4m3, fp8_e5m2".into(),
    })
}

/// The dtype that most of the file's weights have.
pub fn model_dtype(files: &ModelFiles) -> DType {
    if let ModelKind::Gguf(g) = &files.kind {
        let quantised = g.tensors().any(|t| matches!(t.dtype, WeightType::Quant(_)));
        if quantised {
            return DType::F16;
        }
    }
    match files.checkpoint.main_dtype() {
        Some(WeightType::F32) => DType::F32,
        Some(WeightType::BF16) => DType::BF16,
        _ => DType::F16,
    }
}

/// A layer's needs under these options.
fn need(a: &AttentionPlan, options: &EngineOptions, kv_dtype: DType) -> LayerNeed {
    let kv_name = match kv_dtype {
        DType::F8E4M3 => "fp8_e4m3",
        DType::F8E5M2 => "fp8_e5m2",
        other => other.name(),
    };
    LayerNeed {
        kind: KindTag::Standard,
        head_size: a.head_size,
        head_size_v: a.head_size,
        num_heads: a.num_heads,
        num_kv_heads: a.num_kv_heads,
        dtype: ACTIVATIONS,
        kv_cache_dtype: Some(KvCacheDType(kv_name.into())),
        block_size: options.block_size,
        sliding_window: a.sliding_window,
        has_logit_soft_cap: a.logit_soft_cap.is_some(),
        use_batch_invariant: options.batch_invariant,
        ..LayerNeed::default()
    }
}

/// A backend for each layer, with the refusals. Equal needs are asked once.
pub fn select_backends(
    registry: &Registry,
    layers: &[&AttentionPlan],
    options: &EngineOptions,
    kv_dtype: DType,
) -> Result<Vec<Selection>, StartupError> {
    let request = BackendRequest {
        backend: options.attention_backend.clone(),
        per_kind: options.backend_per_kind.clone(),
    };
    let mut asked: Vec<(LayerNeed, Selection)> = vec![];
    layers
        .iter()
        .enumerate()
        .map(|(i, a)| {
            let need = need(a, options, kv_dtype);
            if let Some((_, s)) = asked.iter().find(|(n, _)| *n == need) {
                return Ok(s.clone());
            }
            let layer = format!("attention layer {i}");
            let s = select(registry, &layer, &need, &request)
                .map_err(|e| blame_block_size(registry, &layer, &need, &request).unwrap_or(e.into()))?;
            asked.push((need, s.clone()));
            Ok(s)
        })
        .collect()
}

/// The error to show where it is the block size alone that no backend takes.
fn blame_block_size(
    registry: &Registry,
    layer: &str,
    need: &LayerNeed,
    request: &BackendRequest,
) -> Option<StartupError> {
    let asked = need.block_size?;
    let without = LayerNeed { block_size: None, ..need.clone() };
    let would_do = select(registry, layer, &without, request).ok()?;
    Some(block_size_error(asked, std::iter::once(would_do.backend.rules())))
}

fn block_size_error<'a>(asked: usize, rules: impl Iterator<Item = &'a RuleBook> + Clone) -> StartupError {
    StartupError::Option {
        option: "--block-size",
        value: asked.to_string(),
        why: format!("{} takes {}; give such a number, or leave it out", names(rules.clone()), sizes(rules)),
    }
}

/// The manager's block size: as asked (selection has checked it), or what the backends prefer.
pub fn block_size(selections: &[Selection], options: &EngineOptions) -> Result<usize, StartupError> {
    let rules = || selections.iter().map(|s| s.backend.rules());
    match options.block_size {
        Some(b) if b == 0 || b > LARGEST_BLOCK || !rules().all(|r| r.supports_block_size(b)) => {
            Err(block_size_error(b, rules()))
        }
        Some(b) => Ok(b),
        None => Ok(rules().filter_map(|r| r.preferred_block_size).max().unwrap_or(DEFAULT_BLOCK_SIZE)),
    }
}

fn names<'a>(rules: impl Iterator<Item = &'a RuleBook>) -> String {
    let mut names: Vec<_> = rules.map(|r| r.name.to_string()).collect();
    names.dedup();
    names.join(", ")
}

fn sizes<'a>(rules: impl Iterator<Item = &'a RuleBook>) -> String {
    use headway_attention::process::rules::KernelBlockSize::{Exact, MultipleOf};
    let mut sizes: Vec<usize> = rules
        .flat_map(|r| {
            r.kernel_block_sizes.iter().map(|k| match *k {
                Exact(n) | MultipleOf(n) => n,
            })
        })
        .collect();
    sizes.sort_unstable();
    sizes.dedup();
    let least = sizes.clone();
    sizes.retain(|n| !least.iter().any(|m| m < n && n.is_multiple_of(*m)));
    let sizes: Vec<_> = sizes.iter().map(ToString::to_string).collect();
    format!("multiples of {} up to {LARGEST_BLOCK}", sizes.join(" or "))
}

/// What a layer's cache holds.
pub fn cache_spec(a: &AttentionPlan, block_size: usize, kv_dtype: DType) -> KvCacheSpec {
    let attention = AttentionSpec::new(block_size, a.num_kv_heads, a.head_size, kv_dtype);
    match a.sliding_window {
        Some(sliding_window) => KvCacheSpec::SlidingWindow { attention, sliding_window },
        None => KvCacheSpec::Full(attention),
    }
}

/// `--kv-layout` by name.
pub fn layout(options: &EngineOptions) -> Result<Option<KvCacheLayout>, StartupError> {
    use KvCacheLayout::{BHLNC, BLHNC, BLNHC, LBHNC, LBNHC, LHBNC};
    let Some(asked) = options.kv_layout.as_deref() else { return Ok(None) };
    let name = match asked.to_ascii_uppercase().as_str() {
        "NHD" => "LBNHC".to_owned(),
        "HND" => "LBHNC".to_owned(),
        other => other.to_owned(),
    };
    [LBNHC, LBHNC, BLNHC, BLHNC, BHLNC, LHBNC].into_iter().find(|l| l.name() == name).map(Some).ok_or_else(
        || StartupError::Option {
            option: "--kv-layout",
            value: asked.into(),
            why: "unknown; there are: NHD, HND, LBNHC, LBHNC, BLNHC, BLHNC, BHLNC, LHBNC".into(),
        },
    )
}
