//! Lifetime: the model. Start-up's plan of the KV cache: from each layer's spec and backend to KV
//! cache groups, attention groups, kernel block sizes, one layout, and where every page lies.
//! [`plan_kv_cache`] does it all; no device is needed.

pub mod attention_groups;
pub mod cache_groups;
pub mod kernel_block;
mod packed;
pub mod place;

pub use attention_groups::{AttentionGroupPlan, CacheGroupLayers, GroupLayer, group_layers};
pub use cache_groups::{KvCacheGroup, kv_cache_groups};
pub use kernel_block::select_kernel_block_size;
pub use place::{CacheTensor, place};

use crate::{
    AttentionError, AttnLayer, DynBackend, GroupInfo, KvCacheSpec, KvHandle, Result,
    group::{
        builder::ContextParallel,
        kv::layout::{KvCacheLayout, resolve_layout},
    },
    process::rules::LatentDims,
};
use std::{collections::BTreeMap, sync::Arc};

/// One attention layer as start-up sees it. The layers of a model are numbered 0, 1, …
#[derive(Clone)]
pub struct LayerCache {
    /// Which layer.
    pub layer: AttnLayer,
    /// What its cache holds.
    pub spec: KvCacheSpec,
    /// The backend that selection chose.
    pub backend: Arc<dyn DynBackend>,
    /// Query heads on this rank.
    pub num_heads: usize,
    /// Its latent dimensions, where it is latent attention.
    pub latent: Option<LatentDims>,
    /// An earlier layer whose cache this one reads instead of having its own.
    pub shares_cache_of: Option<AttnLayer>,
}

/// Limits of a step, and options that bear on the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheLimits {
    /// Most requests in a step.
    pub max_num_reqs: usize,
    /// Most new tokens in a step.
    pub max_num_tokens: usize,
    /// Most tokens of a request.
    pub max_model_len: usize,
    /// Tokens drafted beyond the one that a decode step yields.
    pub num_speculative_tokens: usize,
    /// `--batch-invariant`.
    pub batch_invariant: bool,
    /// `--kv-layout`.
    pub kv_cache_layout: Option<KvCacheLayout>,
    /// Whether windows may drop tokens; without, every layer keeps all.
    pub hybrid: bool,
    /// Ranks that share a request's tokens.
    pub context_parallel: ContextParallel,
    /// From this layer on, all of which share caches, only tokens whose logits are wanted are computed.
    pub fast_prefill_from: Option<AttnLayer>,
}

impl CacheLimits {
    /// The limits of a step, with no option set.
    pub fn new(max_num_reqs: usize, max_num_tokens: usize, max_model_len: usize) -> Self {
        Self {
            max_num_reqs,
            max_num_tokens,
            max_model_len,
            num_speculative_tokens: 0,
            batch_invariant: false,
            kv_cache_layout: None,
            hybrid: true,
            context_parallel: ContextParallel::default(),
            fast_prefill_from: None,
        }
    }
}

/// The plan of a model's KV cache.
#[derive(Clone)]
pub struct KvCachePlan {
    /// Layers by block table.
    pub kv_cache_groups: Vec<KvCacheGroup>,
    /// Layers by metadata.
    pub attention_groups: Vec<AttentionGroupPlan>,
    /// The attention group of each layer.
    pub group_of_layer: Arc<[u16]>,
    /// Blocks of the pool, as the manager counts them, the null block 0 among them.
    pub num_blocks: usize,
    /// Where each layer's cache lies, indexed by [`AttnLayer`]; all in buffer 0.
    pub handles: Vec<KvHandle>,
    /// Bytes of the one allocation.
    pub total_bytes: usize,
    /// The layout in force.
    pub layout: KvCacheLayout,
    /// What the plan costs and the user should know.
    pub warnings: Vec<String>,
}

