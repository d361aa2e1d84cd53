//! Lifetime: the model. KV cache groups: layers that share a block table. A block is the same number
//! of bytes for every group, so that one pool of blocks serves them all.

use crate::{
    AttentionError, AttnLayer, KvCacheSpec, Result,
    group::kv::{layout::KvCacheLayout, merge},
};
use std::collections::BTreeSet;

/// Layers that share a block table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvCacheGroup {
    /// The layers, in the model's order.
    pub layers: Vec<AttnLayer>,
    /// The layers' spec; the first one's where they differ.
    pub spec: KvCacheSpec,
    /// Each layer's spec, where page sizes differ inside the group; else empty.
    pub layer_specs: Vec<KvCacheSpec>,
    /// Tokens in a block.
    pub block_size: usize,
    /// Bytes of a page of one layer; of all layers' pages where they differ.
    pub page_size_bytes: usize,
}

type Layers = [(AttnLayer, KvCacheSpec)];

impl KvCacheGroup {
    fn same(layers: &Layers) -> Option<Self> {
        let spec = merge::merge(&layers.iter().map(|(_, s)| s).collect::<Vec<_>>())?;
        Some(Self {
            layers: layers.iter().map(|(l, _)| *l).collect(),
            layer_specs: vec![],
            block_size: spec.block_size(),
            page_size_bytes: spec.page_size_bytes(),
            spec,
        })
    }

    pub(super) fn uniform(layers: &Layers) -> Option<Self> {
        let specs: Vec<_> = layers.iter().map(|(_, s)| s).collect();
        if !merge::is_uniform_type(&specs) {
            return None;
        }
        Some(Self {
            layers: layers.iter().map(|(l, _)| *l).collect(),
            layer_specs: layers.iter().map(|(_, s)| s.clone()).collect(),
            block_size: specs[0].block_size(),
            page_size_bytes: specs.iter().map(|s| s.page_size_bytes()).sum(),
            spec: specs[0].clone(),
        })
    }

    /// The spec of the group's layer at `index`.
    pub fn spec_of(&self, index: usize) -> &KvCacheSpec {
        self.layer_specs.get(index).unwrap_or(&self.spec)
    }

    /// Bytes that a block holds for this group: the pages of all its layers.
    pub fn bytes_per_block(&self) -> usize {
        (0..self.layers.len()).map(|i| self.spec_of(i).page_size_bytes()).sum()
    }
}

/// Puts layers into KV cache groups. `layout` decides whether pages of different sizes can lie in one
/// block; without `hybrid` all layers keep all their tokens. Warnings are added to `warnings`.
///
/// # Errors
/// Page sizes that can't be made equal, or that the layout can't express.
pub fn kv_cache_groups(
    layers: &Layers,
    layout: KvCacheLayout,
    hybrid: bool,
    warnings: &mut Vec<String>,
) -> Result<Vec<KvCacheGroup>> {
    if layers.is_empty() {
        return Ok(vec![]);
    }
    let one = |l: &Layers| KvCacheGroup::same(l).or_else(|| KvCacheGroup::uniform(l));
    if let Some(group) = one(layers) {
        return Ok(vec![group]);
    }
    if !hybrid {
        warnings.push(HYBRID_DISABLED.into());
        return one(&promoted(layers)?)
            .map(|g| vec![g])
            .ok_or_else(|| AttentionError::KvCache("the layers' caches can't become one type".into()));
    }
    if layout.is_block_outermost() && page_sizes(layers).len() > 1 {
        return super::packed::packed_groups(layers);
    }
    match unify_page_sizes(layers) {
        Ok(unified) => Ok(equal_groups(&unified, warnings)),
        Err(e) => match full_allocation_fallback(layers) {
            Some(group) => {
                warnings.push(
                    "KV cache page sizes cannot be unified; treating sliding-window layers as full attention \
                     for cache allocation. Sliding-window attention compute is unchanged."
                        .into(),
                );
                Ok(vec![group])
            }
            None => Err(e),
        },
    }
}

const HYBRID_DISABLED: &str = "Hybrid KV cache manager is disabled for this hybrid model, This means we do \
     not enable any optimizations for saving KV cache memory (e.g., dropping the KV cache outside the sliding \
     window). The compute of layers like sliding window is still saved.";

fn page_sizes(layers: &Layers) -> BTreeSet<usize> {
    layers.iter().map(|(_, s)| s.page_size_bytes()).collect()
}

