//! Lifetime: one step. The build loop: one entry an attention group, whatever the number of layers.

use crate::{
    AttentionGroup, AttnLayer, CommonAttentionMetadata, DecodeSplit, Result,
    group::kv::block_table::expand_to_kernel_blocks, process::erased::ErasedMetadata,
};
use headway_tensor::{Exec, Persistent, View};
use std::sync::Arc;

/// A group's metadata of one step, with what the erasing layer needs beside it.
#[derive(Clone)]
pub struct StepEntry {
    metadata: Option<ErasedMetadata>,
    slot_mapping: View<i64>,
    split: DecodeSplit,
    num_tokens: usize,
    frozen: u64,
}

impl StepEntry {
    pub(crate) fn new(
        split: DecodeSplit,
        frozen: u64,
        common: &CommonAttentionMetadata,
        metadata: ErasedMetadata,
    ) -> Self {
        Self {
            metadata: Some(metadata),
            slot_mapping: common.slot_mapping.clone(),
            split,
            num_tokens: common.inputs.num_actual_tokens,
            frozen,
        }
    }

    /// The entry of a profile run: no metadata, so every layer fills its output with zeros.
    pub fn profile_run(num_tokens: usize) -> Self {
        Self {
            metadata: None,
            slot_mapping: View::from_vec(vec![]),
            split: DecodeSplit::default(),
            num_tokens,
            frozen: 0,
        }
    }

    pub(crate) fn erased(&self) -> Option<&ErasedMetadata> {
        self.metadata.as_ref()
    }

    /// Where each token's key and value go.
    pub fn slot_mapping(&self) -> &View<i64> {
        &self.slot_mapping
    }

    /// Decode rows first.
    pub fn split(&self) -> DecodeSplit {
        self.split
    }

    /// New tokens, padding included.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// What a captured graph froze: [`crate::MetadataBuilder::frozen`].
    pub fn frozen(&self) -> u64 {
        self.frozen
    }
}

/// A step's metadata: one entry an attention group; layers find theirs through a table made at
/// start-up. Clear it before the next step's inputs are written, or every buffer is allocated anew.
#[derive(Clone)]
pub struct StepMetadata {
    entries: Vec<StepEntry>,
    group_of_layer: Arc<[u16]>,
}

impl StepMetadata {
    /// Empty, with the attention group of each layer.
    pub fn new(group_of_layer: Arc<[u16]>) -> Self {
        Self { entries: vec![], group_of_layer }
    }

    /// A profile run's metadata.
    pub fn profile_run(group_of_layer: Arc<[u16]>, num_groups: usize, num_tokens: usize) -> Self {
        Self { entries: vec![StepEntry::profile_run(num_tokens); num_groups], group_of_layer }
    }

    /// The entry of a layer's group.
    ///
    /// # Errors
    /// A layer that start-up put in no group, or a step that wasn't built.
    pub fn layer(&self, layer: AttnLayer) -> Result<&StepEntry> {
        let group = self.group_of_layer.get(layer.0 as usize);
        group.and_then(|&g| self.entries.get(g as usize)).ok_or_else(|| {
            crate::AttentionError::Inputs(format!("no metadata was built for attention layer {}", layer.0))
        })
    }

    /// All entries, by attention group.
    pub fn entries(&self) -> &[StepEntry] {
        &self.entries
    }

    /// Drops the entries, so that persistent buffers can be written again.
    pub fn clear(&mut self) {
        self.entries.clear();
    }
}

/// Builds every group's metadata for one micro-batch, once a step. `commons` is indexed by KV cache
/// group; groups of fast prefill get their `fast_prefill` where it has one. Groups whose kernels take smaller blocks get their table rewritten first; groups that share
/// reuse the earlier group's metadata with their own table.
///
/// # Errors
/// A builder's own; inputs that contradict a group.
pub fn build_step(
    groups: &mut [AttentionGroup],
    cx: &dyn Exec,
    commons: &[CommonAttentionMetadata],
    micro_batch: usize,
    capture: bool,
    out: &mut StepMetadata,
) -> Result<()> {
    out.entries.clear();
    let batches: Vec<(usize, bool)> =
        groups.iter().map(|g| (g.kv_cache_group(), g.info().fast_prefill)).collect();
    let common_of = |&(group, fast): &(usize, bool)| Some(commons.get(group)?.of_group(fast));
    for (group, batch_of) in groups.iter_mut().zip(&batches) {
        let missing = |what| crate::AttentionError::Inputs(format!("the step lacks {what}"));
        let factor = group.info().blocks_per_manager_block()?;
        let masked = group.info().spec.attention().is_some();
        let common = common_of(batch_of).ok_or_else(|| missing("a KV cache group's inputs"))?;
        // Sharing was settled at start-up; a step in which the groups' batches differ builds afresh.
        let first = group.shares_with().filter(|&g| {
            let earlier = batches.get(g).and_then(common_of);
            earlier.is_some_and(|e| e.differs_in_table_alone(common, masked))
        });
        let batch =
            group.micro_batches.get_mut(micro_batch).ok_or_else(|| missing("a micro-batch's builder"))?;
        let rewritten = match batch.kernel_block_table.as_mut() {
            Some(table) => Some(in_kernel_blocks(cx, common, factor, table)?),
            None => None,
        };
        let common = rewritten.as_ref().unwrap_or(common);
        let entry = match first {
            Some(first) => {
                group.table_updates += 1;
                let first = out.entries.get(first).ok_or_else(|| missing("the group to share with"))?;
                batch.builder.update_block_table(cx, first, common)?
            }
            None => {
                group.builds += 1;
                batch.builder.build(cx, common, capture)?
            }
        };
        out.entries.push(entry);
    }
    Ok(())
}

/// The group's metadata with its block table in kernel blocks, written to where it always is.
fn in_kernel_blocks(
    cx: &dyn Exec,
    common: &CommonAttentionMetadata,
    factor: usize,
    table: &mut Persistent<i32>,
) -> Result<CommonAttentionMetadata> {
    let blocks = common.block_table.host();
    let n = blocks.len() * factor;
    if n > table.capacity() {
        return Err(crate::AttentionError::Inputs(format!(
            "a block table of {} blocks is wider than the {} kernel blocks that start-up made room for",
            blocks.len(),
            table.capacity()
        )));
    }
    let block_table = table.write_dual(cx, n, |o| expand_to_kernel_blocks(blocks, factor, o));
    Ok(CommonAttentionMetadata {
        block_table,
        block_table_stride: common.block_table_stride * factor,
        ..common.clone()
    })
}

const _: fn() = || {
    fn send_and_sync<T: Send + Sync>() {}
    send_and_sync::<StepMetadata>();
    send_and_sync::<CommonAttentionMetadata>();
    send_and_sync::<crate::LayerKernel>();
    send_and_sync::<crate::Registry>();
    fn send<T: Send>() {}
    send::<AttentionGroup>();
};
