//! Lifetime: the model. Attention groups: inside a KV cache group, the layers of one backend, one
//! spec and one number of query heads share their metadata.

use super::kernel_block::{group_block_size, select_kernel_block_size};
use crate::{
    AttentionError, DynBackend, GroupInfo, KvCacheSpec, Result, RuleBook,
    group::kv::{block_table::block_table_width, page::RequestLimits},
    process::rules::LatentDims,
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

/// A layer of a KV cache group as grouping sees it.
#[derive(Clone, Debug)]
pub struct GroupLayer<'a, T> {
    /// Which layer.
    pub id: T,
    /// Its backend's rule book.
    pub rules: &'a RuleBook,
    /// What its cache holds.
    pub spec: KvCacheSpec,
    /// Query heads on this rank; `None` for layers that have none.
    pub num_heads: Option<usize>,
    /// Latent dimensions, where the layer is latent attention.
    pub latent: Option<LatentDims>,
    /// It computes only the tokens whose logits are wanted.
    pub fast_prefill: bool,
}

/// A KV cache group to divide.
#[derive(Clone, Debug)]
pub struct CacheGroupLayers<'a, T> {
    /// Tokens in a block.
    pub block_size: usize,
    /// Other layers' pages lie between this group's blocks.
    pub pages_between: bool,
    /// The layers, in order.
    pub layers: Vec<GroupLayer<'a, T>>,
}

/// Layers that share metadata.
#[derive(Clone, Debug)]
pub struct LayersOfGroup<'a, T> {
    /// Their backend's rule book.
    pub rules: &'a RuleBook,
    /// Their spec.
    pub spec: KvCacheSpec,
    /// Their query heads.
    pub num_heads: Option<usize>,
    /// Their latent dimensions.
    pub latent: Option<LatentDims>,
    /// They compute only the tokens whose logits are wanted.
    pub fast_prefill: bool,
    /// The layers.
    pub layers: Vec<T>,
    /// Tokens in a block that the kernel sees.
    pub kernel_block_size: usize,
}

/// The attention groups of one KV cache group.
#[derive(Clone, Debug)]
pub struct GroupedLayers<'a, T> {
    /// A block size that all of the group's backends take.
    pub block_size: usize,
    /// The attention groups.
    pub groups: Vec<LayersOfGroup<'a, T>>,
}

/// Divides KV cache groups into attention groups, and gives each its kernel block size.
///
/// # Errors
/// No common block size; batch invariance asked of a backend that hasn't it.
pub fn group_layers<'a, T: Clone>(
    groups: &[CacheGroupLayers<'a, T>],
    batch_invariant: bool,
) -> Result<Vec<GroupedLayers<'a, T>>> {
    groups.iter().map(|g| divide(g, batch_invariant)).collect()
}

fn divide<'a, T: Clone>(
    group: &CacheGroupLayers<'a, T>,
    batch_invariant: bool,
) -> Result<GroupedLayers<'a, T>> {
    let mut groups: Vec<LayersOfGroup<'a, T>> = vec![];
    for l in &group.layers {
        if batch_invariant && !l.rules.supports_batch_invariance {
            return Err(AttentionError::Unsupported {
                backend: l.rules.name.to_string(),
                what: "--batch-invariant".into(),
                remedy: "leave it out, or choose another backend with --attention-backend".into(),
            });
        }
        let same = |g: &&mut LayersOfGroup<'a, T>| {
            g.rules.name == l.rules.name
                && g.spec == l.spec
                && g.num_heads == l.num_heads
                && g.latent == l.latent
                && g.fast_prefill == l.fast_prefill
        };
        match groups.iter_mut().find(same) {
            Some(g) => g.layers.push(l.id.clone()),
            None => groups.push(LayersOfGroup {
                rules: l.rules,
                spec: l.spec.clone(),
                num_heads: l.num_heads,
                latent: l.latent,
                fast_prefill: l.fast_prefill,
                layers: vec![l.id.clone()],
                kernel_block_size: group.block_size,
            }),
        }
    }
    let has_blocks = |s: &KvCacheSpec| !matches!(s, KvCacheSpec::Mamba(_) | KvCacheSpec::EncoderOnly(_));
    let whole = !groups.iter().any(|g| has_blocks(&g.spec));
    let books: Vec<&RuleBook> = groups.iter().map(|g| g.rules).collect();
    let block_size = group_block_size(group.block_size, whole, group.pages_between, &books)?;
    for g in groups.iter_mut().filter(|g| has_blocks(&g.spec)) {
        g.kernel_block_size = select_kernel_block_size(block_size, &[g.rules])?;
    }
    Ok(GroupedLayers { block_size, groups })
}

