//! Lifetime: the model. Attention groups: inside a KV cache group, the layers of one backend, one
//! spec and one number of query heads share their metadata.

use super::{CacheLimits, CacheTensor, KvCacheGroup, LayerCache, group_info, select_kernel_block_size};
use crate::{
    AttentionError, AttnLayer, DynBackend, GroupInfo, KvCacheSpec, Result, RuleBook,
    group::kv::layout::KvCacheLayout,
};
use std::sync::Arc;

/// What an [`crate::AttentionGroup`] is made of.
#[derive(Clone)]
pub struct AttentionGroupPlan {
    /// KV cache group whose block tables the layers use.
    pub kv_cache_group: usize,
    /// The layers' backend.
    pub backend: Arc<dyn DynBackend>,
    /// Layers, spec, limits.
    pub info: GroupInfo,
    /// An earlier attention group whose metadata this one reuses with its own block table.
    pub shares_with: Option<usize>,
}

/// The kernel block size of each KV cache group: one that all of its backends take.
///
/// # Errors
/// No common size; a group whose blocks can't be cut although its kernels need smaller ones.
pub fn kernel_block_sizes(
    groups: &[KvCacheGroup],
    tensors: &[CacheTensor],
    layers: &[LayerCache],
) -> Result<Vec<usize>> {
    groups.iter().enumerate().map(|(i, g)| kernel_block_size(i, g, tensors, layers)).collect()
}

fn kernel_block_size(
    index: usize,
    group: &KvCacheGroup,
    tensors: &[CacheTensor],
    layers: &[LayerCache],
) -> Result<usize> {
    if matches!(group.spec, KvCacheSpec::Mamba(_) | KvCacheSpec::EncoderOnly(_)) {
        return Ok(group.block_size);
    }
    let mut rules: Vec<&RuleBook> = vec![];
    for l in &group.layers {
        let r = layer(layers, *l)?.backend.rules();
        if !rules.iter().any(|x| x.name == r.name) {
            rules.push(r);
        }
    }
    let size = select_kernel_block_size(group.block_size, &rules)?;
    let mut own = tensors.iter().filter(|t| t.group == index);
    if size != group.block_size && own.any(|t| !t.is_dense()) {
        return Err(AttentionError::KvCache(format!(
            "the KV cache does not store blocks of {} tokens as dense, unpadded pages, so they cannot be split \
             into kernel blocks of {size} tokens; reduce --block-size to {size} or set --kv-layout to a \
             layer-compact layout (e.g. LBNHC)",
            group.block_size
        )));
    }
    Ok(size)
}

fn layer(layers: &[LayerCache], l: AttnLayer) -> Result<&LayerCache> {
    layers
        .get(l.0 as usize)
        .ok_or_else(|| AttentionError::KvCache(format!("attention layer {} is not of this model", l.0)))
}

/// The attention groups of all KV cache groups, in order, and which of them share.
///
/// # Errors
/// A layer that isn't of this model.
pub fn attention_groups(
    groups: &[KvCacheGroup],
    kernel_blocks: &[usize],
    layers: &[LayerCache],
    limits: &CacheLimits,
    layout: KvCacheLayout,
) -> Result<Vec<AttentionGroupPlan>> {
    let mut out: Vec<AttentionGroupPlan> = vec![];
    for (index, (group, &kernel_block)) in groups.iter().zip(kernel_blocks).enumerate() {
        let first = out.len();
        for (at, l) in group.layers.iter().enumerate() {
            let (layer, spec) = (layer(layers, *l)?, group.spec_of(at));
            let same = |g: &&mut AttentionGroupPlan| {
                g.backend.rules().name == layer.backend.rules().name
                    && g.info.spec == *spec
                    && g.info.num_heads == layer.num_heads
            };
            if let Some(g) = out[first..].iter_mut().find(same) {
                g.info.layers.push(*l);
                continue;
            }
            let info = group_info(spec, layer.num_heads, kernel_block, limits, layout);
            out.push(AttentionGroupPlan {
                kv_cache_group: index,
                backend: layer.backend.clone(),
                info: GroupInfo { layers: vec![*l], ..info },
                shares_with: None,
            });
        }
    }
    for i in 1..out.len() {
        out[i].shares_with = shares_with(&out[..i], &out[i]);
    }
    Ok(out)
}

/// The first earlier group whose metadata differs from this one's only in the block table: the same
/// spec, backend (so the same builder and configuration), query heads and kernel block size, in
/// another KV cache group.
fn shares_with(earlier: &[AttentionGroupPlan], group: &AttentionGroupPlan) -> Option<usize> {
    if !group.backend.updates_block_table() {
        return None;
    }
    earlier.iter().position(|g| {
        g.shares_with.is_none()
            && g.kv_cache_group != group.kv_cache_group
            && g.backend.rules().name == group.backend.rules().name
            && g.info.spec == group.info.spec
            && g.info.num_heads == group.info.num_heads
            && g.info.kernel_block_size == group.info.kernel_block_size
    })
}