/// Plans the KV cache of a model in `memory_bytes` bytes.
///
/// # Errors
/// Layers that aren't numbered 0, 1, …; backends without a common layout or kernel block size; page
/// sizes that can't be made to fit; memory for fewer than two blocks.
pub fn plan_kv_cache(
    layers: &[LayerCache],
    limits: &CacheLimits,
    memory_bytes: usize,
) -> Result<KvCachePlan> {
    if layers.iter().enumerate().any(|(i, l)| l.layer.0 as usize != i) {
        return Err(AttentionError::KvCache("attention layers must be numbered 0, 1, … in order".into()));
    }
    check_fast_prefill(layers, limits)?;
    let lists: Vec<&[KvCacheLayout]> =
        layers.iter().map(|l| l.backend.rules().kv_cache_layouts.as_slice()).collect();
    let layout = resolve_layout(&lists, limits.kv_cache_layout)?;
    let mut warnings = vec![];
    let owning: Vec<(AttnLayer, KvCacheSpec)> = layers
        .iter()
        .filter(|l| l.shares_cache_of.is_none() && has_cache(&l.spec))
        .map(|l| (l.layer, l.backend.customize_spec(l.spec.clone())))
        .collect();
    let mut groups = kv_cache_groups(&owning, layout, limits.hybrid, &mut warnings)?;
    let num_blocks = num_blocks(&groups, memory_bytes)?;
    let tensors = place(&groups, layout, num_blocks)?;
    add_sharing_layers(&mut groups, layers)?;
    add_cacheless_layers(&mut groups, layers);
    let attention_groups = attention_groups_of(&groups, &tensors, layers, limits, layout)?;
    let mut group_of_layer = vec![0u16; layers.len()];
    for (i, g) in attention_groups.iter().enumerate() {
        for l in &g.info.layers {
            group_of_layer[l.0 as usize] = u16::try_from(i)
                .map_err(|_| AttentionError::KvCache(format!("more than {} attention groups", u16::MAX)))?;
        }
    }
    let kernel_block =
        |l: &LayerCache| attention_groups[group_of_layer[l.layer.0 as usize] as usize].info.kernel_block_size;
    let handles = layers.iter().map(|l| handle(&tensors, kernel_block(l), l, layout, num_blocks)).collect();
    Ok(KvCachePlan {
        attention_groups,
        group_of_layer: group_of_layer.into(),
        num_blocks,
        handles,
        total_bytes: tensors.first().map_or(0, |t| t.size),
        layout,
        warnings,
        kv_cache_groups: groups,
    })
}

/// Tokens that a layer skips would be missing in a cache of its own.
fn check_fast_prefill(layers: &[LayerCache], limits: &CacheLimits) -> Result<()> {
    let Some(from) = limits.fast_prefill_from else { return Ok(()) };
    match layers.iter().find(|l| l.layer >= from && l.shares_cache_of.is_none()) {
        None => Ok(()),
        Some(l) => Err(AttentionError::KvCache(format!(
            "fast prefill from layer {} on, but layer {} has a cache of its own, which would lack the tokens that it \
             skips; begin after it",
            from.0, l.layer.0
        ))),
    }
}

fn has_cache(spec: &KvCacheSpec) -> bool {
    !matches!(spec, KvCacheSpec::EncoderOnly(_))
}

/// Blocks that fit: the null block and at least one more.
fn num_blocks(groups: &[KvCacheGroup], memory_bytes: usize) -> Result<usize> {
    let per_block = place::bytes_per_block(groups);
    if per_block == 0 {
        return Ok(1);
    }
    match memory_bytes / per_block {
        0 | 1 => {
            let states =
                groups.iter().all(|g| !has_cache(&g.spec) || matches!(g.spec, KvCacheSpec::Mamba(_)));
            let lower = if states { ": a block holds a request's states" } else { " or lower --block-size" };
            Err(AttentionError::KvCache(format!(
                "{memory_bytes} bytes of KV cache hold fewer than two blocks of {per_block} bytes (one is the null \
                 block); raise --kv-cache-memory{lower}"
            )))
        }
        n if n > i32::MAX as usize => Ok(i32::MAX as usize),
        n => Ok(n),
    }
}

/// A layer that reads another's cache joins that layer's group.
fn add_sharing_layers(groups: &mut [KvCacheGroup], layers: &[LayerCache]) -> Result<()> {
    for l in layers {
        let Some(owner) = l.shares_cache_of else { continue };
        let group = groups.iter_mut().find(|g| g.layers.contains(&owner) && owner != l.layer);
        let group = group.ok_or_else(|| {
            AttentionError::KvCache(format!(
                "attention layer {} shares the cache of layer {}, which has none of its own",
                l.layer.0, owner.0
            ))
        })?;
        if !group.layer_specs.is_empty() {
            let at = group.layers.iter().position(|x| *x == owner).unwrap_or(0);
            group.layer_specs.push(group.layer_specs[at].clone());
        }
        group.layers.push(l.layer);
    }
    Ok(())
}

/// Layers without a cache form groups of their own, at the end.
fn add_cacheless_layers(groups: &mut Vec<KvCacheGroup>, layers: &[LayerCache]) {
    let mut specs: BTreeMap<usize, KvCacheGroup> = BTreeMap::new();
    for l in layers.iter().filter(|l| !has_cache(&l.spec) && l.shares_cache_of.is_none()) {
        let key = specs.values().position(|g| g.spec == l.spec).unwrap_or(specs.len());
        let group = specs.entry(key).or_insert_with(|| KvCacheGroup {
            layers: vec![],
            spec: l.spec.clone(),
            layer_specs: vec![],
            block_size: l.spec.block_size(),
            page_size_bytes: 0,
        });
        group.layers.push(l.layer);
    }
    groups.extend(specs.into_values());
}

