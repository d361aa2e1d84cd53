//! Dtypes that the files and options decide, and a backend for each layer.

use super::{StartupError, block_size::block_size_error, decide::Setting, facts::Facts, place::Place};
use crate::{
    loading::{ModelFiles, ModelKind},
    options::{DTypeOption, EngineOptions},
    tuning::Tuned,
};
use headway_attention::{
    LayerNeed, Registry,
    process::rules::KindTag,
    process::{
        rules::KvCacheDType,
        select::{BackendRequest, Selection, select},
    },
};
use headway_tensor::{DType, WeightType};

/// The cache's element type: as asked, or the model's; float16 for block-quantised files, whose
/// weights have no element type.
pub fn kv_cache_dtype(weights: DType, options: &EngineOptions) -> Result<DType, StartupError> {
    let model = match options.dtype {
        DTypeOption::As(d) => d,
        DTypeOption::Auto => weights,
    };
    let asked = options.kv_cache_dtype.as_deref().unwrap_or("auto");
    KvCacheDType(asked.to_owned().into()).element(model).ok_or_else(|| StartupError::Option {
        option: "--kv-cache-dtype",
        value: asked.into(),
        why: "unknown; there are: auto, float32, bfloat16, float16, fp8, fp8_e4m3, fp8_e5m2".into(),
    })
}

/// Activations, and the cache's element type, on this device.
///
/// # Errors
/// Types that can't be.
pub fn dtypes(facts: &Facts, options: &EngineOptions, place: &Place) -> Result<(DType, DType), StartupError> {
    let activations = place.activations(facts, options)?;
    let model = if place.is_host() { facts.dtype } else { activations };
    Ok((activations, kv_cache_dtype(model, options)?))
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

/// The setting that these options make on this device.
pub fn setting(options: &EngineOptions, place: &Place, activations: DType, kv_dtype: DType) -> Setting {
    Setting {
        platform: place.platform,
        capability: place.capability,
        block_size: options.block_size,
        batch_invariant: options.batch_invariant,
        speculative_tokens: options.speculative_tokens.unwrap_or(0),
        ..Setting::cpu(activations, KvCacheDType(kv_name(kv_dtype).into()), kv_dtype)
    }
}

/// An element type as `--kv-cache-dtype` names it.
pub fn kv_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F8E4M3 => "fp8_e4m3",
        DType::F8E5M2 => "fp8_e5m2",
        other => other.name(),
    }
}

/// A backend for each layer, with the refusals. Equal needs are asked once.
pub fn select_backends(
    registry: &Registry,
    needs: &[LayerNeed],
    options: &EngineOptions,
    tuned: Option<&Tuned>,
) -> Result<Vec<Selection>, StartupError> {
    let as_asked = BackendRequest {
        backend: options.attention_backend.clone(),
        per_kind: options.backend_per_kind.clone(),
    };
    // A pair that could never apply is a mistake, whether or not the model has such layers.
    for (kind, name) in &options.backend_per_kind {
        let backend = registry.get(name)?;
        let rules = backend.rules();
        if LayerNeed::tag_of_kind(kind).is_some_and(|tag| tag != rules.kind) {
            return Err(StartupError::Option {
                option: "--backend-per-kind",
                value: format!("{kind}={name}"),
                why: format!("{} is a backend for {}", rules.name, rules.kind.name()),
            });
        }
    }
    if let Some(name) = options.attention_backend.as_ref().filter(|_| tuned.is_none()) {
        refuse_unused(registry, name, needs)?;
    }
    let mut asked: Vec<(&LayerNeed, Selection)> = vec![];
    needs
        .iter()
        .enumerate()
        .map(|(i, need)| {
            if let Some((_, s)) = asked.iter().find(|(n, _)| *n == need) {
                return Ok(s.clone());
            }
            let layer = format!("attention layer {i}");
            let measured = tuned.map(|t| t.request(need, options));
            let request = measured.as_ref().unwrap_or(&as_asked);
            let s = select(registry, &layer, need, request).map_err(|e| match tuned {
                // Of what the user asked for, the user's option is named; of the rest, the profile.
                Some(t) if options.block_size.is_none() && options.backend_per_kind.is_empty() => {
                    t.unusable(e).into()
                }
                _ => blame_block_size(registry, &layer, need, request).unwrap_or(e.into()),
            })?;
            asked.push((need, s.clone()));
            Ok(s)
        })
        .collect()
}

/// A backend that is asked for every layer that attends, of a model without such layers.
///
/// # Errors
/// An unknown name; a backend that no layer was asked to take and that isn't for states, which choose their own.
fn refuse_unused(registry: &Registry, name: &str, needs: &[LayerNeed]) -> Result<(), StartupError> {
    let backend = registry.get(name)?;
    let rules = backend.rules();
    let states = !needs.is_empty() && needs.iter().all(|n| n.kind == KindTag::StateSpace);
    match states && rules.kind != KindTag::StateSpace {
        true => Err(StartupError::Option {
            option: "--attention-backend",
            value: name.to_owned(),
            why: format!(
                "{} is a backend for {}, and every layer of this model keeps a state; leave the option out",
                rules.name,
                rules.kind.name()
            ),
        }),
        false => Ok(()),
    }
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
