//! Lifetime: the model. Where each layer's pages lie in the one backing allocation. All groups begin
//! at byte 0: a block belongs to one group at a time, so groups may overlay each other.

use super::cache_groups::KvCacheGroup;
use crate::{AttentionError, AttnLayer, KvCacheSpec, Result, group::kv::layout::KvCacheLayout};
use std::collections::BTreeSet;

/// Layers of one spec in the backing allocation: block b of layer l begins at `offset + l *
/// layer_stride + b * block_stride` bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CacheTensor {
    /// KV cache group.
    pub group: usize,
    /// The layers, in order of l.
    pub layers: Vec<AttnLayer>,
    /// Their spec.
    pub spec: KvCacheSpec,
    /// Bytes before block 0 of the first layer.
    pub offset: usize,
    /// Bytes from one layer to the next.
    pub layer_stride: usize,
    /// Bytes from one block to the next.
    pub block_stride: usize,
    /// Bytes of the whole allocation.
    pub size: usize,
}

impl CacheTensor {
    /// Whether one block is one unpadded page with the next block right behind it, so that it can be
    /// cut into smaller blocks.
    pub fn is_dense(&self) -> bool {
        self.block_stride == self.spec.unpadded_page_size_bytes()
    }
}

/// Bytes of the pool for one block: what the largest group holds of it.
pub fn bytes_per_block(groups: &[KvCacheGroup]) -> usize {
    groups.iter().map(KvCacheGroup::bytes_per_block).max().unwrap_or(0)
}

/// Places all layers of `num_blocks` blocks.
///
/// # Errors
/// Page sizes that the layout can't express.
pub fn place(groups: &[KvCacheGroup], layout: KvCacheLayout, num_blocks: usize) -> Result<Vec<CacheTensor>> {
    check_layout(groups, layout)?;
    let per_block = bytes_per_block(groups);
    let fixed = layout.is_block_outermost().then_some(per_block);
    let mut tensors = vec![];
    for (group, g) in groups.iter().enumerate() {
        let mut before = 0;
        for (spec, layers) in by_spec(g) {
            let page = spec.page_size_bytes();
            let [layer_stride, block_stride, ..] = layout.strides(&spec, layers.len(), num_blocks, fixed)?;
            let n = layers.len();
            tensors.push(CacheTensor {
                group,
                layers,
                offset: before * layer_stride.max(page) / page.max(1),
                layer_stride,
                block_stride,
                size: per_block * num_blocks,
                spec,
            });
            before += n * page;
        }
    }
    Ok(tensors)
}

fn by_spec(group: &KvCacheGroup) -> Vec<(KvCacheSpec, Vec<AttnLayer>)> {
    let mut out: Vec<(KvCacheSpec, Vec<AttnLayer>)> = vec![];
    for (i, layer) in group.layers.iter().enumerate() {
        let spec = group.spec_of(i);
        match out.iter_mut().find(|(s, _)| s == spec) {
            Some((_, layers)) => layers.push(*layer),
            None => out.push((spec.clone(), vec![*layer])),
        }
    }
    out
}

/// Pages of different sizes lie side by side in a block, so each must be one region, and with
/// several groups the layers must lie inside the block.
fn check_layout(groups: &[KvCacheGroup], layout: KvCacheLayout) -> Result<()> {
    let pages: BTreeSet<usize> =
        groups.iter().flat_map(|g| (0..g.layers.len()).map(|i| g.spec_of(i).page_size_bytes())).collect();
    if pages.len() <= 1 || (layout.is_block_compact() && (groups.len() == 1 || !layout.is_layer_compact())) {
        return Ok(());
    }
    Err(AttentionError::KvCache(format!(
        "KV cache layout {layout} cannot express this model's mixed page sizes ({:?}); a backend should declare \
         block-outermost supported layouts (e.g. BLHNC), or set --kv-layout BLHNC.",
        pages.into_iter().collect::<Vec<_>>()
    )))
}