fn handle(
    tensors: &[CacheTensor],
    kernel_block: usize,
    l: &LayerCache,
    layout: KvCacheLayout,
    num_blocks: usize,
) -> KvHandle {
    let cached = l.shares_cache_of.unwrap_or(l.layer);
    let place = tensors.iter().find_map(|t| t.layers.iter().position(|x| *x == cached).map(|at| (t, at)));
    let Some((t, at)) = place else {
        return KvHandle {
            buf: 0,
            offset: 0,
            block_stride: 0,
            page_bytes: 0,
            num_blocks: 0,
            block_size: l.spec.block_size(),
            dtype: l.spec.dtype(),
            layout,
            shared: false,
        };
    };
    let factor = (t.spec.block_size() / kernel_block.max(1)).max(1);
    KvHandle {
        buf: 0,
        offset: t.offset + at * t.layer_stride,
        block_stride: t.block_stride / factor,
        page_bytes: t.spec.unpadded_page_size_bytes() / factor,
        num_blocks: num_blocks * factor,
        block_size: kernel_block,
        dtype: t.spec.dtype(),
        layout,
        shared: l.shares_cache_of.is_some(),
    }
}

/// The attention groups of all KV cache groups, in order, and which of them share.
fn attention_groups_of(
    groups: &[KvCacheGroup],
    tensors: &[CacheTensor],
    layers: &[LayerCache],
    limits: &CacheLimits,
    layout: KvCacheLayout,
) -> Result<Vec<AttentionGroupPlan>> {
    let divided: Vec<_> = groups
        .iter()
        .map(|g| CacheGroupLayers {
            block_size: g.block_size,
            pages_between: false,
            layers: g
                .layers
                .iter()
                .enumerate()
                .map(|(at, l)| GroupLayer {
                    id: *l,
                    rules: layers[l.0 as usize].backend.rules(),
                    spec: g.spec_of(at).clone(),
                    num_heads: Some(layers[l.0 as usize].num_heads),
                    latent: layers[l.0 as usize].latent,
                    fast_prefill: limits.fast_prefill_from.is_some_and(|from| *l >= from),
                })
                .collect(),
        })
        .collect();
    let mut out: Vec<AttentionGroupPlan> = vec![];
    for (index, g) in group_layers(&divided, limits.batch_invariant)?.into_iter().enumerate() {
        for part in g.groups {
            let dense = tensors.iter().filter(|t| t.group == index).all(CacheTensor::is_dense);
            if part.kernel_block_size != groups[index].block_size && !dense {
                return Err(cannot_split(groups[index].block_size, part.kernel_block_size));
            }
            let heads = part.num_heads.unwrap_or(0);
            let info = group_info(&part.spec, heads, part.kernel_block_size, limits, layout);
            out.push(AttentionGroupPlan {
                kv_cache_group: index,
                backend: layers[part.layers[0].0 as usize].backend.clone(),
                info: GroupInfo {
                    layers: part.layers,
                    latent: part.latent,
                    fast_prefill: part.fast_prefill,
                    ..info
                },
                shares_with: None,
            });
        }
    }
    attention_groups::share(&mut out);
    Ok(out)
}

fn cannot_split(block_size: usize, kernel: usize) -> AttentionError {
    AttentionError::KvCache(format!(
        "the KV cache does not store blocks of {block_size} tokens as dense, unpadded pages, so they cannot be split \
         into kernel blocks of {kernel} tokens; reduce --block-size to {kernel} or set --kv-layout to a \
         layer-compact layout (e.g. LBNHC)"
    ))
}

/// The info of a group without layers yet.
fn group_info(
    spec: &KvCacheSpec,
    num_heads: usize,
    kernel_block_size: usize,
    limits: &CacheLimits,
    layout: KvCacheLayout,
) -> GroupInfo {
    GroupInfo {
        layout,
        kernel_block_size,
        max_num_reqs: limits.max_num_reqs,
        max_num_tokens: limits.max_num_tokens,
        max_model_len: limits.max_model_len,
        num_speculative_tokens: limits.num_speculative_tokens,
        batch_invariant: limits.batch_invariant,
        context_parallel: limits.context_parallel,
        ..GroupInfo::new(spec.clone(), num_heads)
    }
}