/// The sizes that an attention group's builders and block tables have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionGroupSize {
    /// Tokens in a block of the KV cache group.
    pub manager_block_size: usize,
    /// Tokens in a block that the builder sees.
    pub block_size: usize,
    /// Entries of a block table's row, in the builder's blocks.
    pub block_table_width: usize,
    kernel_table: Option<usize>,
}

impl AttentionGroupSize {
    /// The sizes of a group of this spec; `group_block_size` is what all backends of its KV cache group
    /// take, `None` where there is no such choice.
    ///
    /// # Errors
    /// No size that the backend takes.
    pub fn new(
        spec: &KvCacheSpec,
        group_block_size: Option<usize>,
        rules: &RuleBook,
        limits: &RequestLimits,
    ) -> Result<Self> {
        let manager = spec.block_size();
        let attention = spec.attention().is_some();
        let block_size = match group_block_size {
            None => manager,
            Some(size) if attention => select_kernel_block_size(size, &[rules])?,
            Some(size) => size,
        };
        let seen = spec.clone().with_block_size(block_size);
        let blocks = seen.max_blocks_per_request(limits, limits.max_model_len);
        let width = block_table_width(blocks, block_size, Some(BLOCK_TABLE_ALIGNMENT))?;
        let splits = attention && block_size != manager;
        let rows = spec.max_blocks_per_request(limits, limits.max_model_len);
        let rows = block_table_width(rows, manager, Some(BLOCK_TABLE_ALIGNMENT))?;
        let kernel_table = splits.then(|| rows * (manager / block_size.max(1)));
        Ok(Self { manager_block_size: manager, block_size, block_table_width: width, kernel_table })
    }

    /// The kernel's block size, where it is smaller than the manager's.
    pub fn split_into(&self) -> Option<usize> {
        self.kernel_table.map(|_| self.block_size)
    }

    /// Entries of a row of the rewritten block table, where there is one.
    pub fn kernel_table_width(&self) -> Option<usize> {
        self.kernel_table
    }
}

/// Rows of block tables reach a multiple of so many tokens.
pub const BLOCK_TABLE_ALIGNMENT: usize = 128;

/// Settles which groups reuse an earlier one's metadata.
pub fn share(groups: &mut [AttentionGroupPlan]) {
    for i in 1..groups.len() {
        groups[i].shares_with = shares_with(&groups[..i], &groups[i]);
        groups[i].info.shares_metadata = groups[i].shares_with.is_some();
    }
}

/// The first earlier group whose metadata differs from this one's only in the block table: the same
/// spec, backend (so the same builder and configuration), query heads and kernel block size.
fn shares_with(earlier: &[AttentionGroupPlan], group: &AttentionGroupPlan) -> Option<usize> {
    if !group.backend.updates_block_table() {
        return None;
    }
    earlier.iter().position(|g| {
        g.shares_with.is_none()
            && g.backend.rules().name == group.backend.rules().name
            && g.info.spec == group.info.spec
            && g.info.num_heads == group.info.num_heads
            && g.info.latent == group.info.latent
            && g.info.kernel_block_size == group.info.kernel_block_size
    })
}