fn promoted(layers: &Layers) -> Result<Vec<(AttnLayer, KvCacheSpec)>> {
    let specs: Vec<_> = layers.iter().map(|(_, s)| s.clone()).collect();
    Ok(layers.iter().map(|(l, _)| *l).zip(merge::promote_to_full(&specs)?).collect())
}

/// Latent layers beside a plain sliding window can't share pages; full attention for all can.
fn full_allocation_fallback(layers: &Layers) -> Option<KvCacheGroup> {
    let has = |f: fn(&KvCacheSpec) -> bool| layers.iter().any(|(_, s)| f(s));
    let blocked =
        has(|s| matches!(s, KvCacheSpec::SlidingWindowMla { .. } | KvCacheSpec::ChunkedLocal { .. }));
    let fits =
        has(|s| matches!(s, KvCacheSpec::Mla(_))) && has(|s| matches!(s, KvCacheSpec::SlidingWindow { .. }));
    if blocked || !fits {
        return None;
    }
    KvCacheGroup::uniform(&promoted(layers).ok()?)
}

/// Makes all pages as large as the largest: by larger blocks where the sizes divide, else by padding
/// (state-space layers, and attention layers whose pages may be read with a stride).
fn unify_page_sizes(layers: &Layers) -> Result<Vec<(AttnLayer, KvCacheSpec)>> {
    let largest = page_sizes(layers).last().copied().unwrap_or(0);
    let unify = |layer: AttnLayer, spec: &KvCacheSpec| {
        let page = spec.page_size_bytes();
        let latent = matches!(spec, KvCacheSpec::Mla(_));
        if page == largest {
            Ok(spec.clone())
        } else if matches!(spec, KvCacheSpec::Mamba(_)) {
            Ok(spec.clone().with_padded_page(largest))
        } else if page > 0 && largest.is_multiple_of(page) && !spec.is_padded() {
            Ok(spec.clone().with_block_size(spec.block_size() * (largest / page)))
        } else if !latent {
            Ok(spec.clone().with_padded_page(largest))
        } else {
            Err(AttentionError::KvCache(format!(
                "attention layer {}: page size is not divisible by the maximum page size and cannot be padded. \
                 Padding is only supported for non-MLA attention layers.",
                layer.0
            )))
        }
    };
    layers.iter().map(|(l, s)| Ok((*l, unify(*l, s)?))).collect()
}

/// Groups of equal numbers of layers: the number that the rarest kind has, or the commonest one's
/// where that is less than half as many again (padding a few layers is cheaper than twice the
/// groups). Layers are dealt out in turns, so that a pipeline stage has some of each group.
fn equal_groups(layers: &Layers, warnings: &mut Vec<String>) -> Vec<KvCacheGroup> {
    let mut buckets: Vec<Vec<(AttnLayer, KvCacheSpec)>> = vec![];
    for (spec, members) in by_spec(layers) {
        let home = buckets.iter_mut().find(|bucket| {
            let mut specs: Vec<&KvCacheSpec> = bucket.iter().map(|(_, s)| s).collect();
            specs.push(&spec);
            merge::merge(&specs).is_some()
        });
        match home {
            Some(bucket) => bucket.extend(members),
            None => buckets.push(members),
        }
    }
    let sizes = || buckets.iter().map(Vec::len);
    let (least, most) = (sizes().min().unwrap_or(1), sizes().max().unwrap_or(1));
    let size = if 2 * most < 3 * least { most } else { least };
    let mut groups = vec![];
    for bucket in &buckets {
        let missing = bucket.len().next_multiple_of(size) - bucket.len();
        if missing > 0 {
            warnings.push(format!(
                "Add {missing} padding layers, may waste at most {:.2}% KV cache memory",
                missing as f64 / bucket.len() as f64 * 100.0
            ));
        }
        let n = bucket.len().div_ceil(size);
        groups.extend((0..n).filter_map(|i| {
            KvCacheGroup::same(&bucket.iter().skip(i).step_by(n).cloned().collect::<Vec<_>>())
        }));
    }
    groups
}

fn by_spec(layers: &Layers) -> Vec<(KvCacheSpec, Vec<(AttnLayer, KvCacheSpec)>)> {
    let mut out: Vec<(KvCacheSpec, Vec<(AttnLayer, KvCacheSpec)>)> = vec![];
    for (layer, spec) in layers {
        match out.iter_mut().find(|(s, _)| s == spec) {
            Some((_, members)) => members.push((*layer, spec.clone())),
            None => out.push((spec.clone(), vec![(*layer, spec.clone())])),
        }
    }
    out
}
